"""The process behind `agentrl.rewards.math_equivalence`: reads pairs of expressions, says whether they mean the same.

A line of JSON ``{"answer", "label"}`` comes in; `UNREADABLE` goes out where the label cannot be read, else `READABLE`
and then `SAME` or `DIFFERENT`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

READY, READABLE, UNREADABLE, SAME, DIFFERENT = "ready", "readable", "unreadable", "same", "different"
"""The lines of the worker."""
_STEP_S = 2
"""Seconds for reading an expression, and for comparing two: math-verify's own limits, by SIGALRM."""
_CPU_S = 30.0
"""Processor seconds for one pair: more, and the kernel ends the process, whatever it is in and whether or not the
process that asked still lives."""
_MEMORY = 4 << 30
"""Bytes of address space: more, and Python says MemoryError."""


def main() -> None:
    """Answer until the input ends."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    try:
        _same(_read("0.5"), r"\frac{1}{2}")  # imports and tables that the first pair would wait for
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
    """Return the forms in which math-verify reads an expression; none where it cannot."""
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
