"""The built documentation site in a real browser: search, other hosts, narrow screens, light and dark."""

import functools
import http.server
import shutil
import threading
from contextlib import suppress

import pytest
from playwright.sync_api import TimeoutError as PlaywrightTimeoutError, sync_playwright

from support.pages import ROOT

SITE = ROOT / "docs" / "_site"
PAGES = sorted(str(page.parent.relative_to(SITE)) for page in SITE.rglob("index.html"))

# What people look for, and a page that the search has to offer among its first five.
SEARCHES = {
    "loss mask": "understand/tokens",
    "retokenization drift": "understand/tokens",
    "TokenizerMismatchError": "troubleshooting",
    "fork": "understand/trajectory",
    "timeout": "guides/environments",
    "max_tool_iters": "reference/outcomes",
    "slime": "guides/slime",
    "weight update": "understand/weight-updates",
    "MathReward": "guides/rewards",
    "pass@k": "guides/evaluation",
    "routing key": "guides/servers",
    "ScriptedSGLang": "start/without-a-server",
    "reward stays at 0": "reward-stays-at-zero",
    "tutorial": "start/tutorial",
    "why not verifiers": "why-not",
}


@pytest.fixture(scope="module")
def site():
    """The address of the site, served on a free port, and a headless Chromium, the one on the PATH."""
    assert PAGES, "docs/_site is empty: run `make docs`"
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "no Chromium on the PATH: apt-get install chromium"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with playwright.chromium.launch(executable_path=path, args=["--no-sandbox"]) as browser:
            yield f"http://127.0.0.1:{server.server_port}", browser
        server.shutdown()


@pytest.fixture
def open_page(site):
    """Opens pages of a phone's browser that record requests and errors."""
    address, browser = site
    context = browser.new_context(base_url=address, viewport={"width": 390, "height": 844})

    def opened():
        page = context.new_page()
        page.requested, page.errors = [], []

        def failed(request):
            if request.failure != "net::ERR_ABORTED":  # the test left the page before it was answered
                page.errors.append(request.url)

        page.on("request", lambda request: page.requested.append(request.url))
        page.on("requestfailed", failed)
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        return page

    yield opened
    context.close()


@pytest.fixture
def page(open_page):
    return open_page()


@pytest.fixture(scope="module")
def search(site):
    """The dialog of the search, in a wide window."""
    address, browser = site
    page = browser.new_page(base_url=address, viewport={"width": 1280, "height": 900})
    page.goto("/", wait_until="networkidle")
    dialog = page.locator("dialog[aria-label=Search]")
    while not dialog.is_visible():  # a page begins to listen to keys a moment after it is loaded
        page.keyboard.press("/")
        with suppress(PlaywrightTimeoutError):
            dialog.wait_for(timeout=1_000)
    return dialog


def test_no_page_asks_another_host_or_overflows_a_phone(open_page, site):
    address, _ = site
    tabs = [open_page() for _ in range(8)]
    for begin in range(0, len(PAGES), len(tabs)):
        opened = [*zip(tabs, PAGES[begin:], strict=False)]
        for tab, path in opened:
            tab.goto(f"/{path}/", wait_until="commit")
        for tab, path in opened:
            tab.wait_for_load_state("networkidle")
            width = tab.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{path} is {width} px wide"
            sizes = tab.evaluate(
                "[...document.querySelectorAll('article p')].map(e => parseFloat(getComputedStyle(e).fontSize))"
            )
            assert min(sizes, default=16) >= 12, path
    own = (address, "data:", "blob:")
    assert [url for tab in tabs for url in tab.requested if not url.startswith(own)] == []
    assert [error for tab in tabs for error in tab.errors] == []


@pytest.mark.parametrize("term", SEARCHES)
def test_the_search_finds(term, search):
    results = search.locator("a")
    search.get_by_role("combobox").fill("")
    results.first.wait_for(state="detached")  # those of another term
    search.get_by_role("combobox").fill(term)
    results.and_(search.page.locator(f'[href*="{SEARCHES[term]}"]')).first.wait_for(timeout=60_000)


def test_what_is_wider_than_a_phone_scrolls_by_key(page):
    page.goto("/understand/families/", wait_until="networkidle")
    table = page.locator("[tabindex='0']").filter(has_text="Refused cases").last
    cell = table.get_by_role("columnheader").last
    before = cell.bounding_box()["x"]
    table.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_function("[...document.querySelectorAll('[tabindex=\"0\"]')].some(e => e.scrollLeft > 0)")
    assert cell.bounding_box()["x"] < before


def test_light_and_dark_follow_the_system(page):
    for scheme, name in (("light", "default"), ("dark", "slate")):
        page.emulate_media(color_scheme=scheme)
        page.goto("/", wait_until="networkidle")
        assert page.locator("body").get_attribute("data-md-color-scheme") == name
