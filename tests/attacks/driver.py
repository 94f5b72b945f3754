"""Runs in the outer world, as ``python -m attacks.driver OUTER BACKEND IMAGE WHICH``: all attacks, then all controls if chosen.

Prints one JSON object a line: first what `outer_sandbox.prove` found, then a `Result` for every attack and every control.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from attacks import files, kernel, processes, resources
from attacks.attack import BACKENDS, LIMITS, Attack, Bare, Control, Otherwise, Without
from attacks.outer_sandbox import NoOuterWorld, Outer, enter, prove
from attacks.world import World, reap_all, stop_signals

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import SandboxFailure
from agentrl.sandbox.base import ALL_DEFENCES, Defence, Job, Outcome, Sandbox, SandboxBackend
from agentrl.sandbox.cgroup import CGROUP_VARIABLE

ATTACKS = (*resources.ATTACKS, *files.ATTACKS, *processes.ATTACKS, *kernel.ATTACKS)
Make = Callable[[SandboxLimits, frozenset[Defence]], SandboxBackend]

# Also the next call after an attack: it takes away what lies about, and has to be answered rightly.
NEXT = """
import os
paths = [os.path.join(folder, name) for folder in @FOLDERS@ for name in os.listdir(folder)]
if paths:  # without subprocess, whose import takes longer than all else here
    silent = [(os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0)]
    os.waitpid(os.posix_spawnp("rm", ["rm", "-rf", *paths], os.environ, file_actions=silent), 0)
print("dirty" if os.listdir("/work") else 6 * 7)
"""
PROOF = "proof"
PATIENCE = 10
"""Times its pause, a control is given to come to something."""
TRIES = 3
"""Of a control. It shows that its attack can succeed; on a busy machine, what that races with may come first."""
LACKING = (
    "Errno 38",
    "Errno 97",
    "Errno 1]",
    "Errno 13",
    "Errno 5]",
    "Errno 19",
    "Errno 22",
    "Errno 2]",
    "Errno 93",
    "not allowed to raise",
)
"""What the kernel says of things it was built or set up without."""


@dataclass(slots=True)
class Result:
    """What became of one attack, or of one control."""

    attack: str
    control: bool
    success: str
    """What shows that it worked; empty where it did not."""
    status: str
    """How it ended; "failure" where the sandbox broke."""
    said: str
    """The end of its output and errors."""
    seconds: float
    next: str
    """What the next call gave: "42" where all is well."""
    skip: str = ""
    """Why it could not be tried."""
    peak_mib: tuple[int, ...] = ()
    """The most memory that the sandbox's cgroup has counted so far, MiB; on version 1 also the most of its sockets, which are
    not in the first number."""


async def attempt(attack: Attack, world: World, sandbox: Sandbox, opener: SandboxBackend, *, control: bool) -> Result:
    """Attack a sandbox, and look for success."""
    world.reset()
    began = time.monotonic()
    outcome, evidence, output = None, [], ""
    async with contextlib.AsyncExitStack() as exits:
        try:
            await _neighbour(attack, world, opener, exits)
            outcome = await sandbox.run(
                Job(
                    "attack",
                    code=world.code(attack.code),
                    stateful=attack.stateful,
                    wall_s=attack.wall_s,
                    cpu_s=attack.cpu_s,
                )
            )
            evidence.append(_pwned(outcome.stdout))
            output = (outcome.detail + " " + outcome.stdout[-200:] + outcome.stderr[-400:]).strip()
            evidence += await _serve(attack, world, sandbox)
            await _pause(attack, sandbox, control=control)
            if attack.then:
                fresh = attack.then_fresh
                target = await exits.enter_async_context(await opener.open("fresh")) if fresh else sandbox
                state_after = await target.run(Job("then", code=attack.then, stateful=attack.then_stateful, wall_s=5.0))
                evidence.append(_pwned(state_after.stdout))
            evidence.append(await _proof(sandbox))
        except (SandboxFailure, LookupError, ValueError) as error:  # of a forged reply, where it can be
            evidence.append(f"the sandbox broke: {error}")
        evidence.append(world.damage())
    status = outcome.status.value if outcome is not None else "failure"
    seconds = time.monotonic() - began
    answer = await _next(sandbox, control=control)
    if answer != "42":
        evidence.append("the next call fails")
    success = "; ".join(filter(None, evidence))
    return Result(attack.name, control, success, status, output, seconds, answer, peak_mib=_peak_mib(sandbox))


def _peak_mib(sandbox: Sandbox) -> tuple[int, ...]:
    kills = getattr(sandbox, "memory_kills", None)
    counted = kills.file if kills is not None else sandbox.cgroup.oom_file  # type: ignore[attr-defined]
    names = ("memory.peak", "memory.max_usage_in_bytes", "memory.kmem.tcp.max_usage_in_bytes")
    files = [counted.parent / name for name in names] if counted is not None else []
    return tuple(round(int(file.read_text()) / 2**20) for file in files if file.exists())


async def _pause(attack: Attack, sandbox: Sandbox, *, control: bool) -> None:
    """Let what goes on in the background come to something; on a busy machine a control needs longer to."""
    patient = control and not attack.then
    end = time.monotonic() + attack.pause_s * (PATIENCE if patient else 1)
    while (remaining_s := end - time.monotonic()) > 0 and not (patient and await _proof(sandbox)):  # noqa: ASYNC110
        await asyncio.sleep(min(remaining_s, 0.1) if patient else remaining_s)


async def _proof(sandbox: Sandbox) -> str:
    try:
        return _pwned((await sandbox.read_file(PROOF)).decode())
    except OSError as error:
        return "" if error.errno != errno.EAGAIN else "what runs on leaves no process to read a file"


async def _neighbour(attack: Attack, world: World, opener: SandboxBackend, exits: contextlib.AsyncExitStack) -> None:
    if attack.neighbour:
        neighbour = await exits.enter_async_context(await opener.open("neighbour"))
        set_up = await neighbour.run(Job("neighbour", code=world.code(attack.neighbour), stateful=True))
        assert set_up.exit_code == 0, set_up


def _pwned(text: str) -> str:
    at = text.find("PWNED")
    return "" if at < 0 else text[at : at + 80].splitlines()[0]


async def _serve(attack: Attack, world: World, sandbox: Sandbox) -> list[str]:
    """Write and read as the tool server does."""
    evidence = []
    for path, content in attack.writes.items():
        with contextlib.suppress(OSError):
            await sandbox.write_file(path, content)
    for path in attack.reads:
        with contextlib.suppress(OSError):
            content = await sandbox.read_file(path)
            evidence.append("PWNED the server read a secret" if world.token.encode() in content else "")
    return evidence


async def _next(sandbox: Sandbox, *, control: bool) -> str:
    # Without the mount namespace /tmp is the outer world's.
    folders = ("/work",) if control else ("/work", "/tmp", "/dev/shm")
    try:
        job = Job("next", code=NEXT.replace("@FOLDERS@", repr(folders)), wall_s=10.0)
        outcome: Outcome = await sandbox.run(job)
    except (SandboxFailure, LookupError, ValueError) as error:
        return f"failure: {error}"
    return outcome.stdout.strip() if outcome.exit_code == 0 else f"{outcome.status.value}: {outcome.stderr[-300:]}"


async def attack_all(world: World, make: Make) -> AsyncIterator[Result]:
    """Try every attack against all defences."""
    for limits, attacks in _by_limits(ATTACKS):
        async with make(limits, ALL_DEFENCES) as backend:
            async for result in _in_turn(attacks, world, backend, control=False):
                yield result


async def _in_turn(
    attacks: list[Attack], world: World, backend: SandboxBackend, *, control: bool
) -> AsyncIterator[Result]:
    """Try one after the other in the same sandbox, as long as that is as it was."""
    sandbox = None
    for attack in attacks:
        for _ in range(TRIES if control else 1):
            if attack.fresh and sandbox is not None:
                await sandbox.close()
                sandbox = None
            sandbox = sandbox or await backend.open("attacked")
            result = await attempt(attack, world, sandbox, backend, control=control)
            result = _lacks(attack, result) if control else result
            if attack.hurts_itself or result.next != "42" or (control and attack.breaks_control):
                await sandbox.close()
                sandbox = None
            if result.success or result.skip:
                break
        yield result


def _by_limits(attacks: Iterable[Attack]) -> list[tuple[SandboxLimits, list[Attack]]]:
    groups: dict[str, list[Attack]] = {}
    for attack in attacks:
        groups.setdefault(json.dumps({**LIMITS, **attack.limits}), []).append(attack)
    return [(SandboxLimits(**json.loads(text)), group) for text, group in groups.items()]


async def control_all(world: World, make: Make, backend_name: str) -> AsyncIterator[Result]:
    """Try every attack without the defence against it."""
    for limits, attacks in _by_limits(ATTACKS):
        for defences, defence in _by_defences(attacks, backend_name).items():
            async with make(limits, defences) as backend:
                changed = [_otherwise(attack, control) for attack, control in defence]
                async for result in _in_turn(changed, world, backend, control=True):
                    yield result
    async with make(SandboxLimits(**LIMITS), ALL_DEFENCES) as backend:
        for attack in ATTACKS:
            control = attack.control_of(backend_name)
            if isinstance(control, Bare):
                yield _lacks(attack, await bare(attack, world, control, backend))


def _by_defences(attacks: list[Attack], backend: str) -> dict[frozenset[Defence], list[tuple[Attack, Control]]]:
    groups: dict[frozenset[Defence], list[tuple[Attack, Control]]] = {}
    for attack in attacks:
        control = attack.control_of(backend)
        if isinstance(control, Without | Otherwise):
            away = control.defences if isinstance(control, Without) else frozenset()
            groups.setdefault(ALL_DEFENCES - away, []).append((attack, control))
    return groups


def _otherwise(attack: Attack, control: Control) -> Attack:
    if attack.control_wall_s is not None:
        attack = replace(attack, wall_s=attack.control_wall_s)
    if not isinstance(control, Otherwise):
        return attack
    stateful = attack.then_stateful if control.then_stateful is None else control.then_stateful
    fresh = attack.then_fresh if control.then_fresh is None else control.then_fresh
    return replace(attack, then_stateful=stateful, then_fresh=fresh)


def _lacks(attack: Attack, result: Result) -> Result:
    if attack.kernel_may_lack and not result.success:
        lines = [line for line in result.said.splitlines() if any(word in line for word in LACKING)]
        if lines or result.status == "killed":
            result.skip = f"this kernel does not let anybody: {lines[-1] if lines else result.said}"
    return result


async def bare(attack: Attack, world: World, control: Bare, opener: SandboxBackend) -> Result:
    """Run an attack's code without a sandbox, in a folder of the outer world's."""
    world.reset()
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as exits:
        folder = exits.enter_context(tempfile.TemporaryDirectory())
        await _neighbour(attack, world, opener, exits)
        Path(folder).chmod(0o777)
        code = world.code(attack.code).replace("'/work/", f"'{folder}/").replace('"/work/', f'"{folder}/')
        python = (
            shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin") or sys.executable
        )  # nobody may not see ours
        process = await asyncio.create_subprocess_exec(
            *("setpriv", f"--reuid={control.user}", f"--regid={control.user}", "--clear-groups"),
            *(python, "-I", "-c", code),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            stdout, stderr = await asyncio.wait_for(process.communicate(), 20)
        except TimeoutError:
            process.kill()
            stdout, stderr = await process.communicate()
    success = "; ".join(filter(None, [_pwned(stdout.decode()), world.damage()]))
    output = (stdout[-200:] + stderr[-400:]).decode(errors="replace")
    return Result(attack.name, True, success, f"exit {process.returncode}", output, time.monotonic() - began, "42")


async def main(outer: Outer, backend: str, image: str, root: Path, *, controls: bool) -> None:
    """Print what became of everything."""
    async with contextlib.AsyncExitStack() as exits:
        make = exits.enter_context(_makers(outer, backend, image))
        world = await exits.enter_async_context(World(root))
        async for result in attack_all(world, make):
            print(json.dumps(asdict(result)), flush=True)
        if controls:
            async for result in control_all(world, make, backend):
                print(json.dumps(asdict(result)), flush=True)


@contextlib.contextmanager
def _makers(outer: Outer, backend: str, image: str) -> Iterator[Make]:
    os.environ[CGROUP_VARIABLE] = outer.cgroup
    if backend == "bubblewrap":
        from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend

        yield lambda limits, defences: BubblewrapBackend(SandboxConfig(limits=limits), defences)
        return
    import docker
    from dockerd import own_daemon

    from agentrl.sandbox.docker.backend import DockerBackend

    with own_daemon() as daemon:
        client = docker.APIClient(base_url=daemon.url, timeout=120)
        client.import_image_from_file(image, repository="agentrl-attacked", tag="test")
        client.close()
        config = SandboxConfig(backend="docker", image="agentrl-attacked:test", docker_url=daemon.url)
        yield lambda limits, defences: DockerBackend(config.model_copy(update={"limits": limits}), defences)


if __name__ == "__main__":
    assert sys.argv[2] in BACKENDS
    outer = Outer.parse(sys.argv[1])
    stop_signals()
    if child := os.fork():
        sys.exit(reap_all(child))
    try:
        place = enter(outer)
    except NoOuterWorld as fault:
        print(json.dumps({"skip": str(fault)}), flush=True)
        sys.exit(0)
    holds = prove(outer)
    print(json.dumps({"outer": holds}), flush=True)
    if not all(holds.values()):
        sys.exit(3)
    asyncio.run(main(outer, sys.argv[2], sys.argv[3], place, controls=sys.argv[4] == "controls too"))
