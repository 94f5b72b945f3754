"""Makes docs/images/viewer.png: the page of a run, in a real headless browser.

    agentrl train --env search_r1 run.dir=runs/viewer train.steps=60
    python docs/images/make_viewer.py runs/viewer

It opens a rollout that was better than its group and rests the mouse on the least likely token that the policy sampled.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

from agentrl.cli.main import main as agentrl
from agentrl.obs.viewer.run_files import Entry, Filters, open_run
from benchmarks.viewer import find_browser

OUT = Path(__file__).parent / "viewer.png"
SIZE = {"width": 1440, "height": 900}


def interesting(run_dir: Path) -> Entry:
    """Return a rollout of the last steps that was better than its group, took turns, and was unsure at some token."""
    run = open_run(run_dir)
    last = max(run.steps)
    entries = [entry for step in run.steps if step > last - 8 for entry in run.read(step, Filters())]
    better = [entry for entry in entries if (entry.advantage or 0) > 0 and len(entry.rollout.turns) >= 3]
    if not better:
        raise SystemExit(f"{run_dir}: no rollout of three turns with an advantage above 0 in the last steps")
    return min(better, key=lambda entry: float(entry.rollout.rows[0].logprobs.min()))


def main() -> None:
    """Make the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--view", default="rollout", choices=["rollout", "group"])
    arguments = parser.parse_args()
    entry = interesting(arguments.run_dir)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = Path(folder) / "view.html"
        if agentrl(["view", str(arguments.run_dir), "--html", str(page), "--max-rollouts", "0"]):
            raise SystemExit(1)
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        scheme = "dark" if arguments.dark else "light"
        window = browser.new_page(viewport=SIZE, color_scheme=scheme, device_scale_factor=1.25)
        window.goto(f"{page.as_uri()}#r={quote(entry.rollout.rollout_id, safe='')}&view={arguments.view}")
        window.wait_for_selector("html[data-ready]", state="attached")
        if arguments.view == "rollout":
            window.locator(".unlikely button").first.click()
            window.wait_for_selector("#tip:not([hidden])")
        window.wait_for_timeout(300)
        window.screenshot(path=arguments.out)
        browser.close()
    print(f"{arguments.out}: {arguments.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
