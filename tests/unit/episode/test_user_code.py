"""Whatever user code raises, at any place where a run calls it, is a failure with the author's file and line.

The matrix: places of user code times exceptions. In the coroutines the code cancels its own task, too.
"""

import argparse
import asyncio
import concurrent.futures
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from algo_config import make_algo
from deadlines import until
from rich.console import Console

from agentrl.algo.base import AdvantageEstimator, AdvantageInput, LossInput, PolicyLoss, TokenLoss
from agentrl.algo.batch_loss import PolicyObjective, make_objective
from agentrl.algo.estimate import RunEstimators
from agentrl.batch.groups import GroupFilters, RolloutGroups
from agentrl.cli import main as command
from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import FailureConfig, FilterGroupsConfig
from agentrl.config.tasks import DataConfig, DataSourceConfig, EnvConfig
from agentrl.core.data_source import DataSource
from agentrl.core.env import AsyncEnv, Env
from agentrl.core.errors import AgentrlError, ConfigError, EnvironmentFailure
from agentrl.core.imports import load_object
from agentrl.core.task import Task, TaskSet
from agentrl.core.tool import Tool, tool
from agentrl.core.types import Message, Rollout, SamplingParams, StopReason, ToolCall, ToolStatus
from agentrl.data.buffer import DataBuffer
from agentrl.data.conversion import RowConversion
from agentrl.data.jobs import Job
from agentrl.data.rows import Row
from agentrl.data.task_sources import make_data_source, read_split
from agentrl.episode.context import EpisodeContext
from agentrl.episode.env_threads import ThreadedEnv, ThreadedMultiAgentEnv
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.rewards.grader import RewardGrader
from agentrl.runtime.checks import _make_env
from agentrl.testing import ScriptedSampler
from agentrl.toolserver.hosted_tool import HostedTool, PlainTool, StatelessTool, ToolSession
from tests.unit.toolserver.fake_hosts import make_sessions

TASK = Task("t", (Message("user", "Hi?"),))
HERE = Path(__file__).name


class OwnError(BaseException):
    """Of a library that does not derive its exceptions from Exception."""


RAISED: dict[str, Callable[[], BaseException]] = {
    "ValueError": lambda: ValueError("bad"),
    "TimeoutError": lambda: TimeoutError("upstream"),
    "CancelledError": lambda: asyncio.CancelledError(),
    "CancelledError ": lambda: concurrent.futures.CancelledError(),
    "SystemExit": lambda: SystemExit(0),
    "GeneratorExit": lambda: GeneratorExit(),
    "StopIteration": lambda: StopIteration(),
    "StopAsyncIteration": lambda: StopAsyncIteration(),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("several", [SystemExit(0)]),
    "OwnError": lambda: OwnError("own"),
}


class Blow:
    """What the user's code calls. It raises what `error` returns, if that is an exception."""

    error: Callable[[], BaseException | None]

    def __call__(self, *_: object) -> Any:
        error = self.error()
        if error is not None:
            raise error  # the author's line


blow = Blow()


class Pause:
    """What the user's coroutines await; with `wait` until they are cancelled."""

    wait = False
    cleanup_fails = False

    async def __call__(self) -> None:
        if not self.wait:
            await asyncio.sleep(0)
            return
        self.started = True
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if self.cleanup_fails:
                raise ValueError("in the cleanup") from None
            raise


pause = Pause()


def context(renderer: Any, env: Callable[[], Env] = Env) -> EpisodeContext:
    return EpisodeContext(
        env_factory=env,
        renderer=renderer,
        sampler=ScriptedSampler(["a"], encode=renderer.encode, end_token_id=renderer.end_token_id),
        tool_clients={},
        limits=Limits(max_turns=2, max_tokens=512, max_seconds=30.0, max_new_tokens=16),
        sampling=SamplingParams(max_new_tokens=16),
    )


async def play(renderer: Any, env: Callable[[], Env] = Env, **settings: Any) -> Rollout:
    runner = EpisodeRunner(
        {"": EpisodeSettings(context(renderer, env), **settings)},
        FailurePolicy(FailureConfig(environment="drop", max_failed_share=1.0)),
        EpisodeSlots(2),
    )
    (rollout,) = await runner.run_many([Job(TASK, 1, "e")])
    return rollout


def failure(rollout: Rollout) -> str:
    """Return the message of a rollout that failed, and so was dropped."""
    assert rollout.failure is not None, f"it is trained with reward {rollout.reward}"
    assert rollout.dropped
    return rollout.failure.message


async def refusal(call: Callable[[], object]) -> str:
    """Return the message of what ends the run."""
    with pytest.raises(AgentrlError) as caught:
        call()
    return str(caught.value)


class Constructor(Env):
    def __init__(self) -> None:
        blow()


class Reset(Env):
    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        blow()


class Step(Env):
    def step(self, action: object) -> Any:
        blow()


class Tools(Env):
    @property
    def tools(self) -> Any:  # type: ignore[override]
        blow()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return TASK.prompt, {}


class Stop(Tools):
    tools = ()

    @property
    def stop(self) -> Any:  # type: ignore[override]
        blow()


class AsyncReset(AsyncEnv):
    async def areset(self, *, seed: int | None = None, options: Any = None) -> Any:
        blow()
        await pause()


class AsyncStep(AsyncEnv):
    async def astep(self, action: object) -> Any:
        blow()
        await pause()


class States(Env):
    def get_state(self) -> Any:
        blow()

    def set_state(self, state: Any) -> None:
        blow()

    def close(self) -> None:
        blow()


async def loop(task: Task, agent: Any) -> Any:
    blow()
    await pause()


async def loop_with_task(task: Task, agent: Any) -> Any:
    async def work() -> None:
        blow()
        await pause()

    await asyncio.gather(asyncio.create_task(work()))


def reward(sample: Any) -> float:
    return float(blow())


async def async_reward(sample: Any) -> float:
    blow()
    await pause()
    return 0.0


def group_reward(samples: list[Any]) -> list[float]:
    return [float(blow())]


async def async_group_reward(samples: list[Any]) -> list[float]:
    blow()
    await pause()
    return [0.0]


class Number:
    """Of a numeric library: what it costs to read it shows only when it is read."""

    shape = ()

    def item(self) -> float:
        return float(blow())


def lazy_reward(sample: Any) -> Any:
    return Number()


class Source(DataSource):
    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed)
        self.armed = False

    def get_samples(self, num_samples: int) -> Sequence[Task]:
        return self._of(self.tasks[:num_samples])

    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:
        self._of(None)

    def state(self) -> dict[str, Any]:
        return self._of({})

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._of(None)

    def metrics(self) -> dict[str, float]:
        return self._of({})

    def _of(self, value: Any) -> Any:
        return blow() if self.armed else value


class BrokenSource(Source):
    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        blow()


class Tasks(TaskSet):
    def split(self, name: str) -> Sequence[Task]:
        return list(blow())


class Estimator(AdvantageEstimator):
    needs_critic = True
    advantages = returns = update = lambda self, inputs: blow()
    metrics = load_state = lambda self, argument: blow()

    def state(self) -> Any:
        return blow()


class BrokenEstimator(Estimator):
    def __init__(self, *_: object) -> None:
        blow()


class Surrogate(PolicyLoss):
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> Any:
        return blow()


class Hosted(HostedTool):
    async def call(self, session: ToolSession, call: ToolCall) -> Any:
        blow()
        await pause()


class Batched(StatelessTool):
    async def call_batch(self, calls: Sequence[ToolCall]) -> Any:
        blow()
        await pause()


@tool
def plain_tool() -> str:
    """Fail."""
    return str(blow())


@tool
async def coroutine_tool() -> str:
    """Fail."""
    blow()
    await pause()
    return ""


@tool
async def tool_without_await() -> str:
    """Fail."""
    return str(blow())


def graded(function: str) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        async def finish(task: Task, agent: Any) -> Rollout:
            return agent.chat(task.prompt).rollout(1.0)

        grader = RewardGrader(RewardConfig(function=f"{__name__}:{function}", on_error="drop"))
        return failure(await play(renderer, generate=finish, grader=grader))

    return run


def in_episode(env: type[Env]) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        return failure(await play(renderer, env))

    return run


def of_environment(method: str, *arguments: object) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        env = ThreadedEnv(context(renderer, States))
        await env.reset(TASK, 1)
        with pytest.raises(EnvironmentFailure) as caught:
            await getattr(env, method)(*arguments)
        return str(caught.value)

    return run


def local_tool(broken: Tool) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        result = await broken.run(ToolCall("c", broken.name, {}))
        assert result.status is ToolStatus.ERROR
        return f"{result.content} {HERE}"  # the policy reads no line; the log has it

    return run


def at_server(make: Callable[[], HostedTool], status: ToolStatus) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        hosted = make()
        sessions = make_sessions(hosted)
        session = await sessions.open("e")
        result = (await session.call(ToolCall("c", hosted.spec.name, {}))).result
        assert result.status is status
        return result.content if status is ToolStatus.UNAVAILABLE else f"{result.content} {HERE}"

    return run


def spec(name: str) -> Tool:
    return Tool(name, "", {"type": "object"})


async def of_player(renderer: Any) -> str:
    with pytest.raises(EnvironmentFailure) as caught:
        await ThreadedMultiAgentEnv(context(renderer)).act("x", blow)
    return str(caught.value)


def of_loop(generate: Callable[[Task, Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        return failure(await play(renderer, generate=generate))

    return run


def of_source(call: Callable[[DataBuffer], object]) -> Callable[[Any], Awaitable[str]]:
    async def run(renderer: Any) -> str:
        source = Source([TASK], 0)
        buffer = DataBuffer(source)
        source.armed = True
        return await refusal(lambda: call(buffer))

    return run


def estimators(name: str = "Estimator") -> RunEstimators:
    return RunEstimators({"": make_algo(advantage={"name": f"{__name__}:{name}"})})


def policy_loss() -> object:
    zero_N = torch.zeros(1)
    objective = make_objective(make_algo(loss={"name": f"{__name__}:Surrogate"}))
    return objective(zero_N, LossInput(zero_N, zero_N, zero_N))


def empty_groups() -> AdvantageInput:
    return AdvantageInput(RolloutGroups((), np.zeros(0, np.int64), ()))


def of_buffer_filter() -> object:
    buffer = DataBuffer(Source([TASK], 0), blow)
    buffer.add_samples([TASK])
    return buffer[0]


def ended(rollout_id: str = "e") -> Rollout:
    return Rollout("t", rollout_id, [], 0.0, StopReason.TERMINATED)


PLACES: dict[str, Callable[[Any], Awaitable[str]]] = {
    "environment's constructor": in_episode(Constructor),
    "reset": in_episode(Reset),
    "step": in_episode(Step),
    "property tools": in_episode(Tools),
    "property stop": in_episode(Stop),
    "areset": in_episode(AsyncReset),
    "astep": in_episode(AsyncStep),
    "get_state": of_environment("get_state"),
    "set_state": of_environment("set_state", {}),
    "close": of_environment("close"),
    "player": of_player,
    "loop": of_loop(loop),
    "task of a loop": of_loop(loop_with_task),
    "reward": graded("reward"),
    "async reward": graded("async_reward"),
    "group reward": graded("group_reward"),
    "async group reward": graded("async_group_reward"),
    "number of a reward": graded("lazy_reward"),
    "plain tool": local_tool(plain_tool),
    "coroutine tool": local_tool(coroutine_tool),
    "coroutine tool without await": local_tool(tool_without_await),
    "tool at a server": at_server(lambda: PlainTool(coroutine_tool), ToolStatus.ERROR),
    "hosted tool": at_server(lambda: Hosted(spec("hosted")), ToolStatus.UNAVAILABLE),
    "batched tool": at_server(lambda: Batched(spec("batched"), max_batch=4), ToolStatus.UNAVAILABLE),
    "buffer filter": lambda _: refusal(of_buffer_filter),
    "group filter": lambda _: refusal(
        lambda: GroupFilters(FilterGroupsConfig(filters=(f"{__name__}:blow",))).reason([ended()])
    ),
    "conversion": lambda _: refusal(
        lambda: RowConversion(DataConfig(convert=f"{__name__}:blow"))(Row(Path("rows.jsonl"), 1, {}))
    ),
    "get_samples": of_source(lambda buffer: buffer[0]),
    "on_trained": of_source(lambda buffer: buffer.on_trained((), {})),
    "state": of_source(lambda buffer: buffer.state()),
    "load_state": of_source(
        lambda buffer: buffer.load_state({"source": {}, "next": 0, "taken": {}, "buffer": [], "again": []})
    ),
    "metrics": of_source(lambda buffer: buffer.metrics()),
    "data source's constructor": lambda _: refusal(
        lambda: make_data_source(DataSourceConfig(name=f"{__name__}:BrokenSource"), [TASK], 0)
    ),
    "split": lambda _: refusal(lambda: read_split(Tasks(), "train", "tasks.train_split")),
    "constructor in the check": lambda _: refusal(lambda: _make_env(EnvConfig(name=f"{__name__}:Constructor"))),
    "advantages": lambda _: refusal(lambda: estimators().advantages("", empty_groups())),
    "returns": lambda _: refusal(lambda: estimators().returns("", empty_groups())),
    "update": lambda _: refusal(lambda: estimators().update([("", empty_groups())])),
    "estimator's constructor": lambda _: refusal(lambda: estimators("BrokenEstimator")),
    "estimator's state": lambda _: refusal(lambda: estimators().state()),
    "estimator's load_state": lambda _: refusal(
        lambda: estimators().load_state({"": {"name": f"{__name__}:Estimator", "state": {}}})
    ),
    "estimator's metrics": lambda _: refusal(lambda: estimators().metrics()),
    "policy loss": lambda _: refusal(policy_loss),
}


COROUTINES = ("areset", "astep", "loop", "async reward", "async group reward", "coroutine tool", "tool at a server")
COROUTINES += ("hosted tool", "batched tool", "task of a loop")
IN_THREADS = ("environment's constructor", "reset", "step", "reward", "group reward", "plain tool")
IN_THREADS += ("coroutine tool without await",)


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize("place", PLACES)
def test_whatever_user_code_raises_is_its_failure(
    renderer: Any, monkeypatch: pytest.MonkeyPatch, raised: str, place: str
) -> None:
    monkeypatch.setattr(Blow, "error", staticmethod(RAISED[raised]), raising=False)
    message = asyncio.run(PLACES[place](renderer))
    assert raised.strip() in message
    assert HERE in message


@pytest.mark.parametrize("place", COROUTINES)
def test_code_that_cancels_its_own_task_fails_alone(renderer: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def cancel() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()

    monkeypatch.setattr(Blow, "error", staticmethod(cancel), raising=False)
    message = asyncio.run(PLACES[place](renderer))
    assert "CancelledError" in message
    assert HERE in message


@pytest.mark.parametrize("place", IN_THREADS)
def test_an_interrupt_that_a_thread_raises_is_no_ctrl_c(
    renderer: Any, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.setattr(Blow, "error", KeyboardInterrupt, raising=False)
    assert "KeyboardInterrupt" in asyncio.run(PLACES[place](renderer))


def test_a_task_that_nothing_awaits_does_not_end_the_run(renderer: Any) -> None:
    async def leave() -> None:
        raise SystemExit(0)

    async def generate(task: Task, agent: Any) -> Rollout:
        own = asyncio.create_task(leave())
        await asyncio.wait([own])
        asyncio.create_task(asyncio.sleep(9)).cancel()  # before it begins
        return agent.chat(task.prompt).rollout(1.0)

    assert asyncio.run(play(renderer, generate=generate)).reward == 1.0


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (lambda logprobs_N: logprobs_N, "Tensor for 3 tokens"),
        (lambda logprobs_N: TokenLoss(logprobs_N.sum(), logprobs_N > 0), r"shapes \[\(\), \(3,\)\] for 3 tokens"),
        (lambda logprobs_N: None, "NoneType for 3 tokens"),
    ],
)
def test_what_is_no_token_loss_is_refused(answer: Callable[[torch.Tensor], Any], fault: str) -> None:
    class Wrong(PolicyLoss):
        def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> Any:
            return answer(logprobs_N)

    zero_N = torch.zeros(3)
    with pytest.raises(ConfigError, match=rf"algo\.loss\.name=Wrong: token_loss returned {fault}"):
        PolicyObjective(make_algo(), [Wrong()])(zero_N, LossInput(zero_N, zero_N, zero_N))


def test_an_estimators_state_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Estimator, "state", lambda self: {"mean": np.float32(1)})
    with pytest.raises(ConfigError, match="Estimator: state raised TypeError: Object of type float32 is not JSON"):
        estimators().state()


def test_ctrl_c_ends_the_run(renderer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the main thread, where only Python's handler of SIGINT should raise it."""
    monkeypatch.setattr(Blow, "error", KeyboardInterrupt, raising=False)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(PLACES["buffer filter"](renderer))


@pytest.mark.parametrize("cleanup_fails", [False, True])
@pytest.mark.parametrize("place", COROUTINES[:6])
def test_what_the_run_cancels_is_cancelled(
    renderer: Any, monkeypatch: pytest.MonkeyPatch, place: str, cleanup_fails: bool
) -> None:
    monkeypatch.setattr(Blow, "error", staticmethod(lambda: None), raising=False)
    monkeypatch.setattr(pause, "wait", True, raising=False)
    monkeypatch.setattr(pause, "started", False, raising=False)
    monkeypatch.setattr(pause, "cleanup_fails", cleanup_fails, raising=False)

    async def cancel() -> None:
        running = asyncio.ensure_future(PLACES[place](renderer))
        await until(lambda: pause.started)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(cancel())


def test_a_command_that_is_ended_is_not_done() -> None:
    for end in (SystemExit(0), asyncio.CancelledError(), GeneratorExit()):

        def run(parsed: argparse.Namespace, end: BaseException = end) -> None:
            raise end

        assert command._run(argparse.Namespace(run=run), Console(quiet=True)) == command.FAILED


@pytest.mark.parametrize("raised", RAISED)
def test_a_file_that_fails_while_it_is_loaded_is_named(tmp_path: Path, raised: str) -> None:
    file = tmp_path / "own.py"
    error = {
        "BaseExceptionGroup": "BaseExceptionGroup('x', [SystemExit(0)])",
        "OwnError": "type('OwnError', (BaseException,), {})",
    }
    file.write_text(
        f"import asyncio\nfrom asyncio import CancelledError\nraise {error.get(raised, raised)}\n", encoding="utf-8"
    )
    with pytest.raises(ConfigError, match=rf"{file} fails: {raised.strip()}.*own.py:3"):
        load_object(f"{file}:name", "reward.function")
