"""Images that tasks name: refused unless allowed, checked by the canary, and used by all sandboxes of the episode."""

import asyncio
from typing import ClassVar

import pytest

from agentrl.config.sandbox import SandboxConfig
from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import MissingError, SandboxFailure, TaskError
from agentrl.core.types import ToolCall, ToolStatus
from agentrl.sandbox.base import Sandbox, SandboxBackend
from agentrl.testing import FakeSandbox
from agentrl.toolserver.client.client import ToolServerClient
from agentrl.toolserver.in_process import LocalToolClient
from agentrl.toolserver.server.app import make_app
from agentrl.toolserver.server.errors import ImageRefused
from agentrl.toolserver.server.task_images import TaskImages
from tests.unit.toolserver.fake_hosts import FakeTool, app_client, in_loop, in_sandbox, make_sessions
from tests.unit.toolserver.fake_server import fake_servers


class Images(SandboxBackend):
    """Sandboxes are named by their image; ``events`` has what happened to which image."""

    name = "images"
    isolated = False
    has_images = True
    events: ClassVar[list[tuple[str, str]]] = []
    missing: ClassVar[set[str]] = set()

    async def start(self) -> None:
        await asyncio.sleep(0)
        self.events.append(("start", self.config.image))
        if self.config.image in self.missing:
            raise MissingError(f"no image {self.config.image}: run `docker pull {self.config.image}`")

    async def open(self, session_id: str) -> Sandbox:
        self.events.append(("open", self.config.image))
        return FakeSandbox(self.config.image)

    async def close(self) -> None:
        self.events.append(("close", self.config.image))


class Isolated(Images):
    """Its sandboxes run code, but the canary's program answers nothing that it should."""

    isolated = True


@pytest.fixture(autouse=True)
def _nothing_yet() -> None:
    Images.events.clear()
    Images.missing.clear()


def backend(*images: str, cls: type[SandboxBackend] = Images) -> SandboxBackend:
    return cls(SandboxConfig(image="usual", images=images))


async def image_of(sessions, episode: str, image: str | None):
    session = await sessions.open(episode, image)
    return (await session.call(ToolCall("c", "fake", {}))).result


@in_loop
async def test_each_episode_runs_in_the_image_of_its_task_and_each_image_is_started_once() -> None:
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend("team/*", "exact:1"))
    expected = ["team/a", "team/a", "team/b:2", "exact:1", "usual", None]
    results = await asyncio.gather(*(image_of(sessions, str(n), image) for n, image in enumerate(expected)))
    assert [result.data for result in results] == [*expected[:5], "usual"]
    assert sorted(image for event_kind, image in Images.events if event_kind == "start") == [
        "exact:1",
        "team/a",
        "team/b:2",
    ]
    await sessions.stop()
    assert sorted(image for event_kind, image in Images.events if event_kind == "close") == [
        "exact:1",
        "team/a",
        "team/b:2",
    ]


@pytest.mark.parametrize("image", ["other", "team", "exact:2", "exact:11", "TEAM/a"])
@in_loop
async def test_an_image_that_is_not_allowed_is_refused(image: str) -> None:
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend("team/*", "exact:1"))
    with pytest.raises(ImageRefused, match=r"sandbox_image'\]=.*sandbox\.images, which has: team/\*, exact:1"):
        await sessions.open("e", image)
    async with app_client(make_app(sessions)) as client:
        reply = await client.post("/sessions", json={"episode_id": "e", "image": image})
        assert (reply.status_code, len(sessions)) == (422, 0)
    assert Images.events == []


@in_loop
async def test_a_backend_without_images_refuses_all() -> None:
    class Plain(Images):
        has_images = False

    with pytest.raises(ImageRefused, match=r"sandbox\.backend=images has no images; set sandbox\.backend=docker"):
        TaskImages(backend(cls=Plain)).check_allowed("usual")


@in_loop
async def test_a_server_without_sandboxes_ignores_the_image() -> None:
    sessions = make_sessions(FakeTool(in_sandbox))
    assert (await sessions.open("e", "any")).episode_id == "e"


@in_loop
async def test_a_missing_image_is_a_failure_of_the_sandbox_until_it_is_there() -> None:
    Images.missing.add("team/a")
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend("team/*"))
    for result in await asyncio.gather(*(image_of(sessions, name, "team/a") for name in "ab")):
        assert result.status is ToolStatus.SANDBOX_FAILURE
        assert "image team/a (the task's" in result.content
        assert "docker pull team/a" in result.content
    assert Images.events == [("start", "team/a")]
    Images.missing.clear()
    assert (await image_of(sessions, "c", "team/a")).status is ToolStatus.OK
    await sessions.stop()


@in_loop
async def test_no_session_gets_an_image_in_which_the_canary_fails() -> None:
    images = TaskImages(backend("team/*", cls=Isolated))
    with pytest.raises(
        SandboxFailure, match=r"image team/a .*: sandbox\.backend=images does not work here: the canary"
    ):
        await images.backend("team/a")
    opened_twice = [("open", "team/a")] * 2  # a sandbox that fails in the check may have been killed from outside
    assert Images.events == [("start", "team/a"), *opened_twice, ("close", "team/a")]
    await images.close()


@in_loop
async def test_a_session_that_waits_in_the_queue_keeps_its_image() -> None:
    sessions = make_sessions(FakeTool(in_sandbox), backend=backend("team/*"), max_sessions=1)
    first = await sessions.open("first")
    waiting = asyncio.create_task(image_of(sessions, "second", "team/a"))
    await asyncio.sleep(0)
    await sessions.close(first.id)
    assert (await waiting).data == "team/a"
    await sessions.stop()


@in_loop
async def test_the_client_names_the_image_once_and_a_refusal_is_the_tasks_failure() -> None:
    async with fake_servers() as (server,):
        client = ToolServerClient(server.url, ClientConfig(), key="tools.python.url")
        await asyncio.gather(*(client.open_session("e", image="team/a") for _ in range(3)))
        await client.call(ToolCall("1", "python", {}), episode_id="e")
        await client.call(ToolCall("1", "python", {}), episode_id="without")
        opened = [body for (_, path), body in zip(server.asked, server.bodies, strict=True) if path == "/sessions"]
        assert [body.get("image") for body in opened] == ["team/a", None]
        server.answers["/sessions"] = [(422, {"error": "not allowed: sandbox.images"})]
        with pytest.raises(TaskError, match=r"not allowed: sandbox\.images"):
            await client.open_session("refused", image="other")
        await client.aclose()


@in_loop
async def test_a_refusal_in_this_process_is_the_tasks_failure_too() -> None:
    client = LocalToolClient(lambda: [FakeTool(in_sandbox)], SandboxConfig(backend="unsafe_subprocess"))
    with pytest.raises(TaskError, match=r"sandbox\.backend=unsafe_subprocess has no images"):
        await client.open_session("e", image="team/a")
    await client.aclose()
