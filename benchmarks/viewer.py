"""Time to build the page of a large run, and to open it in a browser."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from agentrl.core.errors import UserError
from agentrl.core.types import FinishReason, MaskReason, Provenance, Rollout, Row, RowKey, StopReason, Turn
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.viewer.page import TokenText, build_page, write_page
from agentrl.obs.viewer.run_files import Entry, Filters, open_run, select

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
GROUP = 8
STRETCH = 200
WORDS = 32_000


@dataclass(frozen=True, slots=True)
class ViewTimes:
    """Results of `measure_view`."""

    build_s: float
    """From the files of the run to the page on disk."""
    size: int
    """Bytes of the page."""
    ready_ms: float
    """From the start of the navigation to the first rollout with its tokens on screen, by the browser's clock."""
    wall_s: float
    """Wall time of the same, including a new browser window."""


def measure_view(rollouts: int, tokens: int) -> ViewTimes:
    """Build and open the page of a synthetic run with ``rollouts`` rollouts of ``tokens`` tokens each.

    Raises:
        UserError: there is no browser.
    """
    browser = find_browser()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        recorder = RolloutRecorder(folder / "rollouts")
        for step, entries in groupby(synthetic_entries(rollouts, tokens), key=lambda entry: entry.step):
            step_entries = list(entries)
            recorder.write(step, [entry.rollout for entry in step_entries])
            recorder.finish(step, {entry.rollout.rollout_id: entry.advantage or 0.0 for entry in step_entries})
        begun = time.perf_counter()
        run = open_run(folder)
        page = build_page(select(run, Filters(), 0).entries(run, Filters()), title="synthetic", decode=synthetic_texts)
        out = folder / "view.html"
        write_page(out, page)
        build_s = time.perf_counter() - begun
        ready_ms, wall_s = open_page(out, browser)
    return ViewTimes(build_s, len(page.html), ready_ms, wall_s)


def find_browser() -> str:
    """Return the path of a Chromium.

    Raises:
        UserError: none is on the PATH.
    """
    browser = next((path for path in map(shutil.which, BROWSERS) if path), None)
    if browser is None:
        raise UserError(f"no browser on the PATH: none of {', '.join(BROWSERS)}")
    return browser


def open_page(page: Path, browser: str) -> tuple[float, float]:
    """Return milliseconds until the page is ready by its own clock, and seconds of wall time.

    Raises:
        UserError: playwright is not installed.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise UserError("a page is opened with playwright: pip install playwright") from error
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        begun = time.perf_counter()
        window = chromium.new_page(viewport={"width": 1440, "height": 900})
        window.goto(page.resolve().as_uri())
        window.wait_for_selector("html[data-ready]", state="attached")
        wall_s = time.perf_counter() - begun
        ready_ms = float(window.evaluate("document.documentElement.dataset.ready"))
        chromium.close()
    return ready_ms, wall_s


def synthetic_entries(rollouts: int, tokens: int, seed: int = 0) -> Iterator[Entry]:
    """Yield rollouts of exactly ``tokens`` tokens, in groups of 8 and steps of 128, half observed and half sampled."""
    random = np.random.default_rng(seed)
    for number in range(rollouts):
        step = 1 + number // (16 * GROUP)
        prompt_id = f"synthetic/{number // GROUP}"
        row = _row(RowKey(prompt_id, f"{step}/{number}"), tokens, step, random)
        reward = float(random.integers(0, 5)) / 4
        turns = [Turn(f"word {word}", "", FinishReason.STOP) for word in row.token_ids[:: 2 * STRETCH]]
        rollout = Rollout(
            prompt_id,
            row.key.rollout_id,
            [row],
            reward,
            StopReason.TERMINATED if number % 9 else StopReason.MAX_TOKENS,
            metrics={"exact_match": float(reward == 1.0)},
            turns=turns,
            prompt=f"Question {number // GROUP} of the synthetic run",
            sampled_tokens=int(row.mask.sum()),
        )
        yield Entry(step, rollout, reward - 0.5)


def synthetic_texts(ids: Sequence[int]) -> list[TokenText]:
    """Return one word for each id, with a space before it."""
    return [
        " " + "".join("bcdfglmnprstvz"[token // 14**n % 14] + "aeiou"[token // 3**n % 5] for n in (0, 1))
        for token in ids
    ]


def _row(key: RowKey, tokens: int, step: int, random: np.random.Generator) -> Row:
    sampled = (np.arange(tokens) // STRETCH % 2).astype(np.uint8)
    logprobs = np.where(sampled, -random.exponential(0.4, tokens), 0).astype(np.float32)
    requests = np.where(sampled, np.arange(tokens) // (2 * STRETCH), -1).astype(np.int32)
    return Row(
        key=key,
        token_ids=(random.zipf(1.3, tokens) % WORDS).astype(np.int32),
        provenance=sampled * np.uint8(Provenance.SAMPLED),
        mask=sampled,
        mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=logprobs,
        versions=np.where(sampled, step - 1, -1).astype(np.int32),
        requests=requests,
        request_ids=tuple(f"{key.rollout_id}/{n}" for n in range(int(requests.max(initial=-1)) + 1)),
    )
