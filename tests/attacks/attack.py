"""What an attack is, and what shows that it works where the defence against it is away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Defence

BACKENDS = ("bubblewrap", "docker")
LIMITS: Mapping[str, Any] = {
    "wall_s": 10.0,
    "cpu_s": 60,
    "cpus": 1.0,
    "memory_mb": 96,
    "processes": 32,
    "open_files": 64,
    "file_mb": 4,
    "disk_mb": 16,
    "inodes": 512,
    "output_kb": 64,
}
"""Small, so that reaching them takes little of the machine and of time."""


ROOMY: Mapping[str, Any] = {"disk_mb": 512, "processes": 400}
"""For attacks that would meet these limits before those that they are about."""


@dataclass(frozen=True, slots=True)
class Without:
    """The control takes these defences away, and only these."""

    defences: frozenset[Defence]
    why: str = ""
    """Why more than one has to go."""

    def __init__(self, *defences: Defence, why: str = "") -> None:
        assert len(defences) == 1 or why, "say why more than one defence has to go"
        object.__setattr__(self, "defences", frozenset(defences))
        object.__setattr__(self, "why", why)


@dataclass(frozen=True, slots=True)
class Bare:
    """The control runs the same code without any sandbox, in the outer world."""

    why: str
    """Why no backend can be told to let it happen."""
    user: int = 0


@dataclass(frozen=True, slots=True)
class Otherwise:
    """The control keeps every defence and does without what else stops the attack."""

    why: str
    then_stateful: bool | None = None
    """Run what comes after in the process that keeps variables."""
    then_fresh: bool | None = None
    """Run what comes after in a fresh sandbox, or not."""


@dataclass(frozen=True, slots=True)
class NoControl:
    """There can be none."""

    why: str


Control = Without | Bare | Otherwise | NoControl


@dataclass(frozen=True, slots=True)
class Attack:
    """Code that does damage, or prints a line with PWNED that only its success can print."""

    name: str
    defence: str
    """What stops it, in words."""
    code: str
    """Python; `world.PREAMBLE` says what it finds defined."""
    control: Control | Mapping[str, Control]
    """One for both backends, or one each."""
    status: frozenset[ToolStatus] = frozenset({ToolStatus.ERROR})
    """How it may end with all defences."""
    limits: Mapping[str, Any] = field(default_factory=dict)
    """Those that differ from `LIMITS`."""
    stateful: bool = False
    wall_s: float | None = None
    """Of this call; None takes that of `LIMITS`."""
    control_wall_s: float | None = None
    """Of the control's call, which does more before it ends; None: the same."""
    cpu_s: int | None = None
    neighbour: str = ""
    """Run in another sandbox before, whose process stays."""
    writes: Mapping[str, bytes] = field(default_factory=dict)
    """What the server writes afterwards, by path, as a tool that saves what the policy said would."""
    reads: tuple[str, ...] = ()
    """What the server reads afterwards."""
    pause_s: float = 0.0
    """How long to wait before looking for damage."""
    then: str = ""
    """Python of the server's, run afterwards; PWNED in its output counts too."""
    then_stateful: bool = False
    then_fresh: bool = False
    hurts_itself: bool = False
    """It leaves its own sandbox without memory to go on: a sandbox's next call may fail, but only as out of memory."""
    fresh: bool = False
    """Wants a sandbox that has answered nothing yet: it guesses the numbers of requests."""
    breaks_control: bool = False
    """Its control leaves a sandbox that may break later: no other control follows in it."""
    kernel_may_lack: bool = False
    """Its control is skipped where the kernel says that it has no such thing."""

    def control_of(self, backend: str) -> Control:
        """Return the control for a backend."""
        return self.control[backend] if isinstance(self.control, Mapping) else self.control


def ends(*statuses: ToolStatus) -> frozenset[ToolStatus]:
    """Return a set of statuses."""
    return frozenset(statuses)
