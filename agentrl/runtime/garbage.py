"""Garbage collection in a process with many objects that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000
"""New objects after which the garbage collector looks at them. A reply of an engine has hundreds, most of them gone soon; an
episode in progress has about 200, and leaves no garbage for it."""


@contextmanager
def rare_collections() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collections in the body, and collect others rarely.

    Most objects that exist when services have started stay: scanning them in every collection would delay all episodes.
    """
    gc.collect()
    gc.freeze()
    thresholds = gc.get_threshold()
    gc.set_threshold(_NEW_OBJECTS, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
