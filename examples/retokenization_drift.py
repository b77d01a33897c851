"""Measure on a real SGLang server how many rollouts would have different tokens if they were rebuilt from text.

    python examples/retokenization_drift.py [--rollouts 200] [--page docs/understand/tokens.md]

Rolls out the calculator agent of `make demo`, decodes each recorded sequence, encodes the text again, and counts the
tokens that differ. Uses the server in SGLANG_BASE_URL, or starts one on this machine's CPU; 200 rollouts then take
about five minutes on two cores. Of the page, only what is between the two marks is replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from calculator_demo import EXPRESSIONS, SAMPLING, DemoError, interrupt, roll_out, server, template_for

from strands_sglang import SGLangClient, SGLangClientError, SGLangModel, Trajectory, get_tokenizer, local
from strands_sglang.drift import Drift

CONCURRENT = 32
START, END = "<!-- written by retokenization_drift.py -->", "<!-- end -->"


def main() -> int:
    """Measure and print; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=int, default=200, help="number of rollouts (default: %(default)s)")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write the report into this page")
    arguments = parser.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.getLogger("strands").setLevel(logging.CRITICAL)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with server() as (base_url, tokenizer_path):
            report = asyncio.run(measure(base_url, tokenizer_path, arguments.rollouts))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except (local.LocalServerError, SGLangClientError, DemoError) as error:
        print(f"the measurement failed: {error}", file=sys.stderr)
        return 1
    print(report)
    if arguments.page is not None:
        before, _, rest = arguments.page.read_text(encoding="utf-8").partition(START)
        _, _, after = rest.partition(END)
        arguments.page.write_text(f"{before}{START}\n\n{report}\n{END}{after}", encoding="utf-8")
    return 0


async def measure(base_url: str, tokenizer_path: str, count: int) -> str:
    """Run the rollouts and return the report."""
    tokenizer = get_tokenizer(tokenizer_path)
    chat_template = template_for(tokenizer)
    slots = asyncio.Semaphore(CONCURRENT)
    trajectories: list[Trajectory] = []

    async def one(number: int) -> None:
        async with slots:
            model = SGLangModel(
                tokenizer=tokenizer, client=client, sampling_params=SAMPLING, chat_template=chat_template
            )
            await roll_out(model, EXPRESSIONS[number % len(EXPRESSIONS)])
            trajectories.append(model.trajectory)
            print(f"\r{len(trajectories)} of {count} rollouts", end="", file=sys.stderr, flush=True)

    async with SGLangClient(base_url, max_retries=5) as client:
        info = await client.model_info()
        await one(0)
        await asyncio.gather(*(one(number) for number in range(1, count)))
    print(file=sys.stderr)
    name = Path(str(info.get("model_path", "the model"))).name
    return describe(name, trajectories, tokenizer)


def describe(name: str, trajectories: list[Trajectory], tokenizer: Any) -> str:
    """Return the report as Markdown."""
    drifts = [trajectory.drift(tokenizer) for trajectory in trajectories]
    total = sum(drifts, start=Drift(()))
    affected = sum(any(sequence.is_affected for sequence in drift.sequences) for drift in drifts)
    sampled = sum(sum(sequence.loss_mask) for trajectory in trajectories for sequence in trajectory.sequences())
    causes = ", ".join(f"{drifted} {cause}" for cause, drifted in total.drifted.items())
    lines = [
        "| Figure | Measured |",
        "|---|---|",
        f"| model | {name}, temperature {SAMPLING['temperature']} |",
        f"| rollouts that drifted | {affected} of {len(trajectories)} ({affected / len(trajectories):.1%}) |",
        f"| sampled tokens | {sampled:,} of {total.tokens:,} |",
        f"| drifted tokens by cause | {causes} |",
    ]
    if drift := most_frequent(trajectories, drifts, tokenizer):
        lines.append(f"| most frequent drift | {drift} |")
    return "\n".join(lines)


def most_frequent(trajectories: list[Trajectory], drifts: list[Drift], tokenizer: Any) -> str:
    """Describe how the first drifted tokens of a sequence most often change; empty if none drifted."""
    seen: Counter[str] = Counter()
    for trajectory, drift in zip(trajectories, drifts, strict=True):
        for sequence, found in zip(trajectory.sequences(), drift.sequences, strict=True):
            if found.first is not None:
                old = sequence.token_ids[found.first : found.first + 2]
                new = tokenizer.encode(tokenizer.decode(old), add_special_tokens=False)
                seen[f"`{shown(old, tokenizer)}` becomes `{shown(new, tokenizer)}`"] += 1
    return "".join(f"{change}: {times} times" for change, times in seen.most_common(1))


def shown(ids: list[int], tokenizer: Any) -> str:
    """Format ids for a table, token by token."""
    return " ".join(repr(tokenizer.decode([token_id])).replace("|", "\\|").replace("`", "'") for token_id in ids)


if __name__ == "__main__":
    sys.exit(main())
