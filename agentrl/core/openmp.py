"""How OpenMP's threads, which torch computes with on processors, wait for each other."""

from __future__ import annotations

import os


def limit_spinning() -> None:
    """Let OpenMP's threads of processes that are started after this, and of this one if torch is not yet imported, spin briefly.

    With the default count (about 1 ms) a step of seconds takes minutes once another process needs the cores too; without
    spinning it takes 1.5 times as long on idle cores. A count that is set stays.
    """
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
