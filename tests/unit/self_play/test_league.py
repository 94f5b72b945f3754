"""The league of a run: what it records, its file, its state, and the command that shows it."""

import json
import re

import pytest

from agentrl.cli.main import main
from agentrl.config.load import load_config
from agentrl.config.self_play import PoolConfig, SelfPlayConfig
from agentrl.core.errors import ConfigError, UserError
from agentrl.core.types import Rollout, StopReason
from agentrl.runtime.checks import check_roles
from agentrl.self_play.games import POLICY, Game, WinTable
from agentrl.self_play.league import League, LeagueLog, read_league
from agentrl.self_play.league_plot import MOST_PLAYERS, plot_league, shown_players
from agentrl.self_play.opponents import check_self_play
from agentrl.self_play.ratings import Ratings

CONFIG = SelfPlayConfig(mix={"mirror": 1, "past": 1, "fixed:random": 1}, pool=PoolConfig(snapshot_every=2, keep=3))


def rollout(episode, seat, rewards, opponent="mirror", tokens=4):
    return Rollout(
        "task", f"{episode}.{seat}", [], rewards[seat], StopReason.TERMINATED, sampled_tokens=tokens,
        role=("first", "second")[seat], seat=seat, opponent=opponent, episode=episode, seat_rewards=rewards,
    )  # fmt: skip


def played(step):
    """The games of a step: a mirror game, a win against the random player in both seats, a loss against a snapshot."""
    rollouts = [
        rollout(f"{step}/a", 0, (1.0, -1.0)),
        rollout(f"{step}/a", 1, (1.0, -1.0)),
        rollout(f"{step}/b", 0, (1.0, -1.0), "fixed:random"),
        rollout(f"{step}/c", 1, (-1.0, 1.0), "fixed:random"),
        rollout(f"{step}/d", 0, (0.0, 2.0), "past"),
    ]
    players = {
        "a": (POLICY, POLICY), "b": (POLICY, "fixed:random"), "c": ("fixed:random", POLICY), "d": (POLICY, "step_000000"),
    }  # fmt: skip
    rewards = {one.episode: one.seat_rewards for one in rollouts}
    return [Game(name, players[name[-1]], reward) for name, reward in rewards.items()], rollouts


def trained(steps, log=None):
    league = League(CONFIG, seed=3)
    league.add_snapshot(0)
    for step in range(1, steps + 1):
        league.record(*played(step))
        if league.pool.due(step):
            league.add_snapshot(step)
        if log is not None:
            log.write(step, league)
    return league


def test_a_step_has_ratings_scores_and_asymmetry_as_metrics():
    league = trained(0)
    record, warnings = league.record(*played(1))
    assert warnings == []
    assert record["self_play/score/random"] == 1.0
    assert record["self_play/score/past"] == 0.0
    assert record["self_play/asymmetry"] == 1.0
    assert record["self_play/score/role=first"] == pytest.approx(2 / 3), "two wins and a loss"
    assert record["self_play/score/role=second"] == 0.5
    assert (record["self_play/mirror_reward/first"], record["self_play/mirror_reward/second"]) == (1.0, -1.0)
    assert league.ratings.ranking() == ["step_000000", POLICY, "fixed:random"]


def test_a_league_from_a_checkpoint_is_the_same_and_goes_on_alike():
    league = trained(9)
    again = League(CONFIG, seed=3)
    again.load(json.loads(json.dumps(league.state())))
    assert again == league
    assert again.opponents(10, 8) == league.opponents(10, 8)
    assert again.record(*played(10)) == league.record(*played(10))
    again.add_snapshot(10)
    league.add_snapshot(10)
    assert again.state() == league.state()
    assert len(league.pool.steps) == 3


def test_pfsp_prefers_the_snapshot_that_the_policy_loses_to():
    config = SelfPlayConfig(mix={"past": 1}, pool=PoolConfig(snapshot_every=1, choose="pfsp"))
    league = League(config, seed=0)
    league.add_snapshot(0)
    league.add_snapshot(1)
    wins = [Game(f"w{number}", (POLICY, "step_000001"), (1.0, -1.0)) for number in range(5)]
    losses = [Game(f"l{number}", (POLICY, "step_000000"), (-1.0, 1.0)) for number in range(5)]
    league.record([*wins, *losses], [])
    drawn = [name for step in range(1000) for name in league.opponents(step, 1)]
    assert drawn.count("step_000001") / 1000 == pytest.approx(1 / 37, abs=0.01), "(1/7)² to (6/7)²"


@pytest.mark.parametrize("wins", [1, 8, 100])
def test_pfsp_lets_a_snapshot_play_again_that_has_lost_all_games(wins):
    config = SelfPlayConfig(mix={"past": 1}, pool=PoolConfig(snapshot_every=1, choose="pfsp"))
    league = League(config, seed=0)
    league.add_snapshot(0)
    league.add_snapshot(1)
    league.record([Game(f"{number}", (POLICY, "step_000000"), (1.0, -1.0)) for number in range(wins)], [])

    def share():
        return [name for step in range(400) for name in league.opponents(step, 1)].count("step_000000") / 400

    right_after = share()
    for _ in range(200):
        league.record([], [])
    assert share() > 0.4 > right_after, "what is long past counts no more"


def test_a_resumed_run_has_no_lines_of_steps_that_it_runs_again(tmp_path):
    trained(5, LeagueLog(tmp_path, None).begin())
    with (tmp_path / "league.jsonl").open("a") as file:
        file.write('{"step": 6, "rat')
    assert [row["step"] for row in read_league(tmp_path)] == [1, 2, 3, 4, 5]
    trained(0, LeagueLog(tmp_path, 3).begin())
    assert [row["step"] for row in read_league(tmp_path)] == [1, 2, 3]


def test_the_command_prints_ratings_wins_by_seat_and_asymmetry(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    log = LeagueLog(tmp_path, None).begin()
    trained(4, log)
    nash = {"results": [[POLICY, "fixed:nash", 1, 3.0, 1.0, 0.0]], "reward": {"1": 0.5}}
    log.write_evaluation(4, {"nash": nash})
    assert main(["league", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "after step 4" in out
    lines = [[cell.strip() for cell in line.strip("│┃ ").split("│")] for line in out.splitlines() if "│" in line]
    ranked = [cells[0] for cells in lines if len(cells) == 5 and "±" not in cells[1]][:5]
    assert ranked[0] == "step_000000"
    assert ["fixed:random", "1.00", "0.00"] in lines
    assert ["itself", "0.50", "1.00"] in lines
    assert "wins/draws/losses in seat 1" in out
    assert "0/0/4" in out
    assert "evaluation after step 4" in out
    assert ["nash", "1", "3/1/0", "0.88", "0.500"] in lines
    assert (tmp_path / "league.png").read_bytes().startswith(b"\x89PNG")


def test_a_league_of_mirror_play_alone_is_plotted(tmp_path):
    games = [Game(f"{number}", (POLICY, POLICY), (1.0, -1.0)) for number in range(3)]
    results = WinTable()
    results.add(games)
    rows = [{"step": step, "ratings": {}, "results": results.state()} for step in (1, 2)]
    assert plot_league(rows, tmp_path / "league.png").read_bytes().startswith(b"\x89PNG")
    assert shown_players(Ratings(), results) == [POLICY]


def test_the_most_active_players_are_shown_by_rating():
    results = WinTable()
    for number in range(30):
        results.add([Game("g", (POLICY, f"step_{number:06d}"), (1.0, 0.0))] * (number + 1))
    ratings = Ratings()
    for player in ("step_000029", "step_000028"):
        ratings.copy(POLICY, player)
    actual_shown_players = shown_players(ratings, results)
    assert len(actual_shown_players) == MOST_PLAYERS
    assert POLICY in actual_shown_players
    assert set(actual_shown_players[:2]) == {"step_000028", "step_000029"}
    assert "step_000000" not in actual_shown_players


def test_a_folder_without_a_league(tmp_path, capsys):
    assert main(["league", str(tmp_path)]) == 2
    assert "self_play" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "mix", "message"),
    [
        ("single_turn", {"mirror": 1.0}, "self_play is set, and env.name=single_turn has one agent"),
        ("kuhn_poker", {"fixed:nahs": 1.0}, r"Did you mean 'nash'\?"),
        ("kuhn_poker", {"fixed:/none.py:Nash": 1.0}, r"self_play.mix=/none.py:Nash: there is no file /none.py"),
    ],
)
def test_self_play_must_fit_the_environment(env, mix, message):
    config = load_config(None, [f"env.name={env}", f"self_play.mix={json.dumps(mix)}"])
    with pytest.raises(UserError, match=message):
        check_self_play(config)


@pytest.mark.parametrize(
    ("env", "options", "message"),
    [
        ("proposer_solver", {"within_episode": ["solvr"]}, "Did you mean 'solver'?"),
        ("kuhn_poker", {}, "algo.advantage.options.within_episode"),
        ("single_turn", {}, "env.name=single_turn has one agent, without roles"),
    ],
)
def test_roles_of_the_estimator_are_those_of_the_environment(env, options, message):
    advantage = {"name": "hierarchical_grpo", "options": options}
    config = load_config(None, [f"env.name={env}", f"algo.advantage={json.dumps(advantage)}"])
    with pytest.raises(UserError, match=re.escape(message)):
        check_roles(config)


@pytest.mark.parametrize("settings", [["env.name=kuhn_poker"], ["env.name=proposer_solver"]])
def test_roles_that_exist_are_accepted(settings):
    name = "hierarchical_grpo" if settings == ["env.name=proposer_solver"] else "rae"
    config = load_config(None, [*settings, f"algo.advantage.name={name}"])
    check_roles(config)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("rollout.generate=loop.py:play", "self_play with rollout.generate=loop.py:play"),
        ("sources={a: {env: {name: single_turn}}}", r"self_play with sources \(a\)"),
        (
            "placement.mode=disaggregate",
            r"self_play\.mix has past, and placement\.mode=disaggregate: .*; set placement\.mode=separate",
        ),
        (
            "self_play.engines=11",
            r"self_play\.engines=11 with self_play\.pool\.keep=10 .*, and there are 10 at most; set",
        ),
    ],
)
def test_self_play_has_one_environment(setting, message):
    with pytest.raises(ConfigError, match=message):
        load_config(None, ["env.name=kuhn_poker", "self_play.engines=1", setting])


def step_of(kind, number):
    """A step of mirror play that has collapsed, of games against others, of mirror play as it should be, or without games."""
    winner = {"collapsed": (1.0, -1.0), "healthy": (1.0, -1.0) if number % 2 else (-1.0, 1.0)}
    if kind == "other":
        return [rollout(f"{number}", 0, (1.0, -1.0), "fixed:random")]
    if kind == "none":
        return []
    return [
        rollout(
            f"{number}/{episode}",
            seat,
            tuple(reversed(winner[kind])) if kind == "healthy" and episode else winner[kind],
        )
        for episode in range(2)
        for seat in range(2)
    ]


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        (["collapsed"] * 5, 5),
        (["collapsed", "other"] * 5, 9),
        (["collapsed", "none", "other"] * 5, 13),
        (["none", *["collapsed"] * 5], 6),
        (["collapsed"] * 4 + ["healthy"] + ["collapsed"] * 4, None),
        (["collapsed", "healthy"] * 10, None),
    ],
)
def test_the_alarm_counts_the_steps_that_show_mirror_play(steps, warned):
    league = League(CONFIG, seed=3)
    warnings = []
    for number, kind in enumerate(steps, 1):
        warnings += [number for text in league.record([], step_of(kind, number))[1] if "asymmetry" in text]
        again = League(CONFIG, seed=3)
        again.load(json.loads(json.dumps(league.state())))
        league = again
    assert warnings == ([] if warned is None else [warned])


def test_a_first_step_without_episodes_is_not_the_measure_of_lengths():
    league = League(CONFIG, seed=3)
    warnings = []
    for number, tokens in enumerate([None, 100, *[5] * 2, None, *[5] * 3]):
        games = [] if tokens is None else [rollout(f"{number}", 0, (1.0, -1.0), "fixed:random", tokens)]
        warnings += league.record([], games)[1]
    assert len(warnings) == 1
    assert "agents sampled 5.0 tokens an episode, in the first step 100.0 for 5 steps" in warnings[0]
