"""The win table by seat, and the collapse alarm."""

import json

import pytest

from agentrl.config.self_play import AlarmConfig
from agentrl.self_play.games import POLICY, Game, Record, WinTable
from agentrl.self_play.league import CollapseAlarm, StepPlay

GAMES = [
    Game("a", (POLICY, "random"), (1.0, -1.0)),
    Game("b", ("random", POLICY), (0.0, 0.0)),
    Game("c", ("random", POLICY), (2.0, -2.0)),
    Game("d", (POLICY, POLICY), (1.0, -1.0)),
]


def test_wins_are_counted_by_seat():
    table = WinTable()
    table.add(GAMES)
    assert table.record(POLICY, "random", 0) == Record(1, 0, 0)
    assert table.record(POLICY, "random", 1) == Record(0, 1, 1)
    assert table.record(POLICY, "random").score == 0.5
    assert table.record("random", POLICY) == Record(1, 1, 1)
    assert table.asymmetry(POLICY, "random") == pytest.approx(0.75)
    assert table.asymmetry(POLICY, POLICY) == 1.0, "the first player won the mirror game"
    assert table.record("random", "nash").score == 0.5
    assert WinTable.from_state(json.loads(json.dumps(table.state()))) == table


def test_three_players_are_compared_in_pairs():
    table = WinTable()
    table.add([Game("a", ("x", "y", "z"), (2.0, 1.0, 1.0))])
    assert table.record("x", "z") == table.record("x", "y") == Record(1, 0, 0)
    assert table.record("y", "z") == Record(0, 1, 0)


def test_old_games_weigh_less_and_players_are_forgotten():
    table = WinTable()
    table.add(GAMES[:1])
    table.decay(0.5)
    table.add([Game("e", (POLICY, "random"), (-1.0, 1.0))])
    assert table.record(POLICY, "random").score == pytest.approx(1 / 3)
    table.forget("random")
    assert table.records == {}


def play(first=0.5, reward=0.0, tokens=10.0):
    return StepPlay({"first": first, "second": 1 - first}, {"first": reward, "second": -reward}, tokens)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (play(first=0.97), ["first scored 0.97 and second 0.03", "self_play.alarm.asymmetry"]),
        (play(reward=-0.96), ["mean reward of second was 0.96", "self_play.alarm.reward"]),
        (play(tokens=1.5), ["1.5 tokens", "first step 10.0", "self_play.alarm.length_share"]),
    ],
)
def test_the_alarm_warns_once_when_a_condition_has_held_for_some_steps(bad, words):
    alarm = CollapseAlarm(AlarmConfig(steps=3))
    for step in (play(), bad, bad, play(), bad, bad):
        assert alarm.update(step) == []
    resumed = CollapseAlarm(AlarmConfig(steps=3))
    resumed.load(json.loads(json.dumps(alarm.state())))
    assert resumed == alarm
    [warning] = resumed.update(bad)
    for word in words:
        assert word in warning
    assert resumed.update(bad) == []


def test_a_condition_can_be_switched_off():
    alarm = CollapseAlarm(AlarmConfig(steps=1, asymmetry=None, reward=None, length_share=None))
    assert alarm.update(play()) == []
    assert alarm.update(play(first=1.0, reward=1.0, tokens=0.0)) == []
