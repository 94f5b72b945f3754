"""Checks of options that several of the small tasks have."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl import ConfigError, unknown_name

SPLITS = ("train", "eval")


def check_split(name: str) -> None:
    """Check the name of a split.

    Raises:
        UnknownNameError: it is neither ``train`` nor ``eval``.
    """
    if name not in SPLITS:
        raise unknown_name("split", name, SPLITS, "tasks.train_split, tasks.eval_split")


def check_sizes(train_size: int, eval_size: int) -> dict[str, int]:
    """Return the numbers of tasks by split.

    Raises:
        ConfigError: one is less than 1.
    """
    for key, size in (("train_size", train_size), ("eval_size", eval_size)):
        if size < 1:
            raise ConfigError(f"tasks.options.{key}={size} must be at least 1")
    return {"train": train_size, "eval": eval_size}


def check_range(key: str, bounds: Sequence[int], most: int) -> tuple[int, int]:
    """Return the lowest and the highest number of a range such as ``[2, 4]``.

    Raises:
        ConfigError: it is no range within 1 to ``most``.
    """
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1] <= most:
        raise ConfigError(f"tasks.options.{key}={[*bounds]} must be a lowest and a highest number of 1 to {most}")
    return bounds[0], bounds[1]
