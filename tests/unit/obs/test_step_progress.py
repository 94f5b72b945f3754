"""Lines about the start of a run, in output without a live view."""

from __future__ import annotations

import re

from agentrl.obs.progress import StartLines
from agentrl.obs.waiting import PHASE, START, WaitRegistry, waiting


def test_what_starts_is_named_with_how_long_it_took_until_the_first_rollouts() -> None:
    lines: list[str] = []
    token = (waits := WaitRegistry([StartLines(lines.append)])).enter()
    try:
        with waiting(PHASE, START):
            with waiting("start", "of the tool server search"), waiting("engine", "http://127.0.0.1:1", "/health"):
                pass
            with waiting("engine", "http://127.0.0.1:1", "/server_info"):
                pass
            with waiting("learner", lambda: "rank 0 of 1", "load"):
                pass
        with waiting(PHASE, "step 0", "weights"), waiting("engine", "0 of 1"):
            pass
        try:
            with waiting("start", "of an engine that fails"):
                raise OSError
        except OSError:
            pass
        for step in (1, 2):
            with waiting(PHASE, f"step {step}", "rollout"), waiting("start", "of a tool server, which has died"):
                pass
    finally:
        waits.leave(token)
    assert [re.sub(r"\d+\.\d s$", "0.0 s", line) for line in lines] == [
        "start …",
        "start of the tool server search …",
        "start of the tool server search: 0.0 s",
        "learner rank 0 of 1, load …",
        "learner rank 0 of 1, load: 0.0 s",
        "start: 0.0 s",
        "step 0, weights …",
        "step 0, weights: 0.0 s",
        "start of an engine that fails …",
    ]
