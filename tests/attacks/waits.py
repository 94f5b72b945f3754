"""How long another session's calls take while one session attacks: ``PYTHONPATH=tests python -m attacks.waits`` prints it.

All defences are on. The attacks are those that take the most of the machine.
"""

from __future__ import annotations

import asyncio
import os
import time

from attacks.attack import LIMITS, Attack
from attacks.resources import ATTACKS
from attacks.world import preamble

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.sandbox.base import Job, Sandbox
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

WORST = (
    *("fork bomb", "thread bomb", "memory bomb", "many children, each below the limit", "memory in pipes"),
    *("memory in TCP sockets", "files without end", "flood of output", "endless loop"),
)
SECONDS = 1.5
"""How long each attack is repeated."""


async def measure(sandbox: Sandbox, meanwhile: asyncio.Task[None]) -> list[float]:
    """Return the times of short calls until a task ends, sorted, seconds."""
    times = []
    while not meanwhile.done():
        began = time.perf_counter()
        outcome = await sandbox.run(Job("call", code="print(1)"))
        times.append(time.perf_counter() - began)
        assert outcome.stdout == "1\n"
        await asyncio.sleep(0.01)
    await meanwhile
    return sorted(times)


async def repeat(attack: Attack, backend: BubblewrapBackend) -> None:
    """Attack for a while, in sandboxes that are opened again when they end."""
    end = time.monotonic() + SECONDS
    code = preamble(attack.code, {}) + attack.code
    while time.monotonic() < end:
        async with await backend.open("attacker") as sandbox:
            for _ in range(5):
                if sandbox.alive and time.monotonic() < end:
                    await sandbox.run(Job("attack", code=code, wall_s=attack.wall_s or 3.0))


def show(name: str, times: list[float]) -> None:
    """Print percentiles."""
    p50, p95, p100 = (1000 * times[int(share * (len(times) - 1))] for share in (0.5, 0.95, 1.0))
    print(f"{name:36} {len(times):4} calls  p50 {p50:5.1f}  p95 {p95:5.1f}  p100 {p100:5.1f} ms", flush=True)


async def main() -> None:
    """Measure without an attack, and with each."""
    limits = SandboxLimits(**{**LIMITS, "wall_s": 5.0})
    every: list[float] = []
    async with BubblewrapBackend(SandboxConfig(limits=limits)) as backend, await backend.open("caller") as caller:
        show("no attack", await measure(caller, asyncio.create_task(asyncio.sleep(SECONDS))))
        for attack in ATTACKS:
            if attack.name in WORST:
                times = await measure(caller, asyncio.create_task(repeat(attack, backend)))
                show(attack.name, times)
                every += times
    show("all attacks", sorted(every))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main())
