"""Worker process of `agentrl.rewards.math_equivalence`: compares pairs of expressions.

For each line of JSON ``{"answer", "label"}`` it prints `UNREADABLE` if the label cannot be parsed, otherwise `READABLE` and
then `SAME` or `DIFFERENT`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

READY, READABLE, UNREADABLE, SAME, DIFFERENT = "ready", "readable", "unreadable", "same", "different"
"""Lines that the worker prints."""
_STEP_S = 2
"""Seconds for parsing an expression, and for comparing two: math-verify's own limits, by SIGALRM."""
_CPU_S = 30.0
"""CPU seconds for one pair. Beyond it the kernel ends the process, in any state and even if the parent is gone."""
_MEMORY = 4 << 30
"""Bytes of address space; beyond it Python raises MemoryError."""


def main() -> None:
    """Serve pairs until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries goes to standard error
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        _same(_read("0.5"), r"\frac{1}{2}")  # imports and tables, before the first pair
    except ImportError as error:
        out.write(f"{error}; pip install math-verify\n")
        return
    out.write(f"{READY}\n")
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        pair = json.loads(line)
        label = _read(pair["label"])
        out.write(f"{READABLE if label else UNREADABLE}\n")
        if label:
            out.write(f"{SAME if _same(label, pair['answer']) else DIFFERENT}\n")


def _read(text: str) -> list[Any]:
    """Return the forms as which math-verify parses an expression; none if it cannot."""
    from math_verify import parse

    try:
        return list(parse(f"\\boxed{{{text}}}", parsing_timeout=_STEP_S))
    except (MemoryError, RecursionError):
        return []


def _same(label: list[Any], answer: str) -> bool:
    from math_verify import verify

    try:
        return bool(verify(label, _read(answer), timeout_seconds=_STEP_S))
    except (MemoryError, RecursionError):
        return False


if __name__ == "__main__":
    main()
