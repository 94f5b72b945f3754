"""The walk of a sampled token, traced in a real run: ``python -m tests.structure.walk`` prints it.

A run with one training step is made in this process, with a real engine, a real tool server and a real learner rank; only Ray's
transport is left out. From the reply that brings the tokens of one turn on, each call and return of a function of agentrl is
looked at. A function is on the walk if

- it returns a data type that holds these tokens (`CARRIERS`), or
- it stores them in its object, from which another function takes them later, or calls the function that does, or
- it computes the log-probabilities of the policy from a micro-batch that holds them, or
- it is on the stack when the loss is computed, and a caller or a callee has given it such a data type.

Functions that only look at the tokens, such as checks and metrics, are not. Properties are part of their data type.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from tests.structure.layers import PACKAGE

COMMAND = (
    "train", "--env", "search_r1", "train.steps=1", "train.eval_every=0", "eval.size=1", "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=4", "rollout.concurrency=1", "run.seed=7", "sampler.embedded.threads=1",
    "learner.precision=float32", "train.eval_first=false", "weights.gap_limit=off",
)  # fmt: skip
CARRIERS = {
    "Generation", "Segment", "Row", "Rollout", "StepGroups", "StepRollouts", "TrainingStep", "OptimizerStep", "MicroBatch",
    "GlobalBatch", "LossInput",
}  # fmt: skip
"""Data types in which a token travels."""
SOURCE, SINK = "read_reply", "PolicyObjective.__call__"
MARKED = 6
"""Tokens of the turn that is followed; enough for no other turn to have the same."""


@dataclass(frozen=True, order=True)
class Function:
    """A function of agentrl."""

    file: str
    """Path in the repository."""
    name: str
    """With its class."""


@dataclass
class Tracer:
    """Looks at calls and returns; see the module."""

    ids: bytes = b""
    logprobs: bytes = b""
    returned: dict[Function, int] = field(default_factory=dict)
    """Functions that returned the tokens, in the order of their first time."""
    given: dict[Function, int] = field(default_factory=dict)
    """Functions to which a callee returned the tokens."""
    received: dict[Function, int] = field(default_factory=dict)
    """Functions that were called with the tokens."""
    computed: dict[Function, int] = field(default_factory=dict)
    """Functions that were called with the tokens and returned a tensor with a gradient."""
    taken: dict[Function, int] = field(default_factory=dict)
    """Functions that took the tokens from their object: they had them from no caller or callee, and handed them on."""
    callers: dict[Function, set[Function]] = field(default_factory=dict)
    """Functions that called a function with the tokens."""
    at_loss: set[Function] = field(default_factory=set)
    """Functions on the stack of the loss which hold the tokens."""
    holding: set[int] = field(default_factory=set)
    """Frames that were given the tokens, by a caller or a callee."""
    frames: list[FrameType] = field(default_factory=list)
    """Keeps those frames, so that their numbers stay theirs."""
    clock: int = 0
    stack: contextvars.ContextVar[tuple[FrameType, ...]] = field(
        default_factory=lambda: contextvars.ContextVar("stack", default=())
    )
    """Frames of the thread that started this one."""

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Look at a call or a return; see `sys.setprofile`."""
        code = frame.f_code
        if not code.co_filename.startswith(_ROOT):
            return
        self.clock += 1
        if event == "return":
            self._on_return(frame, argument)
        elif event == "call" and self.ids and id(frame) not in self.holding:
            self._on_call(frame)

    def _on_call(self, frame: FrameType) -> None:
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        arguments = [frame.f_locals[name] for name in names if name != "self" and name in frame.f_locals]
        if any(self.holds(argument) for argument in arguments):
            self.received.setdefault(function_of(code), self.clock)
            self._hold(frame)
            caller = self._caller(frame)
            if caller is not None:
                self.callers.setdefault(function_of(code), set()).add(function_of(caller.f_code))
                self._take(caller)
            if code.co_qualname == SINK:
                self.at_loss |= {
                    function_of(caller.f_code) for caller in self.callers_of(frame) if id(caller) in self.holding
                }

    def _on_return(self, frame: FrameType, value: Any) -> None:
        code = frame.f_code
        if not self.ids:
            generation = getattr(value, "generation", value)
            if code.co_qualname != SOURCE or generation is None or len(generation.token_ids) < MARKED:
                return
            self.ids = np.asarray(generation.token_ids, np.int64)[:MARKED].tobytes()
            self.logprobs = np.asarray(generation.logprobs, np.float32)[:MARKED].tobytes()
        if is_gradient(value) and id(frame) in self.holding:
            self.computed.setdefault(function_of(code), self.clock)
        if self.holds(value) and not code.co_name.startswith("<"):
            if not is_property(frame):
                self.returned.setdefault(function_of(code), self.clock)
                self._take(frame)
            caller = self._caller(frame)
            if caller is not None and not is_property(frame):
                self.given.setdefault(function_of(caller.f_code), self.clock)
                self._hold(caller)

    def _take(self, frame: FrameType) -> None:
        """Note that a frame hands the tokens on; if it was given them by nobody, it took them from its object."""
        if id(frame) not in self.holding:
            self.taken.setdefault(function_of(frame.f_code), self.clock)
            self._hold(frame)

    def _hold(self, frame: FrameType) -> None:
        if id(frame) not in self.holding:
            self.holding.add(id(frame))
            self.frames.append(frame)

    def _caller(self, frame: FrameType) -> FrameType | None:
        """Return the calling frame of agentrl; None for a task of the event loop, and for the first of a thread."""
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(_ROOT):
            if caller.f_code.co_filename.endswith(_BORDERS):
                return None
            caller = caller.f_back
        return caller

    def callers_of(self, frame: FrameType | None) -> Iterator[FrameType]:
        """Yield the frames of agentrl on the stack, also those of the thread that started this one."""
        while frame is not None:
            if frame.f_code.co_filename.startswith(_ROOT):
                yield frame
            frame = frame.f_back
        yield from self.stack.get()

    def holds(self, value: Any, depth: int = 5) -> bool:
        """Whether a value is, or is a list of, data types that hold the tokens."""
        if isinstance(value, list | tuple):
            return any(self.holds(item, depth) for item in value[:64])
        return type(value).__name__ in CARRIERS and self._in_fields(value, depth)

    def _in_fields(self, value: Any, depth: int) -> bool:
        """Whether the fields of a data type have the tokens."""
        if depth == 0:
            return False
        return any(self._in_field(getattr(value, name, None), depth) for name in field_names(value))

    def _in_field(self, value: Any, depth: int) -> bool:
        if isinstance(value, torch.Tensor | np.ndarray):
            return self._in_array(value)
        if isinstance(value, list | tuple):
            if value and isinstance(value[0], int):
                return self._in_array(np.asarray(value)) if all(isinstance(item, int) for item in value) else False
            return any(self._in_field(item, depth) for item in value[:64])
        return type(value).__name__ in CARRIERS and self._in_fields(value, depth - 1)

    def _in_array(self, array: torch.Tensor | np.ndarray[Any, Any]) -> bool:
        if array.ndim != 1 or len(array) < MARKED:
            return False
        if isinstance(array, torch.Tensor):
            array = array.detach().cpu().numpy()
        if np.issubdtype(array.dtype, np.integer):
            return self.ids in array.astype(np.int64).tobytes()
        return array.dtype == np.float32 and self.logprobs in array.tobytes()

    def walk(self) -> list[Function]:
        """The functions on the walk, in the order in which the token first reached them."""
        handed_on = self.returned.keys() | self.at_loss
        taken = {_class_of(function): time for function, time in self.taken.items() if function in handed_on}
        storing = {
            function
            for function, time in (self.received | self.given).items()
            if _class_of(function) and time < taken.get(_class_of(function), 0)
        } - self.returned.keys()
        storing |= {caller for function in storing for caller in self.callers.get(function, ()) if caller in self.given}
        functions = {*self.returned, *self.computed, *self.at_loss, *storing}
        times = self.received | self.given | self.returned | self.computed
        return sorted(functions, key=lambda function: times.get(function, 0))


def field_names(value: Any) -> list[str]:
    """Names of the fields of a data type; rollouts of a training step are one."""
    return (
        [field.name for field in fields(value)] if is_dataclass(value) else list(getattr(type(value), "__slots__", ()))
    )


def is_gradient(value: Any) -> bool:
    """Whether a value is a tensor with a gradient, or begins with one."""
    if isinstance(value, tuple) and value:
        value = value[0]
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_property(frame: FrameType) -> bool:
    """Whether a frame is that of a property."""
    owner = frame.f_locals.get("self")
    member = inspect.getattr_static(type(owner), frame.f_code.co_name, None) if owner is not None else None
    return member is not None and not inspect.isfunction(member) and not isinstance(member, classmethod | staticmethod)


def function_of(code: CodeType) -> Function:
    """Return the function of a code object; a lambda or a function inside another one counts as that one."""
    name = code.co_qualname.partition(".<locals>")[0]
    return Function(str(Path(code.co_filename).relative_to(PACKAGE.parent)), name)


def _class_of(function: Function) -> str:
    return function.name.rpartition(".")[0]


_ROOT = str(PACKAGE) + os.sep
_BORDERS = ("asyncio/events.py", "threading.py", "structure/walk_learner.py")
"""Files of the functions that start a task, a thread, or a call of an actor: what runs there was called by nobody."""


def trace(folder: Path) -> list[Function]:
    """Make the run in a folder, and return the functions on the walk."""
    from tests.structure.walk_learner import use_local_ranks

    tracer = Tracer()
    to_thread = asyncio.to_thread

    async def to_traced_thread(function: Any, /, *arguments: Any, **options: Any) -> Any:
        callers = tuple(tracer.callers_of(sys._getframe(1)))
        token = tracer.stack.set(callers)
        try:
            return await to_thread(function, *arguments, **options)
        finally:
            tracer.stack.reset(token)

    asyncio.to_thread = to_traced_thread  # type: ignore[assignment]
    use_local_ranks()
    from agentrl.cli.main import main

    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        assert main([*COMMAND, f"run.dir={folder / 'run'}"]) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return tracer.walk()


def main() -> None:
    """Print the walk."""
    with tempfile.TemporaryDirectory(prefix="agentrl-walk-") as folder:
        functions = trace(Path(folder))
    print(f"{len(functions)} functions in {len({function.file for function in functions})} files:")
    print(*(f"{function.file}: {function.name}" for function in functions), sep="\n")


if __name__ == "__main__":
    main()
