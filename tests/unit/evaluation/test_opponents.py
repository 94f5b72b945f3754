"""Evaluation of self-play: who plays, with which seeds, and what is reported of the games."""

import asyncio
import json
from functools import partial

import pytest

from agentrl.config.evaluation import EvalSet
from agentrl.config.load import load_config
from agentrl.config.rollout import FailureConfig
from agentrl.core.errors import UserError
from agentrl.core.lineup import Lineup, ScriptedSeat
from agentrl.core.registry import make_any_env
from agentrl.core.task import Task
from agentrl.core.types import Failure, FailureKind, Message, Prompt, Rollout, SamplingParams, StopReason
from agentrl.data.task_sources import open_tasks
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.evaluation.evaluate import SetResult, evaluate, flat_metrics, make_jobs
from agentrl.evaluation.metrics import compute_metrics
from agentrl.evaluation.sets import EvalTasks, check_goals, load_eval_tasks
from agentrl.self_play.games import games_report
from agentrl.self_play.league import League, LeagueLog, last_evaluation, read_league
from agentrl.self_play.opponents import check_self_play, eval_lineups
from agentrl.testing import ScriptedSampler
from agentrl.train.run_outputs import curve_keys

END = 9
BET = 5


def config(*overrides, opponents=("fixed:random", "fixed:nash", "mirror")):
    return load_config(
        None, ["env.name=kuhn_poker", f"self_play.eval.opponents={json.dumps(list(opponents))}", *overrides]
    )


def sets(*overrides, **options):
    made = config("eval.size=3", *overrides, **options)
    return load_eval_tasks(made, open_tasks(made))


def test_each_set_is_played_against_each_opponent():
    actual = sets("eval.n_samples=2", "eval.sets.a={}")
    assert [eval_set.prefix for eval_set in actual] == ["eval/a/random/", "eval/a/nash/", "eval/a/mirror/"]
    assert [eval_set.prefix for eval_set in sets()] == ["eval/random/", "eval/nash/", "eval/mirror/"]
    assert [eval_set.prefix for eval_set in sets(opponents=())] == ["eval/"]
    assert [eval_set.episodes for eval_set in actual] == [12, 12, 6]
    assert "3 tasks of the split 'eval' x 2 x 2 seats" in actual[0].description
    assert {"eval/a/nash/reward", "eval/a/mirror/reward"} <= set(curve_keys(config("eval.sets.a={}")))


def test_the_policy_has_each_seat_with_the_same_seeds_against_all_opponents():
    random, nash, mirror = sets("eval.n_samples=2")
    seeds = [[(job.seed, job.reset_seed) for job in make_jobs(eval_set)] for eval_set in (random, nash, mirror)]
    assert seeds[0] == seeds[1] == [seed for seed in seeds[2] for _ in range(2)]
    assert len(set(seeds[2])) == 6
    first, second = make_jobs(nash)[:2]
    assert first.lineup == Lineup({"player_1": ScriptedSeat("nash")}, "fixed:nash")
    assert second.lineup == Lineup({"player_0": ScriptedSeat("nash")}, "fixed:nash")
    assert make_jobs(mirror)[0].lineup == Lineup()
    assert len({job.rollout_id for eval_set in (random, nash, mirror) for job in make_jobs(eval_set)}) == 30


def test_a_goal_names_set_and_opponent():
    made = config("train.stop_at={nash/score: 0.5}")
    check_goals(made.train, load_eval_tasks(made, open_tasks(made)))
    with pytest.raises(UserError, match="such as random/score"):
        check_goals(config("train.stop_at={score: 0.5}").train, sets())


class Plain:
    """A renderer of one token a message, whose answer is always to bet or call."""

    end_token_id, end_token_ids, pad_token_id = END, (END,), 0

    def render(self, messages, tools=()):
        self.text = messages[-1].content
        return Prompt((1,))

    def bridge(self, history, sampled, new, tools=()):
        return Prompt(())

    def parse(self, sampled_ids, tools=(), *, prompt_ids=()):
        return Message("assistant", self.text.rsplit(" or ", 1)[1])

    def decode(self, token_ids):
        return ""


def play(*games):
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=partial(make_any_env, "kuhn_poker", {}),
                    renderer=Plain(),
                    sampler=ScriptedSampler(lambda _: [BET, END]),
                    tool_clients={},
                    limits=Limits(max_turns=4, max_tokens=100, max_seconds=30.0, max_new_tokens=20),
                    sampling=SamplingParams(max_new_tokens=20),
                ),
                lineup=Lineup(),
            )
        },
        FailurePolicy(FailureConfig()),
        EpisodeSlots(1),
    )
    return asyncio.run(evaluate(games, runner))


def test_games_against_a_scripted_player_have_results_by_seat():
    [result] = play(sets("eval.n_samples=4")[1])
    metrics = flat_metrics([result])
    assert metrics["eval/nash/win"] + metrics["eval/nash/draw"] + metrics["eval/nash/loss"] == pytest.approx(1)
    assert metrics["eval/nash/score"] == pytest.approx(
        (metrics["eval/nash/score/seat=0"] + metrics["eval/nash/score/seat=1"]) / 2
    )
    assert {"eval/nash/reward/seat=0", "eval/nash/win/seat=1", "eval/nash/score/ci95"} <= set(metrics)
    report = games_report(result.rollouts)
    assert [row[:3] for row in report["results"]] == [["policy", "fixed:nash", 0], ["policy", "fixed:nash", 1]]
    assert [sum(row[3:]) for row in report["results"]] == [12, 12]
    again = games_report(play(result.eval_set)[0].rollouts)
    assert again == report


def game(seat, rewards, opponent="fixed:nash", failure=None, episode="e"):
    return Rollout(
        "t", f"{episode}.{seat}", [], rewards[seat], StopReason.TERMINATED, seat=seat, opponent=opponent,
        episode=episode, seat_rewards=rewards, failure=failure,
    )  # fmt: skip


def test_a_failed_game_has_no_result():
    failed = game(0, (0.0, 0.0), failure=Failure(FailureKind.SAMPLER, "SamplerError", "gone"), episode="f")
    played_games = [game(0, (2.0, -2.0)), game(1, (1.0, 1.0), episode="d"), failed]
    metrics = compute_metrics(played_games, games=True)
    assert (metrics.means["score"].value, metrics.means["draw"].value, metrics.failed) == (0.75, 0.5, 1 / 3)
    assert {name: group.episodes for name, group in metrics.groups.items()} == {"seat=0": 2, "seat=1": 1}
    assert games_report(played_games) == {
        "results": [["policy", "fixed:nash", 0, 1.0, 0.0, 0.0], ["policy", "fixed:nash", 1, 0.0, 1.0, 0.0]],
        "reward": {"0": 2.0, "1": 1.0},
    }


def test_mirror_games_count_once_for_each_seat():
    games = [game(seat, (1.0, -1.0), "mirror") for seat in (0, 1)]
    assert games_report(games)["results"] == [
        ["policy", "policy", 0, 1.0, 0.0, 0.0],
        ["policy", "policy", 1, 0.0, 0.0, 1.0],
    ]


def test_the_league_has_the_evaluations(tmp_path):
    made, log = config(), LeagueLog(tmp_path, None).begin()
    log.write_evaluation(0, {})
    log.write(1, League(made.self_play, seed=0))
    log.write_evaluation(1, {"nash": games_report([game(0, (2.0, -2.0)), game(1, (1.0, -1.0), episode="d")])})
    assert [row["step"] for row in read_league(tmp_path)] == [1]
    assert last_evaluation(tmp_path)["evaluation"]["nash"]["reward"] == {"0": 2.0, "1": -1.0}
    LeagueLog(tmp_path, 0).begin()
    assert last_evaluation(tmp_path)["step"] == 0


def test_the_table_counts_seats():
    eval_tasks = EvalTasks("", EvalSet(), [Task("t", ())], "x", opponent="nash", lineups=(Lineup(), Lineup()))
    assert (eval_tasks.samples, SetResult(eval_tasks, compute_metrics([]), []).eval_set.label) == (
        "1 x 2 seats",
        "nash",
    )


@pytest.mark.parametrize(
    ("opponents", "message"),
    [
        (["past"], "'past' is no opponent of evaluations: mirror, fixed:NAME or endpoint:NAME"),
        (["fixed:"], "names no player"),
        (["endpoint:big"], r"set self_play\.endpoints\.big\.url"),
        (["fixed:nash", "fixed:nash"], "each becomes eval/nash/<metric>"),
    ],
)
def test_opponents_that_cannot_be(opponents, message):
    with pytest.raises(UserError, match=message):
        config(opponents=opponents)


def test_a_player_that_the_environment_lacks():
    made = config(opponents=["fixed:nahs"])
    with pytest.raises(UserError, match=r"nash.*self_play\.eval\.opponents|self_play\.eval\.opponents.*nash"):
        check_self_play(made)
    without = load_config(None, ["env.name=kuhn_poker"])
    assert eval_lineups(without) == {}
