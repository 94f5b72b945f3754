import dataclasses
import io

import pytest
from rich.console import Console

from agentrl.core.images import ImageSpan
from agentrl.core.types import FinishReason, SeatRecord, StopReason, Turn
from agentrl.obs.console import make_console
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.viewer.run_files import Entry, Filters, open_run
from agentrl.obs.viewer.terminal import (
    joined_texts,
    newest_rollouts,
    rollout_panel,
    rollout_view,
    steps_table,
    tokens_table,
)


def words(ids):
    return [f" w{token}" for token in ids]


def drawn(printed, color=False):
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=color, color_system="standard" if color else None)
    console.print(printed)
    return out.getvalue()


def test_tokens_are_coloured_by_who_made_them(make_rollout, pieces):
    text = drawn(rollout_view(Entry(3, make_rollout(pieces), 0.25), words), color=True)
    assert "\x1b[2m w5 w9\x1b[0m" in text
    assert "\x1b[1;32m w7 w5 w7\x1b[0m" in text
    assert "\x1b[36m w70000\x1b[0m" in text
    assert "\x1b[33m w1\x1b[0m" in text
    assert "advantage +0.250" in text


def test_images_are_lines_with_size_and_digest(make_rollout, pieces, picture):
    """Token layout: ``[5 9] 7 5 7 [70000] 1``; the image has the first two tokens, as pads have no words of use."""
    rollout = make_rollout(pieces, images={picture.digest: picture})
    rollout.rows[0] = dataclasses.replace(rollout.rows[0], images=(ImageSpan(0, 2, picture.digest),))
    line = f"[image {picture.digest[:12]}, PNG, 3×2, {len(picture.data) / 1000:.1f} kB, 2 tokens]"
    text = drawn(rollout_view(Entry(3, rollout), words))
    assert line in text
    assert "w5 w9" not in text
    assert " w7 w5 w7" in text
    panel = drawn(rollout_panel(rollout, "title", lambda ids: "".join(words(ids))))
    assert line in panel
    assert "w5 w9" not in panel
    assert " w7 w5 w7" in panel
    rollout.images = {}
    assert f"[image {picture.digest[:12]}, 2 tokens]" in drawn(rollout_view(Entry(3, rollout), words))


def test_the_moves_of_untrained_agents_are_shown(make_rollout, pieces):
    seats = (
        SeatRecord("player_0", "first", "minimax", trained=False, steps=(0, 2), moves=("5", "1")),
        SeatRecord("player_1", "second", "policy", trained=True, steps=(1,)),
    )
    text = drawn(rollout_view(Entry(3, make_rollout(pieces, episode="e", seats=seats)), words))
    assert "player_0 (first), minimax: step 1 5 · step 3 1" in text
    assert "player_1 (second)" not in text


def test_token_table(make_rollout, pieces):
    lines = drawn(tokens_table(Entry(3, make_rollout(pieces), 0.25), words)).splitlines()
    cells = [line.split() for line in lines[2:]]
    assert cells[0] == ["0", "5", "w5", "observed", "0", "observed", "–", "–", "–", "–"]
    assert cells[2] == ["2", "7", "w7", "sampled", "1", "-0.3750", "3", "q0", "+0.250"]
    assert cells[6] == ["6", "1", "w1", "sampled", "0", "stale", "-0.8750", "3", "q1", "–"]


def test_without_a_tokenizer_the_turns_are_shown(make_rollout, pieces):
    rollout = make_rollout(pieces, turns=[Turn("I say", "I hear", FinishReason.STOP)])
    text = drawn(rollout_view(Entry(1, rollout), "no tokenizer"))
    assert "What?I sayI hear" in text


def test_hostile_text_does_nothing_to_the_terminal(make_rollout, pieces):
    def drawn(printed_value):
        out = io.StringIO()
        make_console(file=out).print(printed_value)
        return out.getvalue()

    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\r"
    rollout = make_rollout(pieces, evil, evil, label=evil, turns=[Turn(evil, "", FinishReason.STOP)])
    entry = Entry(1, rollout)
    for printed_value in (
        rollout_view(entry, lambda ids: [evil] * len(ids)),
        tokens_table(entry, lambda ids: [evil] * len(ids)),
    ):
        assert not {"\x1b", "\x07", "\x9b", "\r"} & set(drawn(printed_value))
    assert "␛[2J" in drawn(rollout_view(entry, "none"))


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (["a", b"\xe2\x98", b"\x83", "b"], ["a", "", "☃", "b"]),
        ([b"\xf0\x9f", b"\x99", b"\x82"], ["", "", "🙂"]),
        ([b"\xe2\x98", "b"], ["\ufffd", "b"]),
        ([b"\xff", "b"], ["\ufffd", "b"]),
        (["a", b"\x83\xe2"], ["a", "\ufffd\ufffd"]),
        ([], []),
    ],
)
def test_characters_over_several_tokens(tokens, expected):
    assert joined_texts(tokens) == expected


def test_newest_first_and_no_further_than_needed(tmp_path, make_rollout, pieces):
    recorder = RolloutRecorder(tmp_path / "rollouts")
    for step in range(1, 31):
        stop = StopReason.MAX_TURNS if step == 2 else StopReason.TERMINATED
        recorder.write(step, [make_rollout(pieces, f"{step}-{n}", stop_reason=stop, reward=float(n)) for n in range(2)])
    run = open_run(tmp_path)
    assert [entry.rollout.rollout_id for entry in newest_rollouts(run, Filters(), 3)] == ["r30-0", "r30-1", "r29-0"]
    assert [entry.step for entry in newest_rollouts(run, Filters(stop_reason=StopReason.MAX_TURNS), 9)] == [2, 2]
    table, note = steps_table(run, Filters())
    assert note == "12 of 30 steps, evenly"
    lines = drawn(table).splitlines()
    assert len(lines) == 13
    assert lines[-1].split() == ["30", "2", "1", "0.500", "0", "1", "0.0", "7", "–", "terminated", "2"]
