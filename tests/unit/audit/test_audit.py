"""The audit passes what agentrl wrote, and finds and names each thing that can be wrong with it."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from agentrl.audit.report import Fault
from agentrl.audit.run import audit_files, rollout_faults
from agentrl.audit.texts import Texts
from agentrl.cli.main import main
from agentrl.core.sampling_support import SamplingSupport
from agentrl.core.types import FinishReason, ForkReason, Rollout, StopReason, Turn
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.parquet import write_parquet
from agentrl.obs.rollout_format import encode_rollout
from tests.unit.audit.good_rollout import good, said


def tokenizer():
    """Ids 0 to 9 are ``. a b c d e f g h i``; ``ab`` is one token, 10."""
    vocabulary = {letter: index for index, letter in enumerate(".abcdefghi")} | {"ab": 10}
    base = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    base.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=base, eos_token=".")


def changed(rollout, number, **values):
    """The rollout with values of one of its rows set: ``name=(token, value)``, or a whole attribute."""
    rows = list(rollout.rows)
    row = rows[number]
    for name, value in values.items():
        if isinstance(value, tuple) and isinstance(getattr(row, name), np.ndarray):
            array = getattr(row, name).copy()
            array[value[0]] = value[1]
            value = array
        row = dataclasses.replace(row, **{name: value})
    rows[number] = row
    return dataclasses.replace(rollout, rows=rows)


def test_good_rollouts_pass(tmp_path):
    assert rollout_faults(good(), Texts(tokenizer())) == []
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    lines.write_bytes(encode_rollout(good("r1")) + encode_rollout(good("r2")) + b'{"cut short')
    write_parquet(table, [good("r3")])
    report = audit_files([lines, table], Texts(tokenizer()))
    assert report.violations == []
    assert (report.rollouts, report.rows, report.tokens) == (3, 9, 3 * 19)
    assert report.sampled == report.trained == 3 * 8
    assert report.forks == {"branch": 3, "context": 3}
    assert (report.turns, report.drifted) == (12, 0)


def make_support(ids: dict[int, list[int]], tokens: int = len(good().rows[0].token_ids)) -> SamplingSupport:
    """Return a support of some tokens of the first row."""
    kept = [ids.get(place, []) for place in range(tokens)]
    flat = [token for token_ids in kept for token in token_ids]
    return SamplingSupport(np.array([*map(len, kept)], np.int32), np.array(flat, np.int32))


PLACES = {
    "a masked token that was observed": (
        {"mask": (0, 1), "mask_reason": (0, 0)},
        0,
        0,
        "mask 1, and no engine sampled it",
    ),
    "a made-up sample": (
        {"provenance": (5, 1), "mask": (5, 1), "mask_reason": (5, 0)},
        0,
        5,
        "sampled by no policy version",
    ),
    "a demonstration": ({"provenance": (5, 2), "mask": (5, 1), "mask_reason": (5, 0)}, 0, 5, "no engine sampled it"),
    "a mask without its reason": ({"mask": (2, 0)}, 0, 2, "its mask and the reason for it disagree"),
    "a reason without its mask": ({"mask_reason": (2, 3)}, 0, 2, "its mask and the reason for it disagree"),
    "a sample as if it were observed": (
        {"mask": (2, 0), "mask_reason": (2, 1)},
        0,
        2,
        "its mask is 0 as if it were not",
    ),
    "an observation as if it were stale": ({"mask_reason": (1, 3)}, 0, 1, "a reason for samples"),
    "a strange mask": ({"mask": (2, 2)}, 0, 2, "neither 0 nor 1"),
    "a strange maker": ({"provenance": (2, 9)}, 0, 2, "its provenance is unknown"),
    "a strange reason": ({"mask": (2, 0), "mask_reason": (2, 9)}, 0, 2, "the reason for its mask is unknown"),
    "a log-probability above 0": ({"logprobs": (3, 0.5)}, 0, 3, "no finite number of at most 0"),
    "no log-probability": ({"logprobs": (3, np.nan)}, 0, 3, "no finite number of at most 0"),
    "an infinite log-probability": ({"logprobs": (3, -np.inf)}, 0, 3, "no finite number of at most 0"),
    "a log-probability of an observation": ({"logprobs": (0, -0.1)}, 0, 0, "what only samples have"),
    "no version": ({"versions": (3, -1)}, 0, 3, "sampled by no policy version"),
    "an older version": ({"versions": (8, 0)}, 0, 8, "policy version 0 is older than 1 before it"),
    "no request": ({"requests": (3, -1)}, 0, 3, "sampled by no known request"),
    "an unknown request": ({"requests": (3, 7)}, 0, 3, "sampled by no known request"),
    "another request": ({"requests": (3, 1)}, 0, 4, "'r/0' does not sample one stretch of tokens"),
    "a negative id": ({"token_ids": (0, -4)}, 0, 0, "its id is below 0"),
    "a request named twice": ({"request_ids": ("r/0", "r/0")}, 0, None, "not unique names"),
    "a request too many": ({"request_ids": ("r/0", "r/1", "r/9")}, 0, None, "'r/9' has sampled none"),
    "a turn twice": ({"turns": (1, 1)}, 0, None, "its turns (1, 1) are not one for each of its 2 requests"),
    "a turn that was not sampled": ({"turns": (0, 4)}, 0, None, "it has turn 4; the rollout has 4"),
    "no temperature": ({"temperature": -1.0}, 0, None, "its temperature is -1.0"),
    "an array too short": ({"versions": np.zeros(2, np.int32)}, 0, None, "not of one length"),
    "a fork without a reason": ({"fork": None}, 1, None, "has no fork reason"),
    "a first row with a fork reason": ({"fork": ForkReason.BRANCH}, 0, None, "has a fork reason: branch"),
    "a shared token trained twice": ({"mask": (2, 1), "mask_reason": (2, 0)}, 2, 2, "not marked as shared"),
    "a token trained nowhere": ({"mask": (2, 0), "mask_reason": (2, 2)}, 0, 2, "no earlier row has it"),
    "another id in a shared sample": ({"token_ids": (3, 5)}, 2, 3, "sampled id 5, and in row 0 4"),
    "another context of a shared sample": ({"token_ids": (1, 5)}, 2, 1, "follows other tokens than in row 0"),
    "another log-probability in a shared sample": ({"logprobs": (4, -0.75)}, 2, 4, "is -0.75, and in row 0 -0.5"),
    "another version of a shared sample": (
        {"versions": (slice(2, 5), 2)},
        2,
        2,
        "policy version is 2, and in row 0 1",
    ),
    "a sampling support of other tokens": (
        {"support": make_support({3: [99, 98]})},
        0,
        3,
        "none of the ids that it was sampled from",
    ),
    "a sampling support of an observation": ({"support": make_support({0: [1]})}, 0, 0, "has a sampling support"),
    "a sampling support too short": ({"support": make_support({}, tokens=3)}, 0, None, "the sampling support of 3"),
    "another row's number": ({"key": dataclasses.replace(good().rows[1].key, row=5)}, 1, None, "stands in place 1"),
}


@pytest.mark.parametrize("name", PLACES)
def test_each_corruption_of_a_row_is_found_and_named(name, tmp_path):
    values, row, token, words = PLACES[name]
    rollout = changed(good(), row, **values)
    number = rollout.rows[row].key.row
    faults = rollout_faults(rollout)
    assert any(words in fault.words and (fault.row, fault.token) == (number, token) for fault in faults), faults
    path = tmp_path / "a.jsonl"
    path.write_bytes(encode_rollout(good("fine")) + encode_rollout(rollout))
    report = audit_files([path])
    assert any(
        str(violation).startswith(f"{path}:2, rollout r, row {number}") and words in str(violation)
        for violation in report.violations
    )


def with_rows(*rows, **values):
    return dataclasses.replace(good(), rows=list(rows), **values)


def renumbered(row, number):
    return dataclasses.replace(row, key=dataclasses.replace(row.key, row=number))


def cut(row, size, requests):
    arrays = {
        name: getattr(row, name)[:size]
        for name in ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests")
    }
    return dataclasses.replace(row, **arrays, request_ids=row.request_ids[:requests], turns=row.turns[:requests])


def test_rows_that_the_graph_does_not_have():
    first, other_rows, branch = good().rows
    reason = np.where(branch.mask_reason == 1, 1, 2).astype(np.uint8)
    again = dataclasses.replace(branch, mask=branch.mask * 0, mask_reason=reason)
    twice = with_rows(first, other_rows, branch, renumbered(again, 3))
    assert Fault("all of it is in row 2, so it is not a separate row", 3) in rollout_faults(twice)
    begins = with_rows(cut(first, 5, 1), other_rows, branch)
    assert Fault("row 0 is the beginning of it, so it does not fork there", 2) in rollout_faults(begins)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"sampled_tokens": 9}, "sampled_tokens is 9; its rows have 8 sampled tokens"),
        ({"rows": good().rows[:2]}, "sampled_tokens is 8; its rows have 6 sampled tokens"),
        ({"rows": changed(good(), 1, temperature=0.5).rows}, "at several temperatures: 0.5, 1.0"),
        ({"prompt": "abc"}, "no row begins with the prompt, 'abc'"),
        ({"turns": [Turn("hm", "", FinishReason.STOP)] * 4}, "no request sampled the text of turn 0, 'hm'"),
        ({"rows": changed(good(), 0, token_ids=(7, 6)).rows, "turns": [Turn("e", "", FinishReason.STOP)] * 4}, None),
        ({"rows": changed(good(), 2, token_ids=(6, 5)).rows}, "no request sampled the text of turn 3, 'f'"),
    ],
)
def test_what_is_wrong_with_a_rollout_is_named(values, words):
    faults = rollout_faults(dataclasses.replace(good(), **values), Texts(tokenizer()))
    assert any(words in fault.words for fault in faults) if words else not faults


def audit(capsys, *words):
    status = main(("audit", *map(str, words)))
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), captured.err


CHANGEABLE = (
    "token_ids",
    "provenance",
    "mask",
    "mask_reason",
    "logprobs",
    "versions",
    "requests",
    "request_ids",
    "turns",
    "temperature",
    "fork",
)


@given(st.data())
def test_no_change_of_what_was_written_goes_unseen(tmp_path_factory, data):
    saved = json.loads(encode_rollout(good()))
    row = data.draw(st.sampled_from(saved["rows"]))
    name = data.draw(st.sampled_from(CHANGEABLE))
    if isinstance(row[name], list):
        position = data.draw(st.integers(0, len(row[name]) - 1))
        row[name][position] = f"{row[name][position]}x" if name == "request_ids" else row[name][position] + 1
    else:
        row[name] = {"temperature": 0.5, "fork": "thinking"}[name]
    path = tmp_path_factory.mktemp("audit") / "a.jsonl"
    path.write_text(json.dumps(saved) + "\n")
    violations = audit_files([path]).violations
    assert any("checksum" in str(violation) for violation in violations)
    assert {violation.where for violation in violations} == {f"{path}:1"}


LINE = encode_rollout(good())
DIGITS = [
    position for position in range(LINE.index(b'"token_ids"'), len(LINE)) if LINE[position : position + 1].isdigit()
]


@given(position=st.integers(0, len(LINE) - 2), byte=st.integers(0, 255))
def test_no_damage_stops_the_audit(tmp_path_factory, position, byte):
    audit_damaged(tmp_path_factory, position, byte)


@given(position=st.sampled_from(DIGITS), byte=st.sampled_from(b"0123456789"))
def test_no_other_digit_in_a_row_goes_unseen(tmp_path_factory, position, byte):
    assert audit_damaged(tmp_path_factory, position, byte).violations or LINE[position] == byte


def audit_damaged(tmp_path_factory, position, byte):
    line = bytearray(LINE)
    line[position] = byte
    path = tmp_path_factory.mktemp("audit") / "a.jsonl"
    path.write_bytes(line)
    return audit_files([path], READER)


READER = Texts(tokenizer())


def test_parquet_that_was_changed(tmp_path):
    import pyarrow.parquet as pq

    path = tmp_path / "a.parquet"
    write_parquet(path, [good("r1"), good("r2")])
    table = pq.read_table(path)
    lines = table.to_pylist()
    lines[1]["rows"][0]["token_ids"][0] = 8
    pq.write_table(type(table).from_pylist(lines, schema=table.schema), path)
    violation, *_ = audit_files([path]).violations
    assert str(violation) == f"{path}:2, rollout r2, row 0: it is not as it was written: its checksum is another"


def test_the_command_line(tmp_path, capsys):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(encode_rollout(good("r1")) + encode_rollout(good("r2")))
    status, out, err = audit(capsys, path)
    assert (status, err) == (0, "")
    for words in ("rollouts 2", "rows 6", "sampled tokens 16", "trained tokens 16", "forks branch 2, context 2",
                  "drift not measured", "violations 0"):  # fmt: skip
        assert words in out
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    status, out, _ = audit(capsys, path, "--tokenizer", tmp_path / "model")
    assert (status, "drift 0 of 8 sampled turns (0.00%)" in out) == (0, True)
    bad = changed(good("r2"), 0, logprobs=(3, 0.5))
    path.write_bytes(encode_rollout(good("r1")) + encode_rollout(bad) + b"{}\n" + encode_rollout(good("r1")))
    status, out, err = audit(capsys, path)
    assert status == 1
    assert "samples.jsonl:2, rollout r2, row 0, token 3: its log-probability is no finite number" in out
    assert "samples.jsonl:3: not a rollout of agentrl: KeyError" in out
    assert "samples.jsonl:4, rollout r1: the file holds a rollout of this id already" in out
    assert "3 violations in 3 rollouts" in err


def test_a_runs_folder_names_its_tokenizer_and_drift_is_shown(tmp_path, capsys):
    """``a b`` was sampled as two tokens; its text would come back as one."""
    run = tmp_path / "run"
    (run / "rollouts").mkdir(parents=True)
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text("{}")
    (run / "config.yaml").write_text(f"model: {{path: {tmp_path / 'model'}}}\n")
    talk = Trajectory()
    talk.extend_to([3])
    talk.append_sampled(said([4, 1, 2, 5], "r/0"))
    rollout = Rollout(
        "t", "r", talk.rows("t", "r"), 0.0, StopReason.TERMINATED, turns=[Turn("dabe", "", FinishReason.STOP)], prompt="c",
        sampled_tokens=4,
    )  # fmt: skip
    for step in (1, 2):
        (run / "rollouts" / f"step_{step:06d}.jsonl").write_bytes(encode_rollout(rollout))
    for path in (run, run / "rollouts", run / "rollouts" / "step_000001.jsonl"):
        status, out, _ = audit(capsys, path)
        assert status == 0
        turns = 1 if path.suffix else 2
        assert f"drift {turns} of {turns} sampled turns (100.00%) would be other ids" in out
        assert "request r/0, from its token 1 on: 'abe' was sampled as 1 2 and would come back as 10" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "nowhere: there is no such folder"),
        ((".",), "is not a run"),
        (("a.jsonl", "--tokenizer", "./nowhere"), "--tokenizer=./nowhere"),
        (("a.parquet",), "is not a parquet file"),
    ],
)
def test_mistakes_exit_with_two(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_bytes(encode_rollout(good()))
    Path("a.parquet").write_bytes(b"hm")
    status, _, err = audit(capsys, *words)
    assert status == 2
    assert message in err
