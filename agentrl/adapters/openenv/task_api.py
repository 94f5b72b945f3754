"""Tasks of a server's Task API."""

from __future__ import annotations

from typing_extensions import override

from agentrl.adapters.base import Json, SeededTasks
from agentrl.adapters.openenv.options import OpenEnvOptions
from agentrl.adapters.openenv.session import KEY
from agentrl.clients.http import ServiceClient, UnusableReplyError
from agentrl.core.errors import MissingError, ServiceError, ServiceRefusedError, unknown_name
from agentrl.core.task import MadeTasks, Task

_ABSENT = (404, 405, 501)
_EVAL = ("validation", "test")
"""Types of splits that ``eval`` may mean, the first one first."""


class ApiTasks(MadeTasks):
    """The tasks of a split, which the server's environment chooses by ``split`` and ``index`` of its reset.

    Args:
        name: of the environment at the server.
        split: at the server.
        size: number of tasks.
    """

    def __init__(self, name: str, split: str, size: int) -> None:
        super().__init__(split, size)
        self._name = name

    @override
    def make(self, index: int) -> Task:
        reset = {"split": self.split, "index": index}
        return Task(f"openenv/{self._name}/{self.split}/{index}", (), metadata={"reset": reset})


async def server_tasks(options: OpenEnvOptions, split: str) -> MadeTasks:
    """Return the tasks of a split; without a Task API those that differ in their seed.

    ``eval`` is, if the server has no split of that name, its first one for validation, or its first one for tests.

    Raises:
        MissingError: the server does not answer.
        UnknownNameError: it has no such split.
    """
    async with ServiceClient(options, KEY) as client:
        try:
            name = await client.get("/list_environments", _read_name)
            splits = await client.get(f"/{name}/splits", _read_splits)
            server_split = _choose_split(split, splits)
            size = await client.post(f"/{name}/num_tasks", {"split": server_split}, _read_size)
        except ServiceRefusedError as error:
            if error.status not in _ABSENT:
                raise MissingError(f"the tasks of env.name=openenv: {error}") from None
            return SeededTasks("openenv", split)
        except ServiceError as error:
            raise MissingError(f"the tasks of env.name=openenv: {error}") from None
    return ApiTasks(name, server_split, size)


def _choose_split(split: str, splits: Json) -> str:
    if split in splits:
        return split
    if split == "eval":
        for kind in _EVAL:
            for name, split_kind in splits.items():
                if split_kind == kind:
                    return str(name)
    raise unknown_name("split of the OpenEnv server", split, splits, "tasks.train_split or tasks.eval_split")


def _read_name(reply: object) -> str:
    if not isinstance(reply, list) or not reply or not isinstance(reply[0], str):
        raise UnusableReplyError(f"a reply without the name of an environment: {reply!r:.200}")
    return reply[0]


def _read_splits(reply: object) -> Json:
    if not isinstance(reply, list) or not all(isinstance(split, dict) and "name" in split for split in reply):
        raise UnusableReplyError(f"a reply that lists no splits: {reply!r:.200}")
    return {str(split["name"]): split.get("type") for split in reply}


def _read_size(reply: object) -> int:
    size = reply.get("num_tasks") if isinstance(reply, dict) else None
    if not isinstance(size, int) or size < 0:
        raise UnusableReplyError(f"a reply without num_tasks: {reply!r:.200}")
    return size
