"""GPUs that a plan is made for."""

from __future__ import annotations

from dataclasses import dataclass

from agentrl.core.errors import ConfigError

GIB = 1 << 30
MACHINE = 8
"""GPUs of a machine: tensor-parallel ranks, and the GPUs of an engine, are on one."""
MEMORY_GIB = {"a100": 79.2, "h100": 79.1, "h200": 139.8, "b200": 178.3}
"""GiB of memory that CUDA reports, by name; of the A100 and the H100 those with 80 GB."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of one kind, `MACHINE` to a machine."""

    count: int
    name: str
    bytes: int
    """Memory of one."""

    @classmethod
    def parse(cls, count: int, kind: str) -> Gpus:
        """Return the GPUs of ``--gpus`` and ``--gpu``.

        Args:
            count: 1 or more; above `MACHINE` a multiple of it.
            kind: a name in `MEMORY_GIB`, or a number of GiB.

        Raises:
            ConfigError: the number or the name is none of these.
        """
        if count < 1 or (count > MACHINE and count % MACHINE):
            raise ConfigError(f"--gpus {count}: set it to 1 to {MACHINE}, or to a multiple of {MACHINE}")
        try:
            gib = MEMORY_GIB.get(kind.lower()) or float(kind)
        except ValueError:
            gib = 0.0
        if not 0 < gib < 1e6:
            gpu_names = ", ".join(MEMORY_GIB)
            raise ConfigError(f"--gpu {kind}: no known GPU; set it to {gpu_names}, or to a number of GiB")
        return cls(count, kind.lower(), int(gib * GIB))
