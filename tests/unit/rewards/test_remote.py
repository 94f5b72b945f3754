"""Remote reward models, by a real HTTP server: batches, formats, retries, and what is no reward."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from pydantic import ValidationError

from agentrl.config.load import load_config
from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import RunStopped
from agentrl.core.types import FailureKind, Rollout
from agentrl.rewards.grader import make_grader

Handle = Callable[[Any], Any]


def grade(handle: Handle, rollouts: list[Rollout], **options: Any) -> list[Any]:
    """Grade rollouts one by one, all at the same time; return the bodies that the server got."""
    bodies: list[Any] = []
    reward = {key: options.pop(key) for key in ("key", "on_error", "error_score") if key in options}

    async def answer(request: web.BaseRequest) -> web.Response:
        bodies.append(await request.json())
        reply = handle(bodies[-1])
        return reply if isinstance(reply, web.Response) else web.json_response(reply)

    async def main() -> None:
        async with RawTestServer(answer) as server:
            remote = {"url": str(server.make_url("/score")), "attempts": 1, "wait_s": 0.02, **options}
            grader = make_grader(RewardConfig.model_validate({"function": "remote", "remote": remote, **reward}))
            assert grader is not None
            await asyncio.gather(*(grader.grade([rollout]) for rollout in rollouts))

    asyncio.run(main())
    return bodies


def length(sample: Any) -> float:
    return float(len(sample["final"]))


def lengths(body: Any) -> list[float]:
    return [length(sample) for sample in body["samples"]]


@pytest.mark.parametrize("wrap", [lambda rewards: rewards, lambda rewards: {"rewards": rewards}])
def test_samples_of_all_tasks_share_requests(rollout, wrap):
    rollouts = [rollout("x" * size, name=str(size)) for size in range(1, 8)]
    bodies = grade(lambda body: wrap(lengths(body)), rollouts, batch_size=3)
    assert [item.reward for item in rollouts] == [1, 2, 3, 4, 5, 6, 7]
    assert sorted(len(body["samples"]) for body in bodies) == [1, 3, 3]
    assert bodies[0]["samples"][0] == {
        "prompt": "<user>2 + 2?<assistant>", "response": "x", "final": "x", "label": "4", "metadata": {"hops": 2},
        "prompt_id": "train.jsonl:1", "rollout_id": "1/0/1",
    }  # fmt: skip


def test_one_sample_a_request_as_slime_sends_it(rollout):
    rollouts = [rollout("xx"), rollout("xxx", name="1")]
    bodies = grade(length, rollouts, batch_size=None)
    assert [item.reward for item in rollouts] == [2, 3]
    assert {body["response"] for body in bodies} == {"xx", "xxx"}


def test_mappings_have_a_reward_and_metrics(rollout):
    sample = rollout("xx")
    grade(lambda body: [{"score": 0.5, "rm": 2.0, "note": "x"}], [sample])
    assert (sample.reward, sample.metrics["rm"]) == (0.5, 2.0)
    sample = rollout("xx")
    grade(lambda body: [{"score": 0.5, "rm": 2.0}], [sample], key="rm")
    assert sample.reward == 2.0


@pytest.mark.parametrize(
    ("handle", "error", "message"),
    [
        (lambda body: [None], "JudgeError", r"returned no reward \(null\)"),
        (lambda body: ["good"], "JudgeError", "it returned 'good', which is not a number"),
        (lambda body: [1.0, 2.0], "ServiceError", "1 samples were sent, and the reply has 2 rewards"),
        (lambda body: {"score": 1.0}, "ServiceError", "no list of rewards"),
        (lambda body: web.Response(text="[NaN]"), "JudgeError", "not finite"),
        (lambda body: web.Response(status=500), "ServiceError", "HTTP 500"),
        (lambda body: web.Response(status=401), "ServiceRefusedError", "set reward.remote.api_key_env"),
        (lambda body: web.Response(text="<html>"), "ServiceRefusedError", "no JSON; is reward.remote.url="),
    ],
)
@pytest.mark.parametrize("on_error", ["stop", "drop", "score"])
def test_a_failure_is_no_reward_whatever_is_set(rollout, handle, error, message, on_error):
    sample = rollout("x")
    grade(handle, [sample], on_error=on_error, error_score=7.0)
    assert (sample.reward, sample.dropped) == (0.25, True)
    assert sample.failure is not None
    assert (sample.failure.kind, sample.failure.error) == (FailureKind.REWARD, error)
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(sample.failure.message)


def test_a_null_concerns_only_its_sample(rollout):
    rollouts = [rollout("x" * size, name=str(size)) for size in (1, 2)]
    grade(lambda body: [None if value == 1 else value for value in lengths(body)], rollouts)
    assert [(item.reward, item.dropped) for item in rollouts] == [(0.25, True), (2.0, False)]


def test_what_can_succeed_is_sent_again(rollout):
    sample, replies = rollout("xx"), [web.Response(status=503, headers={"Retry-After": "0"})]
    bodies = grade(lambda body: replies.pop() if replies else lengths(body), [sample], attempts=2, max_wait_s=0.001)
    assert sample.reward == 2.0
    assert len(bodies) == 2


def test_canceled_episodes_cancel_their_request(rollout):
    async def main() -> None:
        arrived, ended = asyncio.Event(), asyncio.Event()

        async def answer(request: web.BaseRequest) -> web.Response:
            arrived.set()
            await ended.wait()
            return web.json_response([1.0])

        async with RawTestServer(answer) as server:
            remote = {"url": str(server.make_url("/")), "wait_s": 0}
            grader = make_grader(RewardConfig.model_validate({"function": "remote", "remote": remote}))
            assert grader is not None
            task = asyncio.create_task(grader.grade([rollout("x")]))
            await arrived.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.sleep(0)
            assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "remote rewards"] == []
            ended.set()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["reward=remote"], "needs the section remote: set remote.url"),
        (["reward=f1", "reward.remote.url=http://x"], "remote is set, and function=f1"),
        (["reward=judge"], "needs the section judge"),
        (["reward=f1", "reward.functions={a: {function: f1}}"], "function=f1 and functions.a are both set"),
        (["reward.functions={a: {}}"], "a has no function"),
        (["reward.functions={a/b: {function: f1}}"], "becomes part of metrics"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    with pytest.raises(Exception, match=message) as error:
        load_config(None, settings)
    assert not isinstance(error.value, ValidationError | RunStopped)
