"""Grading: the tests of a task's step run in a machine in which no agent has worked, or, if the task says so, in the agent's.

Separate mode, in this order: the task's collecting commands run in the agent's machine; after the last step all of its processes
are killed; its artifacts, or its working folder if it has declared none, are copied out and checked
(`agentrl.containers.carried_files`); they are written to a clean machine; the tests are written there, where the agent has never
been, and run; all processes of that machine are killed; then its reward file is read, once.

In shared mode all of this happens in the agent's machine, where the agent can change programs, tests and rewards: such a grade is
marked as forgeable (docs/explanation/grading.md).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import os
import posixpath
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from docker.errors import NotFound

from agentrl.containers.archives import Download, DownloadError
from agentrl.containers.carried_files import Changes, Entry, Tree, find_changes, read_tree, without
from agentrl.containers.machine import Command, CommandResult, Machine
from agentrl.containers.task_folder import TEST_SCRIPT, TESTS, TaskFolder, TaskStep
from agentrl.containers.task_toml import MAIN, ArtifactToml, expand_variables
from agentrl.core.errors import TaskError, ToolFailure

_log = logging.getLogger(__name__)

GradingMode = Literal["task", "separate", "shared"]
"""Where tests run: ``task``: as the task says, and separately if it says nothing; the others: whatever it says."""
LOGS = "/logs/verifier"
"""Folder of reward files in a machine."""
ARTIFACTS = "/logs/artifacts"
"""Folder of a machine that is always carried: Harbor adds it to the artifacts of every task."""
REWARD_FILES = (f"{LOGS}/reward.json", f"{LOGS}/reward.txt")
"""Files with rewards, the first one first."""
REWARD_BYTES = 2**16
CARRIED_BYTES = 2**28
"""Bytes that are carried of each artifact."""
OUTPUT_BYTES = 2**16
"""Bytes of output of tests that are kept."""
PATHS_AT_ONCE = 200
MOST_REFUSED = 1000
"""Paths of a grade that name what was not carried."""
FACTS = (
    'printf "%s:" "$PATH" "$LD_LIBRARY_PATH" "$NODE_PATH" "$PERL5LIB" "$RUBYLIB"; echo; '
    'for user; do id -u ${user:+"$user"} && id -g ${user:+"$user"} || exit; done'
)
"""Prints folders in which programs look for others, then the ids of user and group of each argument, empty: the machine's."""
CLOSE_TO_AGENT = 'mkdir -p "$3" && chmod +x "$1" && chmod 700 "$2" "$3" && chown "$4" "$3"'
"""Makes tests ready. The agent's programs, if tests run them as another user, read no test and write no reward."""
_PROTECTED = (TESTS, LOGS)
_USER_NAME = re.compile(r"[A-Za-z_][\w.-]*")


class GradingFailure(ToolFailure):
    """Tests gave no reward, and neither the agent's work nor a limit of the tests is the reason that is known."""


@dataclass(frozen=True, slots=True)
class Grade:
    """What the tests of a step gave.

    Example: ``Grade({"reward": 1.0}, forgeable=False, output="2 passed\\n", seconds=3.1)``.
    """

    rewards: Mapping[str, float]
    """Rewards by name; empty if a limit ended the tests."""
    forgeable: bool
    """Whether the tests ran where the agent had worked."""
    output: str = ""
    """Output of the tests; its middle may be left out."""
    at_limit: bool = False
    """Whether the tests were ended by their time limit, or for endless output."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Files of the agent that were not carried, with the reason; of very many the first `MOST_REFUSED`."""
    seconds: float = 0.0
    """Wall time of the tests."""


def single_reward(rewards: Mapping[str, float]) -> float:
    """Return the number that an episode gets: the reward called ``reward``, else the mean of all, else 0."""
    if "reward" in rewards:
        return rewards["reward"]
    return sum(rewards.values()) / len(rewards) if rewards else 0.0


def is_separate(folder: TaskFolder, step: int, mode: GradingMode) -> bool:
    """Return whether the tests of a step run in another machine than the agent's."""
    if mode != "task":
        return mode == "separate"
    return folder.steps[step].grading.is_separate


async def grade(
    folder: TaskFolder,
    step: int,
    machine: Machine,
    open_clean: Callable[[], Awaitable[Machine]],
    *,
    mode: GradingMode = "task",
    is_last: bool = True,
) -> Grade:
    """Run the tests of a step.

    Args:
        folder: of the task.
        step: its number, from 0.
        machine: the agent's.
        open_clean: opens a new machine for the tests.
        mode: see `GradingMode`.
        is_last: whether no step follows, so that nothing of the agent need run on.

    Raises:
        GradingFailure: the tests ended without a valid reward file.
        SandboxFailure: a machine or its daemon is lost.
        TaskError: the task cannot be graded in this way.
    """
    task_step = folder.steps[step]
    separate = is_separate(folder, step, mode)
    _check(folder, task_step)
    await _collect(task_step, machine)
    if not separate:
        return await _grade_shared(folder, task_step, machine, is_last=is_last)
    if is_last:  # and not stopped: a server that is started again meanwhile can grade it again
        await machine.kill_all()
    clean = await open_clean()
    try:
        facts = await _facts(clean, task_step.user, task_step.grading.user)
        changes = await _carry(folder, task_step, machine, clean, facts)
        result = await _run_tests(folder, task_step, clean, facts.owners[task_step.grading.user])
        await clean.stop()
        rewards = {} if _at_limit(result) else await _read_rewards(clean, result)
    finally:
        await clean.close()
    refused = _printable(changes.refused)
    if refused:
        _log.info("%s: %d files of the agent were not carried: %s", folder.name, len(changes.refused), refused)
    return Grade(rewards, False, result.output, _at_limit(result), refused, result.seconds)


def _printable(refused: Mapping[str, str]) -> dict[str, str]:
    """Return the first paths, which agents have named with whatever bytes, as texts that can be sent and written."""
    paths = itertools.islice(refused, MOST_REFUSED)
    return {_text(path): _text(refused[path]) for path in paths}


def _text(path: str) -> str:
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


async def _grade_shared(folder: TaskFolder, step: TaskStep, machine: Machine, *, is_last: bool) -> Grade:
    await machine.upload({}, LOGS)
    await _run_as_root(machine, ("rm", "-rf", "--", *REWARD_FILES))
    owners = (await _facts(machine, step.grading.user)).owners
    result = await _run_tests(folder, step, machine, owners[step.grading.user])
    if is_last:
        await machine.stop()
    rewards = {} if _at_limit(result) else await _read_rewards(machine, result)
    if not is_last:  # the next step must see neither tests nor rewards
        await _run_as_root(machine, ("rm", "-rf", "--", TESTS, LOGS))
    return Grade(rewards, True, result.output, _at_limit(result), {}, result.seconds)


def _check(folder: TaskFolder, step: TaskStep) -> None:
    services: dict[str, str] = {}
    """Services of artifacts, by path."""
    for artifact in step.grading.artifacts:
        source = posixpath.normpath(artifact.source)
        for path, service in services.items():
            is_inside = f"{source}/".startswith(f"{path}/") or path.startswith(f"{source}/")
            if is_inside and service != (artifact.service or MAIN):
                both = f"{path} of {service} and {source} of {artifact.service or MAIN}"
                raise TaskError(f"task {folder.name}: tests would have the artifacts {both} one in the other")
        services[source] = artifact.service or MAIN
        if any(f"{path}/".startswith(f"{source.rstrip('/')}/") or source.startswith(f"{path}/") for path in _PROTECTED):
            raise TaskError(
                f"task {folder.name}: the artifact {artifact.source} would bring files into {' or '.join(_PROTECTED)}"
            )


async def _collect(step: TaskStep, machine: Machine) -> None:
    """Run the commands that prepare artifacts; as in Harbor, their failures are only logged."""
    for hook in step.grading.collect:
        container = await _container(machine, hook.service)
        result = await container.run(Command(hook.command, user=hook.user, wall_s=hook.timeout_sec))
        if result.exit_code != 0:
            end = result.output[-500:]
            _log.warning("the collecting command %r ended with %s: %s", hook.command, result.exit_code, end)


async def _container(machine: Machine, service: str | None) -> Machine:
    return machine if service in (None, MAIN) else await machine.service(str(service))


async def _run_tests(folder: TaskFolder, step: TaskStep, machine: Machine, owner: str) -> CommandResult:
    """Write the tests to a machine, and run them."""
    grading = step.grading
    for tests in grading.tests:
        await machine.upload(tests, TESTS, owner=owner)
    await _run_as_root(machine, ("/bin/sh", "-c", CLOSE_TO_AGENT, "sh", TEST_SCRIPT, TESTS, LOGS, owner))
    try:
        env = expand_variables(grading.env, os.environ, "verifier.env")
    except ValueError as error:
        raise TaskError(f"task {folder.name}: {error}") from None
    return await machine.run(
        Command(TEST_SCRIPT, user=grading.user, env=env, wall_s=grading.timeout_s, output_bytes=OUTPUT_BYTES)
    )


async def _run_as_root(machine: Machine, words: tuple[str, ...]) -> None:
    result = await machine.run(Command(words, user="0"))
    if result.exit_code != 0:
        raise GradingFailure(f"{' '.join(words)[:200]} ended with {result.exit_code}: {result.output[-500:]}")


def _at_limit(result: CommandResult) -> bool:
    return result.timed_out or result.flooded


@dataclass(frozen=True, slots=True)
class _Facts:
    """What is known of a machine."""

    search_folders: frozenset[str]
    """Folders in which programs look for others."""
    owners: Mapping[str | None, str]
    """``UID:GID`` by user; None: the machine's."""


async def _facts(machine: Machine, *users: str | None) -> _Facts:
    """Return the facts of a machine and its users, by one command if they have names: each costs more than what it does."""
    names = [user for user in dict.fromkeys(users) if user is None or _USER_NAME.fullmatch(user)]
    words = ("/bin/sh", "-c", FACTS, "sh", *(name or "" for name in names))
    search_path, *ids = await _lines(machine, Command(words), 1 + 2 * len(names))
    owners = {name: ":".join(ids[2 * number : 2 * number + 2]) for number, name in enumerate(names)}
    for user in users:
        if user not in owners:  # a number, which the daemon reads
            owners[user] = ":".join(await _lines(machine, Command("id -u && id -g", user=user), 2))
    folders = {posixpath.normpath(path) for path in search_path.split(":") if path.startswith("/")}
    return _Facts(frozenset(folders), owners)


async def _lines(machine: Machine, command: Command, count: int) -> list[str]:
    result = await machine.run(command)
    lines = result.output.splitlines()
    if result.exit_code != 0 or len(lines) != count:
        user = "" if command.user is None else f" of user {command.user}"
        raise GradingFailure(f"the ids{user} are unknown in machine {machine.id}: {result.output[-500:]}")
    return lines


async def _carry(folder: TaskFolder, step: TaskStep, machine: Machine, clean: Machine, facts: _Facts) -> Changes:
    """Write what the agent has changed to the clean machine."""
    artifacts = list(step.grading.artifacts)
    if all(posixpath.normpath(artifact.source) == ARTIFACTS for artifact in artifacts):
        artifacts.append(ArtifactToml(source=await _working_folder(folder, clean)))
    agent_tree: dict[str, Entry] = {}
    clean_tree: dict[str, Entry] = {}
    roots, too_large = [], {}
    for artifact in artifacts:
        root = posixpath.normpath(artifact.source)
        before = await _tree(clean, artifact)
        try:
            agent_tree |= await _tree(await _container(machine, artifact.service), artifact)
        except DownloadError as error:
            too_large[root] = str(error)
        else:
            clean_tree |= before
            roots.append(root)
    named = {path for path in roots if agent_tree.get(path, Entry("folder")).kind != "folder"}
    changes = await asyncio.to_thread(
        find_changes,
        agent_tree,
        clean_tree,
        roots,
        named=named,
        search_folders={
            folder for folder in facts.search_folders if not any(f"{root}/".startswith(f"{folder}/") for root in roots)
        },
    )
    for start in range(0, len(changes.removed), PATHS_AT_ONCE):
        await _run_as_root(clean, ("rm", "-rf", "--", *changes.removed[start : start + PATHS_AT_ONCE]))
    user, group = facts.owners[step.user].split(":")
    await _make_parents(clean, changes, clean_tree)
    await clean.upload_tar(await asyncio.to_thread(changes.archive, int(user), int(group)), "/")
    return Changes(changes.entries, changes.removed, {**changes.refused, **too_large})


async def _make_parents(clean: Machine, changes: Changes, clean_tree: Tree) -> None:
    removed = tuple(f"{path}/" for path in changes.removed)
    folders = {
        path for path, entry in clean_tree.items() if entry.kind == "folder" and not f"{path}/".startswith(removed)
    }
    parents = {posixpath.dirname(path) for path in changes.entries} - set(changes.entries) - folders
    if parents:
        await _run_as_root(clean, ("mkdir", "-p", "--", *sorted(parents)))


async def _working_folder(folder: TaskFolder, clean: Machine) -> str:
    result = await clean.run(Command("pwd -P"))
    path = result.output.strip()
    if result.exit_code != 0 or path.count("/") < 1 or path == "/":
        raise TaskError(
            f"task {folder.name} declares no artifacts, and its working folder {path or 'is unknown'} cannot be carried whole: "
            "set artifacts or environment.workdir in its task.toml, or tools.terminal.options.grading=shared"
        )
    return path


async def _tree(machine: Machine, artifact: ArtifactToml) -> dict[str, Entry]:
    """Return the files of an artifact; none if it is not there.

    Raises:
        DownloadError: it is too large.
    """
    root = posixpath.normpath(artifact.source)
    try:
        download: Download = await machine.download(root, CARRIED_BYTES)
    except DownloadError as error:
        if isinstance(error.__cause__, NotFound):
            return {}
        raise
    return without(await asyncio.to_thread(read_tree, download, root), root, artifact.exclude)


async def _read_rewards(machine: Machine, result: CommandResult) -> dict[str, float]:
    for path in REWARD_FILES:
        try:
            files = (await machine.download(path, REWARD_BYTES)).files()
        except DownloadError as error:
            if isinstance(error.__cause__, NotFound):
                continue
            raise GradingFailure(f"{path} cannot be read: {error}") from error
        content = files.get(posixpath.basename(path))
        if content is None:
            raise GradingFailure(f"{path} is no regular file")
        return parse_rewards(path, content)
    raise GradingFailure(
        f"the tests wrote neither {' nor '.join(REWARD_FILES)}; they ended with {result.exit_code}, after "
        f"{result.output[-1000:] or 'no output'}"
    )


def parse_rewards(path: str, content: bytes) -> dict[str, float]:
    """Return the rewards in a reward file.

    Raises:
        GradingFailure: it is empty, cannot be parsed, or a reward is no finite number.
    """
    try:
        text = content.decode()
        values = json.loads(text) if path.endswith(".json") else {"reward": float(text)}
        if isinstance(values, int | float):
            values = {"reward": values}
        rewards = {str(name): float(value) for name, value in values.items() if _is_number(name, value)}
    except (ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise GradingFailure(f"{path} has no rewards: {error}: {content[:200]!r}") from None
    if not rewards:
        raise GradingFailure(f"{path} has no reward in it")
    return rewards


def _is_number(name: str, value: object) -> bool:
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, which is no finite number")
    return True
