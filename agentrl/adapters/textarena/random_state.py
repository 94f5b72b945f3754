"""The process's global generators, lent to one episode at a time."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.Lock()


class GlobalRandom:
    """States of the generators of ``random`` and NumPy that belong to one episode.

    TextArena's games draw from the global generators and seed them, so games that run at the same time change each other.
    Here each call of a game has the generators to itself, and finds them as its last call has left them.
    """

    def __init__(self, seed: int) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Set the global generators to the episode's states, and afterwards back to what they were."""
        with _LOCK:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)
