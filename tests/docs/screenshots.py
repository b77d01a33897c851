"""Make the screenshots of docs/guides/viewer.md, light and dark: `make screenshots`.

They show the episodes of `support.written_episodes`, in headless Chromium.
"""

import io
import shutil
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from strands_sglang.viewer import render
from support import written_episodes as written

ASSETS = Path(__file__).parents[2] / "docs" / "assets"

SHOTS = {
    "episode": ("#episode-3", []),
    "finding": ("#finding-1", []),
    "probability": ("#episode-0", ["c", "c", "c", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown"]),
    "siblings": ("#siblings-0", []),
    "credit": ("#credit", []),
}
"""The address and the keys of each shot."""


def main():
    """Write `docs/assets/viewer-NAME-SCHEME.webp`."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page_file = Path(folder) / "view.html"
        page_file.write_text(render(written.groups_of_jars(written.PICTURE), written.findings_of_jars()), "utf-8")
        with playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]) as browser:
            for scheme in ("light", "dark"):
                for name, (address, keys) in SHOTS.items():
                    context = browser.new_context(viewport={"width": 1360, "height": 820}, color_scheme=scheme)
                    page = context.new_page()
                    page.goto(f"{page_file.as_uri()}{address}")
                    page.wait_for_selector("html[data-ready]")
                    if keys:
                        page.locator(".strip").focus()
                    for key in keys:
                        page.keyboard.press(key)
                    shot = Image.open(io.BytesIO(page.screenshot()))
                    target = ASSETS / f"viewer-{name}-{scheme}.webp"
                    shot.convert("RGB").save(target, "WEBP", quality=82, method=6)
                    print(f"{target.name}: {target.stat().st_size // 1000} kB")
                    context.close()


if __name__ == "__main__":
    main()
