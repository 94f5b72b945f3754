"""Conversations of a scripted agent that solves exercises, or makes a mistake, for supervised fine-tuning.

Its commands come from the exercises' solutions, and what it reads is what the commands have printed: they were run in a folder of
this machine, in the place of the exercise's `WORK`.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from agentrl import Tool, served_tools, unknown_name
from agentrl_tasks.faults import check_faults

from .data import make_exercise
from .exercise import WORK, Exercise
from .kinds import COLORS, KEYS, KINDS, NAMES, PRACTICE, THINGS

FAULTS = ("idle", "forgotten", "name", "place", "option")
"""Mistakes of a demonstration, at most one. idle: no command at all. forgotten: one command of the solution is left out. name:
another name, color or key is written in the place of one. place: the result goes to another file. option: a command lacks what
makes it right, such as ``-c`` of ``grep``."""
DONE = "Done."
"""The turn that ends an episode."""
_LISTS = (COLORS, THINGS, NAMES, KEYS, ("ERROR", "WARNING", "INFO", "DEBUG"))
_OPTIONS = (
    ("grep -c ", "grep "),
    ("grep -rl ", "grep -r "),
    ("mkdir -p ", "touch "),
    ("sed -i ", "sed "),
    ("sort -u ", "sort "),
    ("NR > 1 ", ""),
    ("chmod +x ", "chmod -x "),
    ("printf ", "echo "),
    (" > ", " < "),
)
"""What is replaced in a command, and by what, for the fault ``option``."""
_OTHER_FILE = "output.txt"
_COMMAND_S = 20.0

Demonstration = Sequence[tuple[str, str]]
"""Commands, each with the observation that the policy reads after it."""


def move(text: str, work: Path | str) -> str:
    """Return a text with a folder in place of `WORK`."""
    return re.sub(rf"{WORK}\b", str(work), text)


def put_files(exercise: Exercise, work: Path) -> None:
    """Write the files of an exercise into a folder that is in the place of `WORK`."""
    for name, text in exercise.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(move(text, work))


def run_commands(exercise: Exercise, commands: Sequence[str]) -> Demonstration:
    """Run commands in a folder with the files of an exercise; return what a policy reads after each, as of the tool `bash`."""
    work = Path(tempfile.mkdtemp(prefix="agentrl-demonstration-"))
    try:
        put_files(exercise, work)
        return [(command, _observe(command, work)) for command in commands]
    finally:
        shutil.rmtree(work)


def _observe(command: str, work: Path) -> str:
    process = subprocess.run(
        ["bash", "-c", move(command, work)],
        cwd=work,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_COMMAND_S,
        env={"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    output = process.stdout.decode("utf-8", "replace").replace(str(work), WORK).rstrip("\n")
    status = f"[exit status {process.returncode}]" if process.returncode else ""
    return "\n".join(line for line in (output, status) if line) or "[no output]"


def demonstrate(exercise: Exercise, fault: str | None, rng: Random) -> Demonstration:
    """Return a demonstration: what the agent looks at, and then the solution's commands.

    Args:
        exercise: to solve.
        fault: one of `FAULTS`; an exercise that cannot have it gets another one. None: the solution as it is.
        rng: chooses where the mistake is.
    """
    commands: list[str] = list(exercise.commands)
    if fault is not None:
        start = FAULTS.index(fault)
        changes = (_CHANGES[name](commands, rng) for name in (*FAULTS[start:], *FAULTS[:start]))
        commands = next(changed for changed in changes if changed is not None)
    return run_commands(exercise, [*exercise.looks, *commands] if commands else [])


def _idle(commands: Sequence[str], rng: Random) -> list[str] | None:
    return []


def _forgotten(commands: Sequence[str], rng: Random) -> list[str] | None:
    if len(commands) < 2:
        return None
    left_out = rng.randrange(len(commands))
    return [command for number, command in enumerate(commands) if number != left_out]


def _name(commands: Sequence[str], rng: Random) -> list[str] | None:
    number = rng.randrange(len(commands))
    command = commands[number]
    places = [(match, names) for names in _LISTS for match in re.finditer(rf"\b(?:{'|'.join(names)})\b", command)]
    if not places:
        return None
    match, names = rng.choice(places)
    name = rng.choice([name for name in names if name != match[0]])
    return _replaced(commands, number, f"{command[: match.start()]}{name}{command[match.end() :]}")


def _place(commands: Sequence[str], rng: Random) -> list[str] | None:
    number = len(commands) - 1
    head, work, _ = commands[number].rpartition(f"{WORK}/")
    return _replaced(commands, number, f"{head}{WORK}/{_OTHER_FILE}") if work else None


def _option(commands: Sequence[str], rng: Random) -> list[str] | None:
    places = [
        (number, right, wrong)
        for number, command in enumerate(commands)
        for right, wrong in _OPTIONS
        if right in command
    ]
    if not places:
        return None
    number, right, wrong = rng.choice(places)
    return _replaced(commands, number, commands[number].replace(right, wrong, 1))


def _replaced(commands: Sequence[str], number: int, command: str) -> list[str]:
    return [*commands[:number], command, *commands[number + 1 :]]


_CHANGES: Mapping[str, Callable[[Sequence[str], Random], list[str] | None]] = {
    "idle": _idle,
    "forgotten": _forgotten,
    "name": _name,
    "place": _place,
    "option": _option,
}


def chat(exercise: Exercise, demonstration: Demonstration, tool: Tool) -> dict[str, Any]:
    """Return a conversation as a row for ``agentrl sft``: messages and tools as in the API of OpenAI."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": exercise.instruction}]
    for number, (command, observation) in enumerate(demonstration, 1):
        function = {"name": tool.name, "arguments": json.dumps({"command": command})}
        call = {"id": f"c{number}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": observation},
        ]
    schema = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {
        "messages": [*messages, {"role": "assistant", "content": DONE}],
        "tools": [{"type": "function", "function": schema}],
    }


class Chats:
    """Conversations by number; the same ones every time.

    Args:
        faults: the probability of each of `FAULTS`.
        seed: draws exercises, of the split ``train``, and faults.
        kinds: names of `KINDS`, which alternate.
        practice: the probability that a conversation is about an exercise of `PRACTICE` instead, without a mistake.

    Raises:
        UnknownNameError: a fault or a kind is unknown.
        ConfigError: the faults are no probabilities.
    """

    def __init__(
        self, faults: Mapping[str, float], seed: int, kinds: Sequence[str] = tuple(KINDS), practice: float = 0.0
    ) -> None:
        check_faults(faults, FAULTS)
        for kind in kinds:
            if kind not in KINDS:
                raise unknown_name("kind of exercise", kind, KINDS, "--kinds")
        self._faults, self._seed, self._kinds, self._practice = faults, seed, kinds, practice
        [self._tool] = served_tools("terminal")

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return conversation ``number``, from 0, as a row for ``agentrl sft``."""
        rng = Random(f"{self._seed}/demonstration/{number}")
        if rng.random() < self._practice:
            exercise = make_exercise(rng.choice(tuple(PRACTICE)), "train", self._seed, number)
            return chat(exercise, demonstrate(exercise, None, rng), self._tool)
        variant, kind = divmod(number, len(self._kinds))
        exercise = make_exercise(self._kinds[kind], "train", self._seed, variant)
        draw = rng.random()
        limits = zip(self._faults, accumulate(self._faults.values()), strict=True)
        fault = next((name for name, limit in limits if draw < limit), None)
        return chat(exercise, demonstrate(exercise, fault, rng), self._tool)
