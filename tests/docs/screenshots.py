"""Make the screenshots of the guides, light and dark: `make screenshots`.

Those of docs/guides/viewer.md show the episodes of `support.written_episodes`, that of docs/guides/evaluation.md an
evaluation that is written here. They are taken in headless Chromium.
"""

import asyncio
import io
import json
import random
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from strands_env.core import Action, Observation, RewardResult, StepResult, TaskContext, TerminationReason
from strands_env.eval import Evaluator
from strands_env.eval.metrics import Prices
from strands_env.report import report_page
from strands_sglang.viewer import render
from support import written_episodes as written
from support.environments import StubEnvironment

ASSETS = Path(__file__).parents[2] / "docs" / "assets"

SHOTS = {
    "viewer-episode": ("view", "#episode-3", []),
    "viewer-finding": ("view", "#finding-1", []),
    "viewer-probability": ("view", "#episode-0", ["c", "c", "c", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown"]),
    "viewer-siblings": ("view", "#siblings-0", []),
    "viewer-credit": ("view", "#credit", []),
    "report": ("report", "", []),
}
"""The page, the address and the keys of each shot."""


def write_evaluation(folder):
    """Write an evaluation of 40 tasks x 8 samples, some easy and some hard."""
    draw = random.Random(4)

    def play(action):
        n = action.task_context.id
        right, cut = draw.random() < 1 - n / 45, draw.random() < n / 300
        calls, sampled = draw.randint(2, 4), int(draw.lognormvariate(5.4 + n / 60, 0.4))
        reason = TerminationReason.MAX_TOKENS_REACHED if cut else TerminationReason.TASK_COMPLETE
        said = [("user", action.message), ("assistant", f"It is {action.task_context.ground_truth if right else n}.")]
        return StepResult(
            observation=Observation(
                messages=[{"role": role, "content": [{"text": text}]} for role, text in said],
                metrics={
                    "model_calls": calls,
                    "sampled_tokens": sampled,
                    "input_tokens": 700 * calls + sampled,
                    "cached_tokens": 600 * (calls - 1),
                },
            ),
            reward=RewardResult(reward=float(right and not cut)),
            termination_reason=reason,
        )

    tasks = [
        Action(
            message=f"What is {n + 12} * {3 * n + 7}?",
            task_context=TaskContext(id=n, ground_truth=(n + 12) * (3 * n + 7)),
        )
        for n in range(40)
    ]
    evaluator = Evaluator(StubEnvironment(play).factory, 8, max_concurrency=1, output_path=folder)
    evaluator.benchmark_name = "products"
    asyncio.run(evaluator.run(tasks))
    ended = 1_750_000_000.0
    records = [json.loads(line) for line in (folder / "results.jsonl").read_bytes().splitlines()]
    for record in records:  # as long as a server would take
        record["seconds"] = record["observation"]["metrics"]["sampled_tokens"] * draw.uniform(0.02, 0.04)
        record["ended_at"] = ended = ended + record["seconds"] / 10
    (folder / "results.jsonl").write_text("".join(f"{json.dumps(one, separators=(',', ':'))}\n" for one in records))


def main():
    """Write `docs/assets/NAME-SCHEME.webp`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        write_evaluation(Path(folder) / "run")
        pages = {
            "view": render(written.groups_of_jars(written.PICTURE), written.findings_of_jars()),
            "report": report_page(Path(folder) / "run", success_threshold=1.0, prices=Prices(0.15, 0.02, 0.6)),
        }
        for name, html in pages.items():
            (Path(folder) / f"{name}.html").write_text(html, "utf-8")
        take(Path(folder), chromium)


def take(folder, chromium):
    """Take the shots of the pages in a folder."""
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            for scheme in ("light", "dark"):
                for name, (which, address, keys) in SHOTS.items():
                    context = browser.new_context(
                        viewport={"width": 1120, "height": 1000 if which == "report" else 770}, color_scheme=scheme
                    )
                    page = context.new_page()
                    page.goto(f"{(folder / which).as_uri()}.html{address}")
                    page.wait_for_selector("html[data-ready]")
                    page.evaluate("document.querySelector('.report > .bar')?.scrollIntoView()")  # below its tables
                    if keys:
                        page.locator(".strip").focus()
                    for key in keys:
                        page.keyboard.press(key)
                    shot = Image.open(io.BytesIO(page.screenshot()))
                    target = ASSETS / f"{name}-{scheme}.webp"
                    shot.convert("RGB").save(target, "WEBP", quality=82, method=6)
                    print(f"{target.name}: {target.stat().st_size // 1000} kB")
                    context.close()


if __name__ == "__main__":
    main()
