"""States of the global random generators of torch, CUDA, NumPy and Python, for checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from agentrl.core.atomic_files import names_file
from agentrl.core.errors import CheckpointError
from agentrl.core.reading import reading


def seed_everything(seed: int) -> None:
    """Seed the global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of the CPU generators in a form that ``torch.save`` writes and ``weights_only`` loads."""
    kind, keys, *counters = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *counters],
        "python": random.getstate(),
    }


def restore_random(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    torch.set_rng_state(states["torch"])
    kind, keys, *counters = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *counters))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))


def rank_states(device: torch.device) -> dict[str, Any]:
    """Return `random_states` and the state of a rank's device."""
    return random_states() | {"cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None}


def save_rank_states(states: dict[str, Any], folder: Path) -> None:
    """Write what `rank_states` returned; see `restore_rank`."""
    file = folder / f"rank_{dist.get_rank():05d}.pt"
    with names_file(file), file.open("wb") as stream:
        torch.save(states, stream)


def restore_rank(file: Path, device: torch.device) -> None:
    """Restore what `save_rank_states` has written; a rank that the saved run did not have keeps its own.

    Raises:
        CheckpointError: the file cannot be read.
    """
    if not file.is_file():
        return
    with reading(file, "file of random states", CheckpointError):
        states = torch.load(file, weights_only=True)
        restore_random(states)
        if device.type == "cuda" and states["cuda"] is not None:
            torch.cuda.set_rng_state(states["cuda"], device)


def states_to_json(states: dict[str, Any]) -> dict[str, Any]:
    """Return states as JSON-able data."""
    kind, keys, *counters = states["numpy"]
    version, numbers, gauss = states["python"]
    return {
        "torch": states["torch"].numpy().tobytes().hex(),
        "numpy": [kind, keys.tolist(), *counters],
        "python": [version, list(numbers), gauss],
    }


def states_from_json(data: dict[str, Any]) -> dict[str, Any]:
    """Return the states that `states_to_json` encoded."""
    kind, keys, *counters = data["numpy"]
    return {
        "torch": torch.frombuffer(bytearray.fromhex(data["torch"]), dtype=torch.uint8),
        "numpy": [kind, torch.tensor(keys, dtype=torch.int64), *counters],
        "python": data["python"],
    }
