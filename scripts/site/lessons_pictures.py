"""Pictures of the map and of six pages of the lab in docs/pictures: `python -m scripts.site.lessons_pictures`.

It opens the pages that `posttrain lab --site build/lab` wrote, in the environment of the documentation (`make docs`).
"""

from __future__ import annotations

import shutil
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[2]
INTO = ROOT / "docs/pictures"
PAGES = {"map": "index", "02": "rollout", "05": "loss", "11": "grpo", "12": "rloo", "16": "dpo", "22b": "tail"}
"""What a picture is called, and its page."""


class Quiet(SimpleHTTPRequestHandler):
    """Files of a folder, without a line for each request."""

    def log_message(self, format: str, *args: object) -> None:
        pass


def main(folder: Path = ROOT / "build/lab") -> int:
    """Take all pictures; returns the exit code."""
    from playwright.sync_api import sync_playwright

    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = made.new_page(viewport={"width": 1120, "height": 820}, color_scheme="light")
        for name, file in PAGES.items():
            page.goto(f"http://127.0.0.1:{server.server_port}/{file}.html")
            if name != "map":
                page.wait_for_selector("body[data-ready]")
            page.wait_for_timeout(300)  # curves are drawn in the next frames
            page.screenshot(path=INTO / f"lab-{name}.png")
        made.close()
    server.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
