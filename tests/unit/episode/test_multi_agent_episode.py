"""Episodes of several agents: a trajectory for each policy, scripted players, limits, failures, replay."""

import asyncio
import re
from dataclasses import replace

import numpy as np
import pytest
from agentrl_envs.kuhn_poker import KuhnPokerEnv
from agentrl_envs.negotiation import NegotiationEnv
from agentrl_envs.proposer_solver import ProposerSolverEnv
from agentrl_envs.solver_critic import SolverCriticEnv
from agentrl_envs.tictactoe import TicTacToeEnv

from agentrl import Message, MultiAgentEnv, tool
from agentrl.adapters.textarena import TextArenaEnv
from agentrl.batch.provenance import check_rows
from agentrl.config.rollout import FailureConfig
from agentrl.core.errors import RunStopped, SamplerError, UnknownNameError
from agentrl.core.lineup import EndpointSeat, Lineup, PolicySeat, ScriptedSeat
from agentrl.core.types import FailureKind, ForkReason, Provenance, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing import ScriptedSampler
from tests.scripted_endpoint import ScriptedEndpoint


class Chorus(MultiAgentEnv):
    """Two singers act at the same time, twice; the first may raise."""

    possible_agents = ["a", "b"]  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.turns = 0
        return super().reset(seed, options)

    def step(self, actions):
        self.turns += 1
        agents, over = list(self.agents), self.turns == 2
        if actions["a"].content == "raise":
            raise ZeroDivisionError("by zero")
        if over:
            self.agents, self.acting = [], ()
        heard = " and ".join(f"{agent}: {actions[agent].content}" for agent in agents)
        views = {agent: {"messages": (Message("user", heard),)} for agent in agents}
        rewards = {"a": float(len(actions["a"].content)), "b": 0.5}
        infos = {agent: {"metrics": {"turns": float(self.turns)}} for agent in agents}
        return views, rewards, dict.fromkeys(agents, over), dict.fromkeys(agents, False), infos


def runner_of(env, renderer, script=(), *, lineup=None, concurrency=8, max_turns=8, seconds=60.0, **failure):
    sampler = script
    if not isinstance(script, ScriptedSampler):
        sampler = ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id)
    made = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env,
                    renderer=renderer,
                    sampler=sampler,
                    tool_clients={},
                    limits=Limits(max_turns, 4096, seconds, 96),
                    sampling=SamplingParams(max_new_tokens=96, seed=0),
                ),
                lineup=lineup or Lineup(),
            )
        },
        FailurePolicy(FailureConfig(**failure)),
        EpisodeSlots(concurrency),
    )
    return made, sampler


def play(runner, env, count=1, **changes):
    jobs = [Job(env.example_task(), seed, f"e{seed}", **changes) for seed in range(count)]
    return asyncio.run(runner.run_many(jobs))


def first_free(renderer):
    """A policy that takes the first free cell of the board that it reads."""

    def move(request):
        text = renderer.decode(request.prompt.token_ids)
        return re.findall(r"\d", text.partition("cell.")[2])[0]

    return move


def test_each_policy_has_its_own_trajectory(renderer):
    runner, _ = runner_of(TicTacToeEnv, renderer, first_free(renderer))
    first, second = play(runner, TicTacToeEnv)
    assert (first.agent, first.role, first.seat) == ("player_0", "first", 0)
    assert (second.agent, second.role, second.seat) == ("player_1", "second", 1)
    assert {(record.episode, record.opponent, record.prompt_id) for record in (first, second)} == {
        ("e0", "mirror", TicTacToeEnv.example_task().id)
    }
    assert (first.rollout_id, second.rollout_id) == ("e0.player_0", "e0.player_1")
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert first.seat_rewards == second.seat_rewards == (1.0, -1.0)
    assert first.seats == second.seats
    assert [(record.player, record.trained, record.steps, record.moves) for record in first.seats] == [
        ("policy", True, (0, 2, 4, 6), ()),
        ("policy", True, (1, 3, 5), ()),
    ]
    assert [turn.action for turn in first.turns] == ["1", "3", "5", "7"]
    assert [turn.action for turn in second.turns] == ["2", "4", "6"]
    assert [turn.reward for turn in second.turns] == [0.0, 0.0, -1.0]
    assert {record.stop_reason for record in (first, second)} == {StopReason.TERMINATED}
    assert second.metrics["loss"] == 1.0
    for rollout in (first, second):  # each turn replaces the conversation, and so is a row
        assert len(rollout.rows) == len(rollout.turns)
        assert {row.key.agent_id for row in rollout.rows} == {rollout.agent}
        assert {row.fork for row in rollout.rows[1:]} == {ForkReason.CONTEXT}
        sampled_texts = [renderer.decode(row.token_ids[row.mask == 1]) for row in rollout.rows]
        assert [text.replace("<|im_end|>", "") for text in sampled_texts] == [turn.action for turn in rollout.turns]
    check_rows([*first.rows, *second.rows])


def test_a_remembered_conversation_is_one_row(renderer):
    moves = {"e0.player_0": ["keep 0 0 0", "keep 1 0 0"], "e0.player_1": ["Hello!\nkeep 0 0 0", "accept"]}
    runner, sampler = runner_of(NegotiationEnv, renderer, moves)
    first, second = play(runner, NegotiationEnv)
    assert [len(rollout.rows) for rollout in (first, second)] == [1, 1]
    assert 'The other player says "Hello!"' in first.turns[0].observation
    assert int((second.rows[0].provenance == Provenance.SAMPLED).sum()) == second.sampled_tokens
    assert second.metrics["deal"] == 1.0
    assert sorted(sampler.closed) == ["e0.player_0", "e0.player_1"]


GAMES = {
    "tictactoe": (TicTacToeEnv, 250, ("random", "minimax")),
    "kuhn_poker": (KuhnPokerEnv, 250, ("nash", "random")),
    "negotiation": (NegotiationEnv, 100, ("random", "greedy")),
    "solver_critic": (SolverCriticEnv, 100, ("careless", "careless")),
    "proposer_solver": (ProposerSolverEnv, 100, ("careless",) * 5),
    "textarena": (TextArenaEnv, 200, ("random", "random")),
}
"""Environment, number of episodes, and scripted players by seat."""


def test_a_thousand_concurrent_episodes_of_scripted_players_replay(renderer):
    """All games at the same time in one runner; and some of the episodes again, a few at a time."""

    def played(concurrency, every):
        runners, jobs = {}, []
        for name, (env, count, players) in GAMES.items():
            runners[name], _ = runner_of(env, renderer, concurrency=concurrency)
            seats = {agent: ScriptedSeat(player) for agent, player in zip(env().possible_agents, players, strict=True)}
            task = replace(env.example_task(), id=f"{name}/example")
            lineup = Lineup(seats, opponent="fixed")
            jobs += [Job(task, seed, f"{name}/{seed}", lineup=lineup) for seed in range(0, count, every)]
        settings = {name: runner._by_source[""] for name, runner in runners.items()}
        first = runners["tictactoe"]
        rollouts = asyncio.run(EpisodeRunner(settings, first._failure, first._slots).run_many(jobs))
        assert list(dict.fromkeys(rollout.episode for rollout in rollouts)) == [job.rollout_id for job in jobs]
        assert {(rollout.opponent, rollout.failure) for rollout in rollouts} == {("fixed", None)}
        return {
            rollout.rollout_id: (rollout.prompt, rollout.turns, rollout.seat_rewards, rollout.metrics, rollout.seats)
            for rollout in rollouts
        }

    together = played(1000, every=1)
    again = played(5, every=8)
    assert {key: together[key] for key in again} == again
    assert len({str(episode[1]) for episode in together.values()}) > 500
    for name in GAMES:
        assert len({str(episode[1]) for key, episode in together.items() if key.startswith(f"{name}/")}) > 10, name


def test_only_trained_agents_have_rollouts(renderer):
    lineup = Lineup({"second": ScriptedSeat("minimax")}, opponent="fixed:minimax")
    runner, sampler = runner_of(TicTacToeEnv, renderer, first_free(renderer))
    [rollout] = play(runner, TicTacToeEnv, lineup=lineup)
    assert (rollout.agent, rollout.opponent) == ("player_0", "fixed:minimax")
    assert rollout.seat_rewards[0] == rollout.reward
    _, scripted = rollout.seats
    assert (scripted.role, scripted.player, scripted.trained) == ("second", "minimax", False)
    assert scripted.steps == tuple(range(1, 2 * len(scripted.moves), 2))
    assert all(move in "123456789" for move in scripted.moves)
    frozen = Lineup({"player_0": PolicySeat("snapshot", trained=False)}, opponent="past")
    [rollout] = play(runner, TicTacToeEnv, lineup=frozen)
    assert (rollout.agent, rollout.opponent) == ("player_1", "past")
    assert {request.policy for request in sampler.requests if request.session_id == "e0.player_0"} == {
        "main",
        "snapshot",
    }


def test_an_unknown_player_names_the_known_ones(renderer):
    runner, _ = runner_of(TicTacToeEnv, renderer, lineup=Lineup({"first": ScriptedSeat("minmax")}))
    with pytest.raises(UnknownNameError, match=r"Did you mean 'minimax'\?"):
        play(runner, TicTacToeEnv)


def test_agents_that_act_at_the_same_time_are_sampled_at_the_same_time(renderer):
    async def run():
        gate = asyncio.Event()
        script = {"e0.a": ["la", "lala"], "e0.b": ["do", "dodo"]}
        sampler = ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id, gate=gate)
        runner, _ = runner_of(Chorus, renderer, sampler)
        episode = asyncio.create_task(runner.run(Chorus.example_task(), 0, "e0"))
        for _ in range(1000):
            await asyncio.sleep(0)
            if sampler.running == 2:
                break
        gate.set()
        rollouts = await episode
        assert sampler.max_running == 2
        return rollouts

    a, b = asyncio.run(run())
    assert (a.reward, b.reward) == (6.0, 1.0)
    assert [turn.reward for turn in a.turns] == [2.0, 4.0]
    assert b.turns[0].observation == "a: la and b: do"
    assert b.metrics == {"turns": 2.0}


def test_an_agent_without_turns_forfeits(renderer):
    runner, _ = runner_of(TicTacToeEnv, renderer, first_free(renderer), max_turns=1)
    first, second = play(runner, TicTacToeEnv)
    assert (first.stop_reason, first.reward) == (StopReason.MAX_TURNS, -1.5)
    assert (second.stop_reason, second.reward) == (StopReason.TRUNCATED, 0.0)
    assert first.turns[-1].reward == -1.5


def test_time_is_up_for_all(renderer):
    runner, _ = runner_of(TicTacToeEnv, renderer, first_free(renderer), seconds=1e-9)
    assert {rollout.stop_reason for rollout in play(runner, TicTacToeEnv)} == {StopReason.MAX_TIME}


def test_an_illegal_move_is_a_reward_and_no_failure(renderer):
    runner, _ = runner_of(KuhnPokerEnv, renderer, ["what?"])
    first, second = play(runner, KuhnPokerEnv)
    assert (first.reward, second.reward) == (-2.5, 0.0)
    assert (first.metrics["illegal"], second.metrics["illegal"]) == (1.0, 0.0)
    assert (first.failure, second.stop_reason, second.rows) == (None, StopReason.TERMINATED, [])


def test_a_failure_of_one_agent_is_one_of_the_episode(renderer):
    def script(request):
        broken = request.session_id.startswith("e0.") and request.session_id.partition(".")[2] == "b"
        return SamplerError("gone") if broken else "la"

    runner, _ = runner_of(Chorus, renderer, script, sampler="drop", max_failed_share=1.0)
    rollouts = play(runner, Chorus, 2)
    assert [(rollout.dropped, rollout.stop_reason is StopReason.FAILED) for rollout in rollouts] == [
        (True, True)
    ] * 2 + [(False, False)] * 2
    assert {rollout.failure.kind for rollout in rollouts[:2]} == {FailureKind.SAMPLER}
    runner, _ = runner_of(Chorus, renderer, script, sampler="retry", max_retries=1)
    rollouts = play(runner, Chorus)
    assert [rollout.failure for rollout in rollouts] == [None, None]  # the second attempt has another session


def test_an_environment_that_raises_fails_by_name(renderer):
    runner, _ = runner_of(Chorus, renderer, ["raise"], environment="stop")
    with pytest.raises(RunStopped, match=r"Chorus\.step raised ZeroDivisionError"):
        play(runner, Chorus)


def test_an_endpoint_plays_and_is_not_trained(renderer):
    endpoint = ScriptedEndpoint(["keep 0 0 0", "accept"])
    sampling = SamplingParams(max_new_tokens=9, temperature=0.5)
    lineup = Lineup({"second": EndpointSeat(endpoint, sampling)}, opponent="fixed:model")
    runner, _ = runner_of(NegotiationEnv, renderer, ["keep 1 0 0", "keep 0 0 1"], lineup=lineup)
    [rollout] = play(runner, NegotiationEnv)
    assert rollout.agent == "player_0"
    assert rollout.metrics["deal"] == 1.0
    assert [message["role"] for message in endpoint.requests[1].messages] == ["user", "assistant", "user"]
    assert {(request.params.max_new_tokens, request.params.temperature) for request in endpoint.requests} == {(9, 0.5)}
    assert endpoint.connections == 0
    assert rollout.endpoint is None
    assert np.isfinite(rollout.seat_rewards).all()


def test_an_agents_tool_calls_run_before_its_turn_ends(renderer):
    @tool(timeout_s=5)
    async def double(number: int) -> str:
        """Double a number."""
        return str(2 * number)

    class Singers(Chorus):
        tools = (double,)

    call = '<tool_call>{"name": "double", "arguments": {"number": 4}}</tool_call>'
    runner, _ = runner_of(Singers, renderer, {"e0.a": [call, "8", "la"], "e0.b": ["do", "do"]})
    a, b = play(runner, Singers)
    assert [(turn.action, turn.reward) for turn in a.turns] == [(call, 0.0), ("8", 1.0), ("la", 2.0)]
    assert [seat.steps for seat in a.seats] == [(0, 0, 1), (0, 1)]
    assert a.turns[0].observation == "8"
    assert b.turns[0].observation == "a: 8 and b: do"
