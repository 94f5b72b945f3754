"""What ranks import, once for all that are forks of the same process; see `forked`."""

from __future__ import annotations

import atexit
import sys
import warnings

atexit._clear()  # functions of the process that has collected the tests are not for its forks
warnings.simplefilter("ignore")
# Megatron-Core imports it where it is installed, which takes a third of the time that all its imports take.
sys.modules["wandb"] = None  # type: ignore[assignment]

from tests.unit.learner.megatron import cases, image_cases, rank_cases  # noqa: E402, F401
