"""Trace files: what is in them, which spans are nested, how large they become, and what a killed run leaves."""

import asyncio
import json
import time
from collections import defaultdict

import pytest
from deadlines import wait_until
from hypothesis import given
from hypothesis import strategies as st

from agentrl.obs import trace
from agentrl.obs.trace import EPISODES, RUN, TraceFiles, read_trace, trace_files
from agentrl.obs.waiting import PHASE, REQUEST, ROLLOUT, TOOL, TURN, WaitRegistry, waiting


def write(folder, play, **options):
    """Trace what ``play(files)`` waits for; return the events of each file."""
    notes = []
    files = TraceFiles(folder, **({"step": 1, "keep": 9, "note": notes.append} | options))
    registry = WaitRegistry([files])
    token = registry.enter()
    try:
        play(files)
    finally:
        registry.leave(token)
        files.close()
    return [json.loads(path.read_text()) for path in trace_files(folder)], notes


def spans(events):
    return [event for event in events if event["ph"] == "X"]


def one_turn(files):
    with (
        waiting(PHASE, "step 1", "rollout"),
        waiting(ROLLOUT, "1/0/0", lambda: "turn 1"),
        waiting(TURN, "1"),
        waiting(REQUEST, 'to the engine "é"'),
    ):
        pass
    with waiting(PHASE, "step 1", "train"):
        pass


def test_spans_are_named_and_nested_on_their_tracks(tmp_path):
    [events], notes = write(tmp_path, one_turn)
    assert [(span["name"], span["pid"], span["tid"], span["args"]["of"]) for span in spans(events)] == [
        ("request", EPISODES, 1, 'to the engine "é"'),
        ("turn", EPISODES, 1, "1"),
        ("rollout", EPISODES, 1, "1/0/0, turn 1"),
        ("rollout", RUN, 1, "step 1, rollout"),
        ("train", RUN, 1, "step 1, train"),
    ]
    assert not notes


def test_an_error_is_named(tmp_path):
    def play(files):
        with pytest.raises(TimeoutError), waiting(TOOL, "search", "call 1.0"):
            raise TimeoutError

    [events], _ = write(tmp_path, play)
    [span] = spans(events)
    assert (span["name"], span["args"]) == ("tool search", {"of": "search, call 1.0", "error": "TimeoutError"})


def test_other_kinds_are_left_out_in_episodes_and_if_they_are_short(tmp_path):
    def play(files):
        with waiting("environment", "reset"):
            pass
        with waiting("environment", "step"):
            time.sleep(trace.SHORT_S)

        with waiting(ROLLOUT, "1/0/0"), waiting("environment", "inside"):
            with waiting(TOOL, "search"):
                pass
            time.sleep(trace.SHORT_S)

    [events], _ = write(tmp_path, play)
    assert [span["args"]["of"] for span in spans(events)] == ["step", "search", "1/0/0"]
    assert [span["tid"] for span in spans(events)[1:]] == [1, 1]


async def _tree(plan):
    with waiting(TOOL, "t"):
        await asyncio.sleep(0)
        await asyncio.gather(*(_tree(branch) for branch in plan))
        await asyncio.sleep(0)


PLANS = st.recursive(st.just([]), lambda plans: st.lists(plans, max_size=4), max_leaves=12)


@given(plans=st.lists(PLANS, min_size=1, max_size=4))
def test_spans_of_a_track_are_nested_or_apart(plans, tmp_path_factory):
    async def episode(number, plan):
        with waiting(ROLLOUT, str(number)):
            await _tree(plan)

    def play(files):
        async def run():
            with waiting(PHASE, "step 1", "rollout"):
                await asyncio.gather(*(episode(*plan) for plan in enumerate(plans)))

        asyncio.run(run())

    [events], _ = write(tmp_path_factory.mktemp("run"), play)
    tracks = defaultdict(list)
    for span in spans(events):
        tracks[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for times in tracks.values():
        for first, last in times:
            crossing = [
                other_span for other_span in times if first + 0.2 < other_span[0] < last - 0.2 < other_span[1] - 0.4
            ]
            assert not crossing


def test_tracks_are_used_again(tmp_path):
    def play(files):
        for number in range(5):
            with waiting(ROLLOUT, str(number)):
                pass

    [events], _ = write(tmp_path, play)
    assert {span["tid"] for span in spans(events)} == {1}


def test_each_step_has_a_file_and_old_ones_are_deleted(tmp_path):
    def play(files):
        for step in (4, 5, 6, 7):
            with waiting(PHASE, f"step {step}", "rollout"):
                pass
            files.log(step, {"time/step_s": 2.0, "train/reward": 0.5, "train/loss": 1.0})
            files.log(step, {"eval/exact_match": 0.5})

    actual, _ = write(tmp_path, play, step=4, keep=3)
    assert [path.name for path in trace_files(tmp_path)] == [f"step_{step:06d}.json" for step in (6, 7, 8)]
    [step] = [span for span in spans(actual[0]) if span["name"] == "step 6"]
    assert (step["dur"], step["tid"]) == (2e6, trace.STEPS_TRACK)
    counters = [(event["name"], event["args"]) for event in actual[0] if event["ph"] == "C"]
    assert counters == [("train/reward", {"value": 0.5})]


def test_a_resumed_run_replaces_the_steps_that_it_runs_again(tmp_path):
    for step in (3, 4, 5):
        write(tmp_path, one_turn, step=step)
    write(tmp_path, one_turn, step=4)
    assert [path.name for path in trace_files(tmp_path)] == ["step_000003.json", "step_000004.json"]


def test_a_full_file_counts_what_it_lacks(tmp_path):
    def play(files):
        for number in range(100):
            with waiting(ROLLOUT, str(number)):
                pass

    [events], notes = write(tmp_path, play, file_mib=0.002)
    lacking = events[-1]["args"]["dropped"]
    assert lacking == 100 - len(spans(events)) > 0
    assert f"lacks {lacking} spans" in notes[0]
    assert trace_files(tmp_path)[0].stat().st_size < 4096


def test_a_killed_run_leaves_a_readable_file(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "FLUSH_S", 0.01)
    monkeypatch.setattr(trace, "LONG_S", 0.01)
    files = TraceFiles(tmp_path, step=1, keep=9, note=print)
    registry = WaitRegistry([files])
    token = registry.enter()
    hung = waiting(TOOL, "search", "call 1.0")
    with hung:
        [path] = trace_files(tmp_path)
        wait_until(lambda: any(event["ph"] == "B" for event in read_trace(path)))
        events = [event for event in read_trace(path) if event["ph"] == "B"]
        assert events[0]["args"] == {"of": "search, call 1.0"}
        with pytest.raises(json.JSONDecodeError):
            json.loads(path.read_text())
        path.with_name("step_000002.json").write_bytes(path.read_bytes()[:-9])
        assert read_trace(path.with_name("step_000002.json")) == read_trace(path)[:-1]
    registry.leave(token)
    files.close()
    assert [event["ph"] for event in read_trace(path) if event.get("tid")] == ["B", "E"]


KEYS = {
    "M": {"name", "pid", "args"},
    "X": {"name", "ts", "pid", "tid", "dur"},
    "C": {"name", "ts", "pid", "args"},
    "B": {"name", "ts", "pid", "tid"},
    "E": {"name", "ts", "pid", "tid"},
}
"""What the trace event format wants of each phase that is written."""


def test_events_keep_the_trace_event_format(tmp_path, monkeypatch):
    """With spans that are open for long, which have a begin and an end, around others."""
    monkeypatch.setattr(trace, "FLUSH_S", 0.01)
    monkeypatch.setattr(trace, "LONG_S", 0.03)

    def play(files):
        with waiting(PHASE, "step 1", "rollout"):
            for number in range(3):
                with waiting(ROLLOUT, str(number)), waiting(TURN, "1"):
                    deadline = time.monotonic() + 10
                    while (
                        len([event for event in read_trace(trace_files(tmp_path)[0]) if event["ph"] == "B"])
                        < 2 * number + 3
                    ):
                        assert time.monotonic() < deadline
                        with waiting(REQUEST, "short"):
                            time.sleep(0.002)
        files.log(1, {"time/step_s": 0.5, "train/reward": 0.5})

    begun = time.monotonic()
    [events, _], _ = write(tmp_path, play)
    tracks = defaultdict(list)
    for event in events:
        assert KEYS[event["ph"]] <= event.keys()
        assert {type(event[key]) for key in ("pid", "tid") if key in event} == {int}
        assert event["ph"] != "C" or type(event["args"]["value"]) is float
        if event["ph"] in "XBE":
            tracks[event["pid"], event["tid"]].append(event)
    seconds = time.monotonic() - begun
    for track in tracks.values():
        ends = [one for one in track if one["ph"] == "E"]
        assert len(ends) == len([one for one in track if one["ph"] == "B"])
        open_at = []
        for event in sorted(track, key=lambda one: one["ts"]):
            open_at += [event] if event["ph"] == "B" else []
            if event["ph"] == "E":
                begin = open_at.pop()
                assert event["name"] == begin["name"], "Chrome leaves out others"
                assert 0 <= event["ts"] - begin["ts"] <= 1e6 * seconds, "microseconds"
        assert not open_at
    assert sum(one["ph"] == "B" for one in events) >= 7


def test_a_full_disk_ends_the_trace_and_not_the_run(tmp_path, monkeypatch):
    notes = []
    files = TraceFiles(tmp_path, step=1, keep=9, note=notes.append)

    class Full:
        def write(self, line):
            raise OSError(28, "No space left on device")

    files._file.close()
    files._file = Full()
    registry = WaitRegistry([files])
    token = registry.enter()
    with waiting(ROLLOUT, "1/0/0"):
        pass
    registry.leave(token)
    files.close()
    assert "obs.trace" in notes[0]
    assert "No space left" in notes[0]
