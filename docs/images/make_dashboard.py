"""Makes docs/images/dashboard_*.png: views of the dashboard, in a real headless browser.

agentrl train --env search_r1 run.dir=runs/search_r1
agentrl train --env search_r1 run.dir=runs/other run.seed=1
python docs/images/make_dashboard.py runs --run search_r1 --other other
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Page, sync_playwright

from benchmarks.viewer import find_browser

OUT = Path(__file__).parent
SIZE = {"width": 1200, "height": 720}
COLORS = 128


def compress(path: Path) -> None:
    """Write a picture again with few colours: a third of the bytes."""
    from PIL import Image

    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)


def draw(window: Page, address: str, view: str, place: dict[str, str]) -> None:
    """Open a view, and in a table the row that is the most telling: the first with the highest advantage."""
    window.goto("about:blank")
    window.goto(f"{address}/#{urlencode({'view': view, **place})}")
    window.wait_for_selector(f'html[data-ready^="{view} "]', state="attached")
    if view in ("rollouts", "groups"):
        window.wait_for_selector('.grid[data-complete="true"]')
        window.keyboard.press("j")
        window.wait_for_selector("#text .t, .columns .t")
        if view == "rollouts":
            window.locator(".unlikely button").first.click()
            window.wait_for_selector("#tip:not([hidden])")
    window.wait_for_timeout(400)


def main() -> None:
    """Make the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path, help="the folder with runs")
    parser.add_argument("--run", required=True, help="the run that is shown")
    parser.add_argument("--other", required=True, help="the run beside it in the curves")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    command = [sys.executable, "-m", "agentrl.cli.main", "view", str(arguments.root), "--serve", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    match = re.search(r"http://[^;]+", server.stdout.readline())
    assert match is not None
    run = {"run": arguments.run}
    pictures = {
        "curves": ("light", {**run, "runs": arguments.other}),
        "steps": ("light", {**run, "step": "40"}),
        "rollouts": ("dark", {**run, "sort": "advantage", "status": "whole", "rewards": "1:"}),
    }
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
            for view, (scheme, place) in pictures.items():
                window = browser.new_page(viewport=SIZE, color_scheme=scheme)
                draw(window, match[0], view, place)
                path = arguments.out / f"dashboard_{view}.png"
                window.screenshot(path=path)
                window.close()
                compress(path)
                print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
            browser.close()
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()


if __name__ == "__main__":
    main()
