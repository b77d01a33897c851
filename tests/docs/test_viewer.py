"""The page of recorded episodes in a real browser: speed, size, findings, keys, accessibility, hostile content."""

import asyncio
import hashlib
import json
import random
import shutil
import subprocess
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from playwright.sync_api import sync_playwright

from strands_env.core import Action, Environment, Observation, RewardResult, StepResult, TaskContext, TerminationReason
from strands_env.eval import Evaluator
from strands_env.report import comparison_page, report_page
from strands_sglang import SGLangModel
from strands_sglang.inspection.doctor import findings
from strands_sglang.inspection.formats.trajectories import inspect
from strands_sglang.inspection.reading import read
from strands_sglang.inspection.records import Group
from strands_sglang.local.install import home
from strands_sglang.testing import ScriptedSGLang
from strands_sglang.trajectory.trajectory import Trajectory
from strands_sglang.viewer import render
from support import specimens, written_episodes as written
from support.environments import Contains, StubEnvironment, tasks
from support.plants import EVALUATION_FAULTS, STEP_FAULTS, TRAJECTORY_FAULTS, WRITTEN_FAULTS

AXE = ("axe-core@4.11.0", "39bed7d72308f6d620789c169d699bfd7e8da80f65b545821a6b2215c3e83107")
VIEWS = ("overview", "episode-3", "siblings-0", "credit", "drift")

COUNT_NODES = """() => {
    let nodes = 0;
    const walker = document.createTreeWalker(document, NodeFilter.SHOW_ALL);
    while (walker.nextNode()) nodes++;
    return nodes;
}"""

# Scrolls through everything in frames, as a wheel does, and returns the longest task in ms.
SCROLL = """(selector) => new Promise((done) => {
    const viewport = document.querySelector(selector);
    let longest = 0;
    const observer = new PerformanceObserver((list) => {
        for (const entry of list.getEntries()) longest = Math.max(longest, entry.duration);
    });
    observer.observe({ entryTypes: ["longtask"] });
    let frames = 0;
    const move = () => {
        viewport.scrollTop += frames % 30 === 29 ? viewport.scrollHeight / 10 : 240;
        if (++frames < 240) requestAnimationFrame(move);
        else setTimeout(() => { observer.disconnect(); done(longest); }, 100);
    };
    requestAnimationFrame(move);
})"""


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "no Chromium on the PATH: apt-get install chromium"
    with sync_playwright() as playwright:
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as launched:
            yield launched


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Pages on disk by name."""
    folder = tmp_path_factory.mktemp("pages")
    made = {
        "jars": render(written.groups_of_jars(written.PICTURE), written.findings_of_jars()),
        "hostile": render([written.hostile_group()], [written.Finding("x", text, text) for text in written.HOSTILE]),
    }
    for name, html in made.items():
        (folder / f"{name}.html").write_text(html, encoding="utf-8", errors="replace")
    return folder


@pytest.fixture
def open_page(browser):
    """Opens a page from disk, and fails in the end if it requested anything or reported an error."""
    contexts, wrong = [], []

    def opened(path, address="", *, size=(1440, 900), scheme="light"):
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: wrong.append(request.url) if not _is_own(request.url, path) else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: wrong.append(dialog.message))
        page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
        page.goto(f"{path.as_uri()}{address}")
        page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def wait_until(page, condition):
    """Wait until JavaScript is true. `wait_for_function` evaluates it inside the page, whose policy forbids that."""
    ends = time.monotonic() + 30
    while not page.evaluate(condition):
        assert time.monotonic() < ends, condition
        page.wait_for_timeout(10)


def _is_own(url, path):
    return url.startswith((path.as_uri(), "data:"))


@pytest.fixture(scope="module")
def long_page(tmp_path_factory):
    """A page of 8 siblings with 100,000 tokens each, and the seconds of CPU time that it took."""
    group = written.long_group()
    began = time.process_time()
    html = render([group], [])
    took = time.process_time() - began
    path = tmp_path_factory.mktemp("long") / "long.html"
    path.write_text(html, encoding="utf-8")
    return path, took


def test_a_page_of_800_000_tokens_is_small_and_fast(long_page, open_page):
    path, took = long_page
    assert path.stat().st_size <= 15_000_000
    assert took <= 10
    opening = []
    for address in ("", "#episode-0", "#episode-7-sequence-0-token-99000"):
        tries = []
        while not tries or (min(tries) >= 3 and len(tries) < 6):  # the machine's other work delays any page
            began = time.perf_counter()
            page = open_page(path, address)
            tries.append(time.perf_counter() - began)
            page.close()
        opening.append(min(tries))
    print(f"{path.stat().st_size:,} bytes, made in {took:.1f} s, opened in {', '.join(f'{s:.2f}' for s in opening)} s")
    assert max(opening) < 3


@pytest.mark.parametrize(("address", "viewport"), [("#episode-0", ".strip"), ("#siblings-0", ".aligned")])
def test_scrolling_is_smooth_and_few_nodes_exist(address, viewport, long_page, open_page):
    page = open_page(long_page[0], address)
    longest = []
    while not longest or (min(longest) > 100 and len(longest) < 20):  # the machine's other work stretches any task
        longest.append(page.evaluate(SCROLL, viewport))
        assert page.evaluate(COUNT_NODES) <= 5000
    print(f"{address}: longest task {min(longest):.0f} ms, {page.evaluate(COUNT_NODES)} nodes")
    assert min(longest) <= 100
    page.set_viewport_size({"width": 3840, "height": 2160})
    wait_until(page, "document.querySelectorAll('.tokens').length > 60")
    assert page.evaluate(COUNT_NODES) <= 5000


def test_each_finding_is_one_click_away(files, open_page):
    for number, finding in enumerate(written.findings_of_jars()):
        page = open_page(files / "jars.html")
        page.locator(".findings a.finding").nth(number).click()
        page.wait_for_selector(f"#banner[data-finding='{number + 1}']")
        assert finding.why in page.locator("#banner").inner_text()
        if finding.token is not None:
            marked = page.locator(".t.hit")
            assert marked.first.is_visible() and marked.count() > 2
        elif finding.turn is not None:
            chosen = page.locator("button.turn.chosen")
            assert f"Turn {finding.turn}" in chosen.inner_text()
            assert page.locator(".t.current").is_visible()
        else:
            assert page.locator(".heads .head", has_text="reward 1").count() == 2
        page.close()


@pytest.fixture(scope="module")
def healthy(chatml_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("healthy")
    with ThreadPoolExecutor(max_workers=1) as pool:  # Playwright's event loop runs in this thread
        for done in (
            pool.submit(specimens.write_step, folder / "step" / "step-000003", chatml_tokenizer, experts=False),
            pool.submit(specimens.write_evaluation, folder / "evaluation", chatml_tokenizer),
            pool.submit(specimens.write_trajectories, folder / "trajectories", chatml_tokenizer, 12),
        ):
            done.result()
    return folder


FAULTS = [
    *(("step", plant) for plant in (*TRAJECTORY_FAULTS.values(), *STEP_FAULTS.values())),
    *(("evaluation", plant) for plant in EVALUATION_FAULTS.values()),
    *(("trajectories", plant) for plant in WRITTEN_FAULTS.values()),
]


@pytest.mark.parametrize("specimen, plant", FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_planted_fault_is_within_two_clicks(specimen, plant, healthy, tmp_path, open_page):
    folder, rng = tmp_path / "faulty", random.Random(plant.__name__)
    shutil.copytree(healthy / specimen, folder)
    assert any(plant(folder, rng) for _ in range(20))
    groups = read([folder])
    names = {(group.id, episode.id): episode.name for group in groups for episode in group.episodes}
    found = findings(groups)
    (tmp_path / "page.html").write_text(render(groups, found), encoding="utf-8")
    page = open_page(tmp_path / "page.html")
    for number, finding in enumerate(found[:3]):
        page.goto(f"{(tmp_path / 'page.html').as_uri()}#overview")
        page.locator(f".overview a.finding[href='#finding-{number + 1}']").click()
        page.wait_for_selector(f"#banner[data-finding='{number + 1}']")
        assert finding.why in page.locator("#banner").inner_text()
        if finding.token is not None:
            page.locator(".t.hit").first.wait_for()
        elif finding.turn is not None:
            assert f"Turn {finding.turn} " in page.locator("button.turn.chosen").inner_text()
        elif finding.episode is not None:
            shown = page.locator(".side select").evaluate("all => all.selectedOptions[0].text")
            assert shown.split(" · ")[0] == names[finding.group, finding.episode]
        elif finding.group is not None:
            assert page.locator(".heads .head").count() > 1


def test_a_page_opens_at_a_finding(files, open_page):
    page = open_page(files / "jars.html", "#finding-1")
    assert page.locator(".t.hit").first.is_visible()
    page.keyboard.press("f")
    wait_until(page, "location.hash === '#finding-2'")


def test_keys_reach_everything(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    page.locator(".strip").focus()
    before = page.locator(".life").inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".life").inner_text() != before
    at = int(page.locator(".t.current").get_attribute("data-at"))
    page.keyboard.press("ArrowDown")
    assert int(page.locator(".t.current").get_attribute("data-at")) > at
    page.keyboard.press("End")
    assert "Turn\n2" in page.locator(".life").inner_text()
    page.keyboard.press("c")
    assert page.get_by_label("Color by").input_value() == "mask"
    page.keyboard.press("k")
    assert "Turn 1" in page.locator("button.turn.chosen").inner_text()
    assert page.locator(".messages.now").get_attribute("aria-label") == "Turn 1"
    page.keyboard.press("/")
    page.keyboard.type("calculator")
    page.keyboard.press("Enter")
    assert "(4 of 4)" in page.locator(".matches").inner_text()
    assert page.locator(".t.hit").count() > 0
    page.keyboard.press("Escape")
    page.keyboard.press("3")
    page.wait_for_selector(".lanes.difference")


def test_turns_tokens_and_conversation_keep_in_step(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    assert page.locator(".messages.now .answer").is_visible()
    scrolled = "document.querySelector('.conversation').scrollTop"
    at_answer = page.evaluate(scrolled)
    page.locator(".strip").press("Home")
    assert page.evaluate(scrolled) < at_answer
    page.locator("button.turn", has=page.get_by_text("Turn 3", exact=True)).click()  # the fork is in another sequence
    assert page.get_by_label("Sequence", exact=True).input_value() == "1"
    assert page.locator(".messages.now").get_attribute("aria-label") == "Turn 3"
    page.locator(".messages", has_text="Turn 0").first.click()
    assert "Turn 0" in page.locator("button.turn.chosen").inner_text()
    assert "opens the first sequence" in page.locator(".life").inner_text()


SAID = "\n".join(
    (
        "Hi 2*3*4, 2**3 = 8 and 2**4, **25 * 17**",
        r"\(x^2\) &amp; <b>[a](http://127.0.0.1:9/) ![b](http://127.0.0.1:9/b.png) <http://127.0.0.1:9/>",
        "1. a list item",
        "   ```python",
        "   x =  1\t# two spaces, a tab",
        "   ```",
        '[r]: http://127.0.0.1:9/r "t"',
        "",
        "[r]   ",
    )
)
TEXTS = "all => all.map(one => one.textContent)"
INPUT = '{"a": 1.0, "b": 12345678901234567890, "c": "  "}'


def page_of(folder, *parts):
    """A page with an episode of one turn in which these parts are said."""
    author = written.Author(written.Vocabulary(), 1)
    author.turn("What is it? ", "It is 2.", [written.Said(*part) for part in parts], why=written.Reason("first"))
    episode = inspect(Trajectory.of_turns(author.turns), "said")
    path = folder / "said.html"
    path.write_text(render([Group("said", [episode], vocabulary=author.vocabulary.texts)]), encoding="utf-8")
    return path


def test_what_was_said_is_shown_as_it_was_said(tmp_path, open_page):
    parts = [
        *((role, "text", SAID) for role in ("system", "user")),
        ("tool", "result", INPUT, "search"),
        ("assistant", "reasoning", SAID),
        ("assistant", "text", SAID),
        ("assistant", "call", INPUT, "search"),
    ]
    path = page_of(tmp_path, *parts)
    page = open_page(path)
    assert page.locator(".card pre").evaluate_all(TEXTS) == [text for _, _, text, *_ in parts]
    page.keyboard.press("r")
    assert page.get_by_role("button", name="Render").get_attribute("aria-pressed") == "true"
    assert page.locator(".card > pre").evaluate_all(TEXTS) == [SAID, SAID, INPUT, INPUT]
    answer = page.locator(".card.from-assistant .body")
    assert "Hi 2*3*4, 2**3 = 8 and 2**4" in answer.inner_text()
    assert answer.locator("strong").inner_text() == "25 * 17"
    assert answer.locator("ol > li > pre").inner_text() == "x =  1\t# two spaces, a tab\n"
    assert SAID.splitlines()[1] in answer.inner_text()
    assert answer.locator("a, img, b").count() == 0
    page.keyboard.press("r")
    assert page.locator(".card .body").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_worked_example_has_one_color_in_both_panes(scheme, tmp_path, open_page):
    author = written.Author(written.Vocabulary(), 1)
    turn = author.turn("Two? It is 2. Three? ", "It is 3.", [written.Said("assistant", "text", "It is 3.")])
    parts = (("user", "Two?"), ("assistant", "It is 2."), ("user", "Three?"))
    turn.said = tuple(written.Said(role, "text", text) for role, text in parts)
    group = Group("said", [inspect(Trajectory.of_turns(author.turns), "said")], vocabulary=author.vocabulary.texts)
    (tmp_path / "said.html").write_text(render([group]), encoding="utf-8")
    page = open_page(tmp_path / "said.html", scheme=scheme)
    messages = page.locator(".card").evaluate_all("all => all.map(one => getComputedStyle(one).borderLeftColor)")
    tokens = page.locator(".strip .t").evaluate_all(
        "all => all.map(one => [one.className.match(/writer-(\\w+)/)[1], getComputedStyle(one).backgroundColor])"
    )
    colors = dict(tokens)
    assert messages == [colors[writer] for writer in ("user", "history", "user", "model")]
    assert len({*messages}) == 3


def test_a_long_message_is_shown_whole(tmp_path, open_page):
    said = "word  " * 3000
    page = open_page(page_of(tmp_path, ("assistant", "text", said)))
    page.get_by_role("button", name="12,000 more characters").click()
    assert page.locator(".card pre").last.text_content() == said
    page.keyboard.press("r")
    assert page.locator(".card .body p").inner_text() == said.strip()


def test_what_is_too_long_to_render_is_shown_as_it_was_said(tmp_path, open_page):
    page = open_page(page_of(tmp_path, ("assistant", "text", "*a* " * 600)))
    page.keyboard.press("r")
    assert page.locator(".card.from-assistant header").inner_text() == "assistant · too long to render"
    assert page.locator(".card pre").last.text_content() == "*a* " * 600


def test_conversations_read_as_people_write_them(files, open_page):
    page = open_page(files / "jars.html", "#episode-3-sequence-0-turn-2")
    page.keyboard.press("r")
    text = page.locator(".messages.now .card.from-assistant")
    assert text.locator("strong").inner_text() == "12,096 jars"
    assert text.locator("td").count() == 4
    assert text.locator("li code").inner_text() == "48 * 36 * 7"
    page.locator("button.turn", has=page.get_by_text("Turn 0", exact=True)).click()
    assert "calculator" in page.locator(".messages.now .card.call header").inner_text()
    other = open_page(files / "jars.html", "#episode-0")
    assert other.locator(".card.image img").evaluate("image => image.naturalWidth") == 160


def test_what_siblings_have_in_common_is_folded(files, open_page):
    page = open_page(files / "jars.html", "#siblings-0")
    tokens = page.locator(".aligned")
    assert "One·lorry" not in tokens.inner_text() and tokens.locator(".difference").is_visible()
    [common] = [line for line in page.locator(".caption").all_inner_texts() if "equal in the first" in line]
    count = common.split("first ")[1].split()[0]
    fold = page.get_by_role("button", name=f"{count} common tokens")
    fold.click()
    assert fold.get_attribute("aria-expanded") == "true" and "<|im_start|>system" in tokens.inner_text()
    fold.click()
    assert "<|im_start|>system" not in tokens.inner_text()


def test_every_token_has_an_address(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    page.locator(".strip").press("End")
    end = page.locator(".t.current").get_attribute("data-at")
    wait_until(page, f"location.hash === '#episode-3-sequence-0-token-{end}'")
    life = page.locator(".life dl").inner_text()
    page.reload()
    page.wait_for_selector("html[data-ready]")
    assert page.locator(".life dl").inner_text() == life
    page.get_by_label("Sequence", exact=True).select_option("1")
    wait_until(page, "location.hash === '#episode-3-sequence-1'")
    page.locator(".t.current").wait_for()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy link").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.url and "#episode-3-sequence-1-token-" in copied


@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("#episode-99", "The page has no episode 99."),
        ("#siblings-99", "The page has no group 99."),
        ("#episode-3-sequence-99", "The episode has no sequence 99."),
        ("#episode-3-sequence-0-turn-99", "The episode has no turn 99."),
        ("#episode-3-sequence-0-token-99999", "The episode has no token 99999."),
    ],
)
def test_an_address_of_nothing_says_so(address, told, files, open_page):
    page = open_page(files / "jars.html", address)
    assert page.locator("#banner").inner_text() == told
    page.evaluate("location.hash = '#episode-2'")
    page.locator("#banner").wait_for(state="hidden")


def test_an_episode_opens_at_its_chosen_token(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    assert page.locator(".t.current").is_visible() and page.locator(".messages.now .answer").is_visible()


def test_the_card_tells_of_the_token_that_is_marked(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    chosen = page.locator(".life dl").inner_text()
    page.locator(".t", has_text="Seven").hover()
    assert "Seven" in page.locator(".t.hovered").inner_text() and "Seven" in page.locator(".life").inner_text()
    page.locator(".life").hover()
    assert page.locator(".life dl").inner_text() == chosen
    assert page.locator(".t.hovered").evaluate("token => token.classList.contains('current')")


def test_the_reason_of_a_turn_is_shown_whole(files, open_page):
    page = open_page(files / "jars.html", "#episode-3")
    turn = page.locator("button.turn", has=page.get_by_text("Turn 3", exact=True))
    assert "message 2 (user) is not the recorded one (user) (compared with turn 2)" in turn.inner_text()
    turn.click()
    page.get_by_text("Compare what was recorded with what was sent").click()
    assert page.locator(".differs pre").all_inner_texts() == ["1728", "1728 jars on one lorry"]
    cut = (
        "all => all.filter(one => one.scrollWidth > one.clientWidth || one.scrollHeight > one.clientHeight + 1).length"
    )
    for width in (1440, 700, 390):
        page.set_viewport_size({"width": width, "height": 900})
        wait_until(page, f"({cut})([...document.querySelectorAll('.tree .row, .tree .lines, .tree .why')]) === 0")
    page.set_viewport_size({"width": 1440, "height": 900})
    assert page.locator(".tree .agent").all_inner_texts() == ["Agent jars", "Agent checker", "Outside an agent's loop"]
    page.get_by_text("What the words mean").click()
    assert "a grammar chose among the tokens" in page.locator(".states").inner_text()


def test_a_search_finds_what_is_in_other_episodes(files, open_page):
    page = open_page(files / "jars.html", "#episode-0")
    told = page.locator(".matches")
    page.keyboard.press("/")
    assert page.locator(".help").is_visible()
    page.evaluate(
        """() => {
            window.seen = [];
            const told = document.querySelector(".matches");
            new MutationObserver(() => seen.push(told.textContent)).observe(told, { childList: true });
        }"""
    )
    page.keyboard.type("checked with")
    expected = "nothing in this sequence; 1 match in 1 episode"
    wait_until(page, f"document.querySelector('.matches').textContent === '{expected}'")
    assert not [text for text in page.evaluate("seen") if text.startswith("nothing found")]
    [result] = page.locator("a.match").all_inner_texts()
    assert result.startswith("jars-3") and "checked·with·`48" in result
    page.keyboard.press("Enter")
    page.locator(".t.hit.current").wait_for()
    assert "checked with `48" in page.locator(".messages.now").inner_text()
    assert told.inner_text().startswith("1 match in this sequence")
    page.get_by_role("searchbox").fill("trained")
    wait_until(page, "document.querySelector('.matches').textContent.endsWith('10 episodes')")
    episodes = [episode for group in written.groups_of_jars() for episode in group.episodes]
    trained = sum(int(sequence.mask.sum()) for episode in episodes for sequence in episode.sequences)
    assert f"; {trained:,} tokens in 10 episodes" in told.inner_text()
    page.get_by_role("searchbox").fill("reward:1")
    wait_until(page, "document.querySelector('.matches').textContent.includes('not a property')")
    assert '"reward" is not a property' in told.inner_text() and "logprob<-5" in told.inner_text()


def cells(page, name, view=".overview"):
    """The cells in view of a column of a view's table, headings of groups left out."""
    heads = page.locator(f"{view} .rows .head .cell").all_inner_texts()
    at = next(i for i, head in enumerate(heads) if head.rstrip(" ▲▼") == name)
    rows = page.locator(f"{view} .rows .row:not(.group):not(:has(.group))")
    return rows.evaluate_all(
        "(rows, at) => rows.map(row => [parseFloat(row.style.top), row.children[at].innerText])"
        ".sort((a, b) => a[0] - b[0]).map(([, text]) => text)",
        at,
    )


def test_the_overview_is_sorted_and_filtered(files, open_page):
    page = open_page(files / "jars.html", "#overview")
    assert page.locator(".overview .group").count() == 2
    page.locator(".overview .head button", has_text="Reward").click()
    rewards = [float(text) for text in cells(page, "Reward")]
    assert rewards == sorted(rewards) and set(rewards) == {0.0, 1.0} and page.locator(".overview .group").count() == 0
    assert set(page.locator(".overview .chip.bad").all_inner_texts()) == {"0"}
    assert all(text.startswith("A crate holds") for text in cells(page, "Question"))
    page.get_by_label("Filter the episodes").fill("1,728 jars")
    assert cells(page, "Episode") == ["jars-2"] and "1 of 10 shown" in page.locator(".overview").inner_text()


def test_credit_begins_with_a_verdict(tmp_path, open_page):
    groups = written.groups_of_jars()
    first = groups[0].episodes[0]
    (tmp_path / "exact.html").write_text(render(groups, []))
    page = open_page(tmp_path / "exact.html", "#credit")
    assert page.locator(".verdict.good").inner_text() == "All 10 episodes: exact with your loss."
    assert page.locator(".credit .off, .credit .trainer").count() == 0
    page.get_by_label("compare losses").check()
    assert page.locator(".credit .head .trainer").count() > 3
    row = first.sequences[0].row
    first.sequences[0].row = replace(row, loss_weight=row.loss_weight / 2)
    (tmp_path / "off.html").write_text(render(groups, []))
    page = open_page(tmp_path / "off.html", "#credit")
    assert page.locator(".verdict.bad").inner_text().startswith("1 episode of 10 is not exact")
    shown = page.locator(".credit .row").filter(has=page.get_by_role("link", name=first.id, exact=True))
    assert shown.locator(".off").all_inner_texts()[-1] == "0.5×"


def test_credit_says_that_a_group_is_flat(tmp_path, open_page):
    (tmp_path / "flat.html").write_text(render(written.groups_of_jars()[1:], []))
    page = open_page(tmp_path / "flat.html", "#credit")
    assert page.locator(".verdict").inner_text().startswith("This group is flat: each advantage is 0")
    assert "⚑: a finding" in page.locator(".credit").inner_text()


@pytest.mark.parametrize("address", ["", "#finding-1", "#episode-0", "#siblings-0", "#credit", "#drift", "#<b>"])
def test_hostile_content_is_only_text(address, files, open_page):
    page = open_page(files / "hostile.html", address)
    page.mouse.move(700, 300)
    page.keyboard.press("r")
    page.wait_for_timeout(50)
    assert page.evaluate("window.pwned === undefined")
    assert page.locator("#main").locator("script, iframe, style, meta, object, a[href^='javascript']").count() == 0
    assert page.locator("img").count() == 0
    text = page.evaluate("document.body.innerText")
    assert not set(text) & set("\x00\x07\x1b\x9b\u202e\u2066\u200b")
    if address == "#episode-0":
        assert "⟨U+202E⟩evil" in text and "</script><script>window.pwned·=·1</script>" in text


@pytest.fixture(scope="module")
def axe():
    """The source of axe-core, fetched once per machine."""
    requirement, digest = AXE
    archive = home() / "axe" / f"{requirement.replace('@', '-')}.tgz"
    if not archive.is_file():
        archive.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", requirement], cwd=archive.parent, check=True, capture_output=True)
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == digest
    with tarfile.open(archive) as content:
        return content.extractfile("package/axe.min.js").read().decode()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_keeps_anyone_out(scheme, axe, files, open_page):
    serious = []
    for address in VIEWS:
        page = open_page(files / "jars.html", f"#{address}", scheme=scheme)
        if address.startswith("episode"):
            page.keyboard.press("r")
            page.get_by_text("What the words mean").click()
            page.get_by_role("searchbox").fill("jars")
            page.locator("a.match").first.wait_for()
        colors = page.locator(".work [aria-label='Color by'] option").evaluate_all("all => all.map(o => o.value)")
        for color in colors if address.startswith("episode") else [None]:
            if color is not None:
                page.get_by_label("Color by").first.select_option(color)
            # The page's own policy lets no script in, so axe comes through the debugger.
            only = {} if color in (None, "writer") else {"runOnly": ["color-contrast"]}
            found = page.evaluate(f"{axe}; axe.run({json.dumps(only)})")
            serious += [
                (address, color, violation["id"], violation["nodes"][0]["html"][:200], violation["nodes"][0]["any"][:1])
                for violation in found["violations"]
                if violation["impact"] in ("serious", "critical")
            ]
    assert serious == []


@pytest.mark.parametrize("address", VIEWS)
def test_a_phone_can_read_it(address, files, open_page):
    page = open_page(files / "jars.html", f"#{address}", size=(390, 844))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    small = page.evaluate(
        "[...document.querySelectorAll('main *')]"
        ".filter(e => e.offsetParent && e.childElementCount === 0 && e.innerText)"
        ".map(e => parseFloat(getComputedStyle(e).fontSize))"
    )
    assert min(small) >= 11


def test_a_phone_has_room_for_many_steps_with_long_names(tmp_path, open_page):
    groups = []
    for number in range(30):
        group = written.group_of_jars()
        group.kind, group.file = "step", f"runs/step-{'0' * 30}{number}/rows.safetensors"
        groups.append(group)
    (tmp_path / "steps.html").write_text(render(groups, []))
    page = open_page(tmp_path / "steps.html", "#overview", size=(360, 740))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".bars button").count() == 30
    page.locator(".bars button").nth(7).click()
    assert "8 of 240 shown" in page.locator(".overview").inner_text()


def test_a_phone_shows_the_token_of_a_finding_and_its_card(files, open_page):
    page = open_page(files / "jars.html", "#finding-1", size=(390, 844))
    page.locator(".t.hit").first.wait_for()
    token, strip, card = (page.locator(name).first.bounding_box() for name in (".t.hit", ".strip", ".life"))
    assert 0 < token["y"] < 844 - token["height"]
    assert strip["y"] <= token["y"] and strip["y"] + strip["height"] <= card["y"] < 844 - 100


def test_a_phone_shows_the_tokens_first_and_the_turns_on_demand(files, open_page):
    page = open_page(files / "jars.html", "#episode-3", size=(390, 844))
    assert page.locator(".tree").is_hidden() and page.locator(".strip").bounding_box()["y"] < 0.52 * 844
    page.get_by_role("button", name="6 turns").click()
    page.locator("button.turn", has=page.get_by_text("Turn 3", exact=True)).click()
    assert page.get_by_label("Sequence", exact=True).input_value() == "1"


def test_a_phone_shows_the_whole_list_of_sequences(files, open_page):
    page = open_page(files / "jars.html", "#episode-3", size=(360, 740))
    box = page.get_by_label("Sequence", exact=True).bounding_box()
    assert box["x"] + box["width"] <= 360


def test_a_phone_shows_long_words_whole(tmp_path, open_page):
    lists = ("about", "tables", "plots", "columns", "facts", "evaluations", "states", "tasks")
    report = {"name": "Report", "headline": "", "success_threshold": 1.0, "metrics": {}, "notes": ["word" * 40]}
    page = render([written.group_of_jars()], [], report={**report, **{name: [] for name in lists}})
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    page = open_page(tmp_path / "report.html", size=(360, 740))
    assert page.locator("main p", has_text="wordword").evaluate("one => one.scrollWidth <= one.clientWidth")


def test_a_name_from_right_to_left_leaves_what_follows_in_its_place(tmp_path, open_page):
    group = written.group_of_jars()
    group.id = "\u0645\u0631\u062d\u0628\u0627"
    (tmp_path / "page.html").write_text(render([group], []), encoding="utf-8")
    page = open_page(tmp_path / "page.html", "#overview")
    name, number = page.locator(".overview b", has_text=group.id).first.evaluate(
        """name => {
            const range = document.createRange();
            range.setStart(name.nextSibling, 3);  // after the separator
            range.setEnd(name.nextSibling, 4);
            return [name.getBoundingClientRect().right, range.getBoundingClientRect().left];
        }"""
    )
    assert name < number


def test_light_and_dark_follow_the_system_and_the_button(files, open_page):
    colors = {}
    for scheme in ("light", "dark"):
        page = open_page(files / "jars.html", scheme=scheme)
        colors[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("d")
        colors[f"{scheme} turned"] = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colors["light"] == colors["dark turned"] != colors["dark"] == colors["light turned"]


# --- evaluations ---

REPORTS = ("report", "comparison")


def evaluated(path, seed, shift):
    """An evaluation of 200 tasks x 8 samples, in which every question and answer is hostile text."""
    draw = random.Random(seed)

    def play(action):
        right = draw.random() < action.task_context.id % 10 / 9 * 0.8 + shift
        said = [{"role": "user", "content": [{"text": action.message}]}]
        for turn in range(4):
            text = " ".join(
                draw.choice(("so", "then", "the sum", "is", draw.choice(written.HOSTILE))) for _ in "x" * 80
            )
            said.append({"role": "assistant" if turn % 2 == 0 else "user", "content": [{"text": text}]})
        return StepResult(
            observation=Observation(
                messages=[*said, {"role": "assistant", "content": [{"text": f"It is {right}."}]}],
                metrics={
                    "model_calls": 3,
                    "sampled_tokens": draw.randint(80, 900),
                    "input_tokens": 1000,
                    "cached_tokens": 600,
                },
            ),
            reward=RewardResult(reward=float(right)),
            termination_reason=TerminationReason.TASK_COMPLETE if right else TerminationReason.MAX_TOKENS_REACHED,
        )

    tasks = [
        Action(message=f"{n}: {written.HOSTILE[n % len(written.HOSTILE)]}", task_context=TaskContext(id=n))
        for n in range(200)
    ]
    evaluator = Evaluator(StubEnvironment(play).factory, 8, max_concurrency=100, output_path=path)
    with ThreadPoolExecutor() as pool:  # Playwright's event loop runs in this thread
        pool.submit(lambda: asyncio.run(evaluator.run(tasks))).result()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The pages of two evaluations, with the seconds that each took."""
    folder = tmp_path_factory.mktemp("reports")
    evaluated(folder / "a", 1, 0.0)
    evaluated(folder / "b", 2, 0.2)
    took = {}
    for name, page, runs in (("report", report_page, "a"), ("comparison", comparison_page, "ab")):
        began = time.process_time()
        html = page(*(folder / run for run in runs), success_threshold=1.0)
        took[name] = time.process_time() - began
        (folder / f"{name}.html").write_text(html, encoding="utf-8")
    return folder, took


def column(page, name):
    """The cells in view of a column of the table of tasks."""
    return cells(page, name, ".report")


def test_1600_samples_are_reported_fast_and_small(reports, open_page):
    folder, took = reports
    size = (folder / "report.html").stat().st_size
    began = time.perf_counter()
    page = open_page(folder / "report.html")
    print(f"{size:,} bytes, made in {took['report']:.1f} s, opened in {time.perf_counter() - began:.2f} s")
    assert took["report"] <= 10 and size <= 10_000_000
    assert page.locator("#main *").count() <= 2000
    assert "200 prompts x 8 samples" in page.locator(".report").inner_text()


@pytest.mark.parametrize("size", [(1440, 900), (360, 740)])
def test_an_evaluation_has_scores_and_nothing_of_training(size, axe, chatml_tokenizer, tmp_path, open_page):
    server = ScriptedSGLang(chatml_tokenizer, ["It is 0.", "Who knows?"] * 2)
    model = SGLangModel(tokenizer=chatml_tokenizer, client=server.client())
    evaluator = Evaluator(
        lambda action: Environment(lambda: model, Contains()),
        2,
        max_concurrency=1,
        output_path=tmp_path,
        keep_trajectories=True,
    )
    with ThreadPoolExecutor() as pool:  # Playwright's event loop runs in this thread
        pool.submit(lambda: asyncio.run(evaluator.run(tasks(2)))).result()
    (tmp_path / "page.html").write_text(render(read([tmp_path]), []))
    page = open_page(tmp_path / "page.html", "#overview", size=size)
    heads = page.locator(".overview .head .cell").all_inner_texts()
    assert {"Question", "Answer", "Target", "Reward", "Outcome"} <= set(heads) and not {"Advantage", "Trained"} & set(
        heads
    )
    assert page.locator("nav a").all_inner_texts() == ["Overview", "Episode", "Siblings"]
    page.evaluate("location.hash = '#episode-1'")
    page.wait_for_selector(".score .chip.bad")
    assert "Who knows?" in page.locator(".score").inner_text() and "target" in page.locator(".score").inner_text()
    assert "trained" not in page.locator(".facts").inner_text()
    assert page.locator(".learns").count() == 0
    assert (
        page.get_by_label("Episode", exact=True).locator("option").all_inner_texts()[1]
        == "t0 #1 · task complete · reward 0"
    )
    found = page.evaluate(f"{axe}; axe.run()")
    assert [
        (one["id"], one["nodes"][0]["html"][:200])
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
    ] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    page.evaluate("location.hash = '#siblings-0'")
    page.locator(".siblings .caption", has_text="; target: ").wait_for()


def test_an_evaluated_episode_opens_at_its_final_answer(reports, open_page):
    page = open_page(reports[0] / "report.html", "#episode-3")
    pane, answer = (
        page.locator(part).last.bounding_box() for part in (".viewport.conversation", ".conversation .answer")
    )
    assert pane["y"] <= answer["y"] < pane["y"] + pane["height"]


def test_tasks_are_sorted_filtered_and_opened(reports, open_page):
    page = open_page(reports[0] / "report.html")
    assert "Dropped" not in page.locator(".report .head").inner_text()  # there are none
    for name, sign in (("pass@1", 1), ("Tokens", 1), ("Tokens", -1)):
        page.locator(".head button", has_text=name).click()
        shown = [float(text) for text in column(page, name)]
        assert len(shown) > 10 and shown == sorted(shown, reverse=sign < 0)
    assert page.locator("[aria-sort=descending]").inner_text() == "Tokens ▼"
    page.locator(".report .caption a").click()
    page.wait_for_selector(".overview")
    page.go_back()
    page.get_by_label("Filter the tasks").fill("17:")
    assert set(column(page, "Task")) == {"17", "117"} and "2 of 200 shown" in page.locator(".report").inner_text()
    page.get_by_label("Filter the tasks").fill("")
    page.get_by_label("State").select_option("never solved")
    assert set(column(page, "State")) == {"never solved"} and set(column(page, "pass@1")) == {"0"}
    page.locator(".report .samples a").nth(2).click()
    page.wait_for_selector(".conversation .card")
    assert "reward 0" in page.locator(".facts").inner_text()
    assert "3 model calls" in page.locator(".facts").inner_text() and "0 turns" not in page.locator("body").inner_text()
    assert (
        "final answer" in page.locator(".score").inner_text() and page.locator(".score .chip.bad").inner_text() == "0"
    )
    assert page.locator(".conversation .card").first.inner_text().startswith("user")
    assert page.locator(".strip").is_hidden()
    page.get_by_role("searchbox").fill("It is True")
    page.get_by_role("link", name="1 match").first.wait_for()
    assert "nothing in this episode; " in page.locator(".matches").inner_text()
    page.go_back()
    assert page.get_by_label("State").input_value() == "never solved"


@pytest.mark.parametrize("size", [(1440, 900), (360, 740)])
def test_tasks_that_begin_alike_are_told_apart(size, tmp_path, open_page):
    same = "You are a careful clerk, and answer with a number. " * 10
    own = [Action(message=f"{same}How much is {n} * 7?", task_context=TaskContext(id=f"t{n}")) for n in (25, 26)]
    evaluator = Evaluator(StubEnvironment().factory, 2, output_path=tmp_path)
    with ThreadPoolExecutor() as pool:  # Playwright's event loop runs in this thread
        pool.submit(lambda: asyncio.run(evaluator.run(own))).result()
    (tmp_path / "page.html").write_text(report_page(tmp_path, success_threshold=1.0))
    page = open_page(tmp_path / "page.html", size=size)
    questions = page.locator(".report .cell span[title]", has_text="* 7?")
    assert questions.all_inner_texts() == ["…25 * 7?", "…26 * 7?"]
    assert questions.first.evaluate("one => one.scrollWidth <= one.parentElement.clientWidth")
    page.get_by_label("Filter the tasks").fill("26 7")
    assert questions.all_inner_texts() == ["…26 * 7?"]
    page.evaluate("location.hash = '#overview'")
    assert set(page.locator(".overview .cell span[title]", has_text="* 7?").all_inner_texts()) == {
        "…25 * 7?",
        "…26 * 7?",
    }


@pytest.mark.parametrize(("name", "count"), [("report", 3), ("jars", 4)])
def test_numbers_open_the_views_in_the_order_of_buttons(name, count, files, reports, open_page):
    page = open_page((reports[0] if name == "report" else files) / f"{name}.html")
    buttons = page.locator("nav a")
    assert buttons.count() == count
    for at in range(count):
        page.keyboard.press(str(at + 1))
        wait_until(page, f"document.querySelectorAll('nav a')[{at}].getAttribute('aria-current') === 'page'")
    page.keyboard.press("?")
    assert f"1 – {count}" in page.locator("#help").inner_text()


def test_another_metric_has_its_own_plot_and_values(reports, open_page):
    page = open_page(reports[0] / "report.html")
    before = column(page, "pass@1")
    assert "pass@8: " in page.locator(".chosen svg").get_attribute("aria-label")
    page.get_by_label("Metric", exact=True).select_option("majority@8")
    assert "majority@k" in page.locator(".chosen figcaption").inner_text()
    assert column(page, "majority@8") != before
    page.get_by_label("Metric", exact=True).select_option("avg@8")
    assert page.locator(".chosen").is_hidden() and column(page, "avg@8") == before


def test_a_comparison_opens_the_samples_of_both(reports, open_page):
    page = open_page(reports[0] / "comparison.html")
    page.get_by_label("State").select_option("flipped to success")
    assert set(column(page, "State")) == {"flipped to success"}
    assert all(float(text) > 0 for text in column(page, "B − A"))
    links = page.locator(".report .row").first.locator(".samples a")
    assert links.count() == 16
    for at in (0, 15):
        reward = links.nth(at).inner_text()
        page.evaluate("address => location.hash = address", links.nth(at).get_attribute("href"))
        page.wait_for_selector(".conversation .card")
        assert f"reward {reward}" in page.locator(".facts").inner_text()
        page.go_back()
        page.wait_for_selector(".report .row")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", REPORTS)
def test_reports_keep_no_one_out(name, scheme, axe, reports, open_page):
    page = open_page(reports[0] / f"{name}.html", scheme=scheme)
    found = page.evaluate(f"{axe}; axe.run()")
    assert [(one["id"], one["nodes"][0]["html"][:200]) for one in found["violations"]] == []
    ink = page.locator(".plot text").first.evaluate("text => getComputedStyle(text).fill")
    assert ink == page.locator(".caption").first.evaluate("text => getComputedStyle(text).color")


@pytest.mark.parametrize("name", REPORTS)
def test_hostile_tasks_are_only_text(name, reports, open_page):
    page = open_page(reports[0] / f"{name}.html")
    assert page.evaluate("window.pwned === undefined")
    assert page.locator("#main").locator("script, iframe, style, img, object, a[href^='javascript']").count() == 0
    assert "</script><script>" in " ".join(column(page, "Question"))
    assert not set(page.evaluate("document.body.innerText")) & set("\x00\x07\x1b\x9b\u202e\u2066\u200b")


@pytest.mark.parametrize("name", REPORTS)
def test_a_phone_can_read_reports(name, reports, open_page):
    page = open_page(reports[0] / f"{name}.html", size=(390, 844))
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
