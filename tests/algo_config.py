"""Objectives as a run has them."""

from __future__ import annotations

from typing import Any

from agentrl.algo.registry import algorithm_faults
from agentrl.config.algo import AlgoConfig
from agentrl.config.load import validate


def make_algo(**changes: Any) -> AlgoConfig:
    """Return the ``algo`` section of a run on the embedded engine."""
    return validate({"algo": changes}, [algorithm_faults]).algo
