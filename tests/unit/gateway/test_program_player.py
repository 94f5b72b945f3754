"""Programs that play an agent of a multi-agent environment: the same rollouts as without a program, and every way to fail."""

import asyncio
import json
import re
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from agentrl_envs.negotiation import NegotiationEnv
from agentrl_envs.tictactoe import TicTacToeEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from rewarded_talk import RewardedTalk

from agentrl import MultiAgentEnv, Rollout
from agentrl.audit.run import rollout_faults
from agentrl.batch.provenance import check_rows
from agentrl.config.agent import SeatProgramConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, SamplerError
from agentrl.core.lineup import Lineup, PolicySeat, ScriptedSeat
from agentrl.core.types import FailureKind, Row, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.program import ProgramLauncher
from agentrl.gateway.program_player import MOVES, GatewaySeatProgram
from agentrl.gateway.program_process import ProgramInput, RunningProgram
from agentrl.gateway.server import Gateway
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import RecordedRequest, ScriptedSampler

ASK = """
import json, os, sys, time, urllib.request

def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return json.load(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)))

def ask(messages, **fields):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}
    return post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)["choices"][0]["message"]["content"]

def session(action, **body):
    return post(os.environ["AGENTRL_SESSION_URL"] + "/session/" + action, body)

conversation = json.load(open(os.environ["AGENTRL_TASK"]))["prompt"]
"""
PLAY = """
while not (observation := session("observe"))["over"]:
    if observation["turn"] is not None:
        session("move", turn=observation["turn"], text=ask(observation["messages"]))
"""

Reads = Callable[["Client", ProgramInput], Any]


@dataclass
class Client:
    """What a program has, in this process."""

    http: httpx.AsyncClient

    async def ask(self, messages: Sequence[dict[str, str]], **fields: Any) -> str:
        reply = await self.http.post("/v1/chat/completions", json={"model": "m", "messages": [*messages], **fields})
        text: str = reply.json()["choices"][0]["message"]["content"]
        return text

    async def session(self, action: str, **body: Any) -> httpx.Response:
        return await self.http.post(f"/v1/session/{action}", json=body)


class Coroutine(RunningProgram):
    """A program that is a coroutine of this process."""

    cwd = Path("/nowhere")

    def __init__(self, reads: Reads, client: Client, program_input: ProgramInput) -> None:
        self.ended = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(reads(client, program_input)))
        self.answer = ""

    async def _run(self, program: Any) -> None:
        self.answer = await program or ""
        self.ended.set_result("")

    async def kill(self) -> None:
        self._task.cancel()
        (error,) = await asyncio.gather(self._task, return_exceptions=True)
        if error is not None and not isinstance(error, asyncio.CancelledError):
            raise error

    async def close(self) -> None:
        await self.kill()

    def output(self) -> str:
        return self.answer

    def output_end(self) -> str:
        return ""


class CoroutineLauncher(ProgramLauncher):
    """Starts coroutines in place of programs, without a server."""

    def __init__(self, config: SeatProgramConfig, reads: Reads) -> None:
        super().__init__(config, SandboxConfig())
        self._reads = reads
        self.gateway = Gateway(keep_alive_s=0.01)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    @asynccontextmanager
    async def running(
        self, program_input: ProgramInput, name: str, key: str, tools: Any
    ) -> AsyncIterator[RunningProgram]:
        transport = httpx.ASGITransport(self.gateway.app, raise_app_exceptions=True)
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway", headers=headers) as http:
            program = Coroutine(self._reads, Client(http), program_input)
            try:
                yield program
            finally:
                await program.kill()


async def move_each_turn(client: Client, program_input: ProgramInput) -> None:
    """Request the policy's turn in the conversation of the seat."""
    await client.ask(json.loads(program_input.task_json)["prompt"])


async def move_once(client: Client, program_input: ProgramInput) -> None:
    """Play all turns of an episode, and post each move twice, as after a lost reply."""
    while not (observation := (await client.session("observe")).json())["over"]:
        again = (await client.session("observe", wait_s=0)).json()
        assert again == observation
        turn, text = observation["turn"], await client.ask(observation["messages"])
        for _ in range(2):
            assert (await client.session("move", turn=turn, text=text)).json() == {"turn": turn}
        assert (await client.session("move", turn=turn, text=text + "x")).status_code == 409
        assert (await client.session("move", turn=turn + 7, text=text)).status_code == 409


async def keep_history(client: Client, program_input: ProgramInput) -> None:
    """Keep the conversation in memory: read only what is new."""
    messages: list[dict[str, str]] = []
    while not (observation := (await client.session("observe")).json())["over"]:
        messages.append({"role": "user", "content": observation["prompt"]})
        messages.append({"role": "assistant", "content": await client.ask(messages)})
        await client.session("move", turn=observation["turn"], text=messages[-1]["content"])


def in_process(start: str, reads: Reads, **keys: Any) -> GatewaySeatProgram:
    config = SeatProgramConfig.model_validate({"command": "agent", "start": start, **keys})
    return GatewaySeatProgram(config, CoroutineLauncher(config, reads))


def as_process(code: str, folder: Path, **keys: Any) -> GatewaySeatProgram:
    path = folder / "agent.py"
    path.write_text(ASK + textwrap.dedent(code))
    config = SeatProgramConfig.model_validate({"command": f"{sys.executable} {path}", **keys})
    config = config.with_key("env.roles.first.program")
    return GatewaySeatProgram(config, ProgramLauncher(config, SandboxConfig()))


def play(
    renderer: ChatRenderer,
    env: Callable[[], MultiAgentEnv],
    script: Any,
    programs: dict[str, GatewaySeatProgram],
    *,
    lineup: Lineup | None = None,
    action: str = "drop",
    seed: int = 0,
    **limits: Any,
) -> list[Rollout]:
    bounds = {"max_turns": 12, "max_tokens": 8192, "max_seconds": 30.0, "max_new_tokens": 64} | limits
    sampler = ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id, version=3)
    context = EpisodeContext(env, renderer, sampler, {}, Limits(**bounds), SamplingParams(max_new_tokens=64, seed=5))
    policy = FailurePolicy(FailureConfig(sampler="drop", agent=action, max_failed_share=1))
    episode = EpisodeSettings(context, lineup=lineup or Lineup(), programs=programs)
    runner = EpisodeRunner({"": episode}, policy, EpisodeSlots(4))
    rollouts: list[Rollout] = asyncio.run(runner.run_many([Job(env().example_task(), seed, "e")]))
    for rollout in rollouts:
        check_rows(rollout.rows)
        assert rollout.failure is not None or rollout_faults(rollout) == []
    return rollouts


def describe(rollout: Rollout) -> dict[str, Any]:
    """Return all of a rollout that is trained or shown, without names of requests and forks."""

    def row(row: Row) -> list[Any]:
        arrays = (row.token_ids, row.mask, row.mask_reason, row.provenance, row.logprobs, row.versions)
        return [row.key, *(array.tolist() for array in arrays), row.turns, row.temperature]

    names = "rollout_id prompt_id reward stop_reason metrics prompt agent role seat policy seats seat_rewards turns"
    return {name: getattr(rollout, name) for name in names.split()} | {"rows": list(map(row, rollout.rows))}


def speak(renderer: ChatRenderer) -> Callable[[RecordedRequest], str]:
    """Return a policy whose turn depends on nothing but its prompt."""

    def turn(request: RecordedRequest) -> str:
        rng = np.random.default_rng(list(request.prompt.token_ids))
        return "".join(rng.choice(list("ab é\n"), 1 + int(rng.integers(6)))) + "."

    return turn


@settings(max_examples=25)
@given(
    script=st.lists(
        st.tuples(
            st.sampled_from(["a", "b", "ab"]),
            st.sampled_from(["add", "rewrite", "two"]),
            st.sampled_from([0.0, 0.5, -1.0]),
            st.sampled_from([0.0, 0.25]),
        ),
        min_size=1,
        max_size=6,
    ),
    programs=st.sampled_from(["a", "b", "ab"]),
    start=st.sampled_from(["turn", "episode"]),
    max_turns=st.sampled_from([2, 12]),
)
def test_an_episode_is_the_same_with_and_without_programs(
    renderer: ChatRenderer, script: list[Any], programs: str, start: str, max_turns: int
) -> None:
    """Ids, masks, log-probabilities, versions, rewards of turns and of rollouts, steps, and limits."""
    reads = move_each_turn if start == "turn" else move_once
    played = [
        play(renderer, lambda: RewardedTalk(script), speak(renderer), seats, max_turns=max_turns)
        for seats in ({}, {agent: in_process(start, reads) for agent in programs})
    ]
    for without, with_program in zip(*played, strict=True):
        assert with_program.failure is None, with_program.failure
        assert describe(with_program) == describe(without)
        if with_program.agent in programs:
            assert [turn.action for turn in without.turns] == with_program.metadata[MOVES]


def test_a_program_may_keep_the_conversation_itself(renderer: ChatRenderer) -> None:
    moves = {"e.player_0": ["keep 0 0 0", "keep 1 0 0"], "e.player_1": ["Hello!\nkeep 0 0 0", "accept"]}
    programs = {"first": in_process("episode", keep_history), "second": in_process("episode", move_once)}
    without = play(renderer, NegotiationEnv, moves, {})
    assert [len(rollout.rows) for rollout in without] == [1, 1]
    assert list(map(describe, play(renderer, NegotiationEnv, moves, programs))) == list(map(describe, without))


def first_free(renderer: ChatRenderer) -> Callable[[RecordedRequest], str]:
    """Return a policy that takes the first free cell of the board that it reads."""

    def move(request: RecordedRequest) -> str:
        text = renderer.decode(request.prompt.token_ids)
        return re.findall(r"\d", text.partition("cell.")[2])[0]

    return move


def test_a_program_thinks_first_and_moves_by_itself(renderer: ChatRenderer) -> None:
    """All its turns are trained; the last one before a move has the rewards of the move."""

    async def think(client: Client, program_input: ProgramInput) -> str:
        await client.ask([{"role": "user", "content": "Think: " + program_input.prompt}])
        return (await client.ask([{"role": "user", "content": program_input.prompt}])) + " "

    program = in_process("turn", think, answer="output")
    lineup = Lineup({"second": ScriptedSeat("minimax")}, "fixed:minimax")
    (rollout,) = play(renderer, TicTacToeEnv, first_free(renderer), {"first": program}, lineup=lineup, max_turns=40)
    moves = rollout.metadata[MOVES]
    assert len(rollout.turns) == 2 * len(moves)
    assert [text.strip() for text in moves] == [turn.action for turn in rollout.turns[1::2]]
    assert rollout.reward == sum(turn.reward for turn in rollout.turns) == rollout.turns[-1].reward
    policy, opponent = rollout.seats
    assert policy.steps == tuple(step for step in range(0, 2 * len(moves), 2) for _ in range(2))
    assert (opponent.player, opponent.trained, opponent.steps[:2]) == ("minimax", False, (1, 3))


def test_the_program_of_an_opponent_plays_with_the_opponents_weights(renderer: ChatRenderer) -> None:
    frozen = ScriptedSampler(first_free(renderer), encode=renderer.encode, end_token_id=renderer.end_token_id)
    lineup = Lineup({"second": PolicySeat(trained=False, sampler=frozen, name="frozen")}, "past")
    programs = {name: in_process("episode", move_once) for name in ("first", "second")}
    (rollout,) = play(renderer, TicTacToeEnv, first_free(renderer), programs, lineup=lineup)
    assert rollout.agent == "player_0"
    opponent = rollout.seats[1]
    assert (opponent.player, opponent.steps, opponent.moves) == ("frozen", (1, 3, 5), ("2", "4", "6"))
    assert len(frozen.requests) == 3


def test_a_scripted_opponent_plays_without_the_program_of_its_seat(renderer: ChatRenderer) -> None:
    started: list[str] = []

    async def move_and_note(client: Client, program_input: ProgramInput) -> None:
        started.append(program_input.prompt)
        await move_each_turn(client, program_input)

    programs = {name: in_process("turn", move_and_note) for name in ("first", "second")}
    lineup = Lineup({"second": ScriptedSeat("minimax")}, "fixed:minimax")
    (rollout,) = play(renderer, TicTacToeEnv, first_free(renderer), programs, lineup=lineup)
    assert rollout.seats[1].player == "minimax"
    assert len(started) == len(rollout.metadata[MOVES]) == len(rollout.turns) > 0


def test_limits_forfeit_the_game(renderer: ChatRenderer) -> None:
    for start, reads in (("turn", move_each_turn), ("episode", move_once)):
        programs = {"first": in_process(start, reads)}
        first, second = play(renderer, TicTacToeEnv, first_free(renderer), programs, max_turns=2)
        assert (first.stop_reason, second.stop_reason) == (StopReason.MAX_TURNS, StopReason.TRUNCATED)
        assert (first.reward, second.reward) == (-1.5, 0.0)
        assert [turn.action for turn in first.turns] == ["1", "3"]


def test_a_failure_of_the_engine_is_no_fault_of_the_program(renderer: ChatRenderer) -> None:
    script = {"e.player_0": [SamplerError("lost")], "e.player_1": []}
    rollouts = play(renderer, TicTacToeEnv, script, {"first": in_process("turn", lost_turn)})
    assert {rollout.failure and rollout.failure.kind for rollout in rollouts} == {FailureKind.SAMPLER}


async def lost_turn(client: Client, program_input: ProgramInput) -> None:
    reply = await client.session("observe")
    assert reply.status_code == 404, "it is started for each turn"
    assert "start=episode" in reply.json()["error"]["message"]
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
    reply = await client.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 503


@pytest.mark.parametrize(
    ("start", "code", "fault"),
    [
        ("turn", "print('I am lost'); sys.exit(3)", r"'player_0' it ended with exit status 3\..*I am lost"),
        ("turn", "os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("turn", "pass", "ended without a turn of the policy"),
        ("turn", "ask(conversation); time.sleep(60)", "did not (end|move) within rollout.max_seconds=1"),
        ("episode", "session('observe'); os.kill(os.getpid(), 9)", "was ended by SIGKILL"),
        ("episode", "session('observe')", "ended without a move before the end of the episode"),
        ("episode", "time.sleep(60)", "did not move within rollout.max_seconds=1"),
        ("episode", "session('move', turn=0, text='1'); time.sleep(60)", "without having requested a turn"),
        (
            "episode",
            "session('move', turn=0, text=ask(conversation)); session('observe'); os._exit(5)",
            "ended with exit status 5",
        ),
    ],
)
def test_a_program_that_fails_is_a_named_failure_of_its_seat(
    renderer: ChatRenderer, tmp_path: Path, start: str, code: str, fault: str
) -> None:
    limits = {"max_seconds": 1.0 if "did not" in fault else 30.0}
    programs = {"first": as_process(code, tmp_path, start=start)}
    rollouts = play(renderer, TicTacToeEnv, first_free(renderer), programs, **limits)
    assert [rollout.agent for rollout in rollouts] == ["player_0", "player_1"]
    for rollout in rollouts:
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.error) == (FailureKind.AGENT, "AgentProgramError")
        assert re.search(fault, rollout.failure.message, re.DOTALL), rollout.failure.message
        assert rollout.failure.message.startswith("env.roles.first.program.command=")
        assert rollout.dropped


def test_processes_play_both_seats(renderer: ChatRenderer, tmp_path: Path) -> None:
    """One is started for each turn in a sandbox, and answers on its standard output; the other once."""
    (tmp_path / "once").mkdir()
    (tmp_path / "turn").mkdir()
    first = as_process("print('thinks', file=sys.stderr); sys.stdout.write(ask(conversation))", tmp_path / "turn",
                       answer="output", sandbox="unsafe_subprocess")  # fmt: skip
    programs = {"a": first, "b": as_process(PLAY, tmp_path / "once", start="episode")}
    script = [("a", "add", 0.5, 0.0), ("b", "rewrite", 0.0, 0.25), ("ab", "add", 1.0, -1.0)]
    without = play(renderer, lambda: RewardedTalk(script), speak(renderer), {})
    played = play(renderer, lambda: RewardedTalk(script), speak(renderer), programs)
    assert [rollout.failure for rollout in played] == [None, None]
    assert list(map(describe, played)) == list(map(describe, without))
    assert [text.strip() for text in played[0].metadata[MOVES]] == [turn.action.strip() for turn in played[0].turns]


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (
            ["env.roles={first: {program: {}}}"],
            "env.roles.first.program is set, but no env.roles.first.program.command",
        ),
        (
            ["env.roles={first: {program: {command: a, harness: codex}}}"],
            "env.roles.first.program.command=a and env.roles.first.program.harness=codex both say",
        ),
        (["env.roles={first: {program: {command: a}, player: random}}"], "program with player=random"),
        (
            ["env.roles={first: {program: {command: a, start: episode, answer: output}}}"],
            "env.roles.first.program.answer=output with env.roles.first.program.start=episode",
        ),
        (
            ["env.roles={first: {program: {command: a}}}", "rollout.agent.command=b"],
            "env.roles.first.program plays in an environment, and rollout.agent.command=b plays in its place",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(keys: list[str], fault: str) -> None:
    from agentrl.config.load import load_config

    with pytest.raises(ConfigError, match=re.escape(fault)):
        load_config(None, ["env.name=tictactoe", *keys])
    assert Config.model_validate({"self_play": {}, "env": {"roles": {"first": {"program": {"command": "a"}}}}})
