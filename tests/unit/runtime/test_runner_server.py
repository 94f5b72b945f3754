"""What a runner process sends of a group that fails."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.core.errors import RunnerError, RunStopped
from agentrl.core.task import Task
from agentrl.data.jobs import Job
from agentrl.runtime.runners.messages import GroupEnded, RunGroup
from agentrl.runtime.runners.process import RunnerServer


class Frames:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


class Failing:
    """Services whose runner raises an error."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def runner(self, fleet: int, sampling: object) -> Any:
        async def run_many(*arguments: object, **options: object) -> None:
            raise self._error

        return SimpleNamespace(run_many=run_many)


def ended(error: Exception) -> GroupEnded:
    """Return what a runner sends of a group whose episodes raise an error."""

    async def run() -> GroupEnded:
        frames: Any = Frames()
        server = RunnerServer(asyncio.StreamReader(), frames)
        server._services = Failing(error)  # type: ignore[assignment]
        await server._run(RunGroup(4, [Job(Task("t7", ()), 0, "r")], 0, None, None))
        frame = frames.written[-1]
        return pickle.loads(frame[8:])

    return asyncio.run(run())


def test_an_error_that_the_runs_process_cannot_read_is_sent_in_words() -> None:
    class LocalError(Exception):
        """Cannot be pickled."""

    message = ended(LocalError("no more names"))
    assert message.group == 4
    assert isinstance(message.error, RunnerError)
    assert str(message.error) == "episodes of task 't7': LocalError: no more names"


@pytest.mark.parametrize("error", [RunStopped("enough"), RunnerError("gone")])
def test_errors_of_agentrl_are_sent_as_they_are(error: Exception) -> None:
    message = ended(error)
    assert (type(message.error), str(message.error)) == (type(error), str(error))
