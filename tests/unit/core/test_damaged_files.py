"""Every file that agentrl reads, emptied, cut and with a byte changed: it is read, or one line names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from agentrl.cli.main import main
from agentrl.config.load import read_yaml
from agentrl.config.tasks import DataConfig
from agentrl.core.errors import AgentrlError, ConfigError
from agentrl.dashboard.metrics_file import MetricsFile
from agentrl.data.file_tasks import read_tasks
from agentrl.learner.checkpoints import Checkpoints, read_state
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.learner.random_states import random_states, restore_random
from agentrl.models.load import load_model, load_tokenizer, read_max_positions, read_vocab_size
from agentrl.models.resolve import has_chat_template, resolve_model
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.rollout_format import encode_rollout
from agentrl.obs.rollouts import RolloutFile, read_advantages, read_rollouts, scan_rollouts, write_advantages
from agentrl.obs.viewer.run_files import open_run
from agentrl.self_play.league import LeagueLog, last_evaluation
from agentrl.testing import FakeLearner
from agentrl.train.resume import check_resume
from tests.unit.learner.learners import Learners, make_batch, make_model
from tests.unit.train.test_replay import groups

CUTS, FLIPS = 12, 24
"""Damages of each file, besides the empty one."""


def damages(content: bytes) -> Iterator[bytes]:
    """The file emptied, cut at places all over it, and with one byte changed."""
    yield b""
    for cut in np.linspace(1, len(content) - 1, CUTS).astype(int):
        yield content[:cut]
    rng = np.random.default_rng(0)
    for position, bits in zip(rng.integers(0, len(content), FLIPS), rng.integers(1, 256, FLIPS), strict=True):
        yield content[:position] + bytes([content[position] ^ int(bits)]) + content[position + 1 :]


def check(file: Path, read: Callable[[], object], named: Path | None = None, *, every: int = 1) -> None:
    """Damage ``file``, ``every`` other way, and assert that ``read`` returns, or names the file in one line."""
    full_content = file.read_bytes()
    read()
    refusals = []
    for damaged in islice(damages(full_content), None, None, every):
        file.write_bytes(damaged)
        try:
            read()
        except AgentrlError as error:
            refusals.append(str(error))
    assert [words for words in refusals if str(named or file) not in words or "\n" in words] == []
    file.write_bytes(full_content)
    read()


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[Learners]:
    opened = Learners(make_model(tmp_path / "tiny"))
    yield opened
    opened.close()


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rollouts(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"samples.{suffix}"
    file = RolloutFile(path)
    file.write(groups("a", "b"))
    rollout_path = file.finish()
    check(rollout_path, lambda: read_rollouts(path))
    check(rollout_path, lambda: list(scan_rollouts(path)))


def test_what_is_written_next_to_rollouts(tmp_path: Path) -> None:
    check(write_advantages(tmp_path, 1, {"a/1": 0.5, "b/2": -1.0}), lambda: read_advantages(tmp_path, 1))
    with MetricsLog(tmp_path) as log:
        for step in range(3):
            log.write(step, {"train/reward": 0.5, "train/lr": 1e-6})
    check(tmp_path / "metrics.jsonl", lambda: read_metrics(tmp_path / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"step": -1, "train/reward": 0.5}', "its step is -1, and no integer from 0"),
        ('{"step": 1.5, "train/reward": 0.5}', "its step is 1.5, and no integer from 0"),
        ('{"step": "3"}', "its step is '3', and no integer from 0"),
        ('{"step": true}', "its step is True, and no integer from 0"),
        ('{"train/reward": 0.5}', "it has no step"),
        ("[1]", "it is no JSON object"),
        ("", "it is no JSON: "),
        ('{"step": 2, "train/reward": "nan"}', "the metric 'train/reward' is 'nan', and neither a number nor null"),
        ('{"step": 2, "train/reward": [1]}', "the metric 'train/reward' is [1], and neither a number nor null"),
    ],
)
def test_a_row_of_metrics_that_no_run_writes_is_refused(line: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "train/reward": null}}\n{line}\n')
    for read in (lambda: read_metrics(path), lambda: MetricsLog(tmp_path, resume_after=1)):
        with pytest.raises(ConfigError) as refusal:
            read()
        assert str(refusal.value).startswith(f"{path}, line 2 is damaged: {words}")
    rows = MetricsFile(path)
    rows.rows()
    assert rows.damaged == ("metric" not in words), "the dashboard leaves out metrics that are no number"


@pytest.mark.parametrize(
    "line", ["{}", "[]", '{"step": -1, "ratings": {}, "results": []}', '{"step": 1, "ratings": 5, "results": []}',
             '{"step": 1, "ratings": {"policy": ["a", 1]}, "results": []}', '{"step": 1, "ratings": {}, "results": 5}',
             '{"step": 1, "ratings": {}}', '{"step": 1, "evaluation": {"nash": {"results": []}, "random": 5}}'],
)  # fmt: skip
def test_a_damaged_league_names_its_line(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "league.jsonl").write_text(f'{{"step": 1, "ratings": {{}}, "results": []}}\n{line}\n')
    location = f"{tmp_path / 'league.jsonl'}, line 2 is "
    for read in (lambda: LeagueLog(tmp_path, 3), lambda: check_resume(tmp_path, {}), lambda: last_evaluation(tmp_path)):
        with pytest.raises(ConfigError, match=location):
            read()
    assert main(["league", str(tmp_path)]) == 2
    assert location in capsys.readouterr().err


def test_configurations(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    shutil.copyfile(Path(__file__).parents[3] / "configs" / "agentrl_configs" / "search_r1" / "cpu.yaml", file)
    check(file, lambda: read_yaml(file))
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    (rollouts / "step_000001.jsonl").write_bytes(b"".join(map(encode_rollout, groups("a"))))
    check(file, lambda: open_run(tmp_path))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_tasks(suffix: str, tmp_path: Path) -> None:
    rows = [{"prompt": f"What is {n} + 1?", "label": str(n + 1), "meta": {"n": n}} for n in range(9)]
    path = tmp_path / f"tasks.{suffix}"
    if suffix == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        parquet.write_table(pa.Table.from_pylist(rows), path)
    data = DataConfig(path=path, input_key="prompt", label_key="label", metadata_key="meta")
    check(path, lambda: read_tasks(path, data))


def test_checkpoints(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(1, FakeLearner(), {"step": 1})
    checkpoints.finish()
    random_state_before = random_states()
    try:
        check(path / "state.json", lambda: read_state(path))
    finally:
        restore_random(random_state_before)


def test_checkpoints_of_a_learner(learners: Learners, tmp_path: Path) -> None:
    learner: LocalLearnerGroup = learners.open()
    learner.train_step(make_batch([30, 20]))
    folder = tmp_path / "state"
    learner.save(folder)
    learner.finish_save()
    files = [file for file in folder.rglob("*") if file.is_file() and file.parent.name in ("random", "optimizer")]
    for file in [*files, folder / "learner.json", folder / "model" / "model.safetensors"]:
        check(file, lambda: learner.load(folder), named=folder, every=4)


def test_model_folders(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("multihop-warm"), folder := tmp_path / "model")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    check(folder / "tokenizer_config.json", lambda: has_chat_template(folder), named=folder)
    check(folder / "config.json", lambda: (read_vocab_size(folder), read_max_positions(folder)), named=folder)
    check(folder / "config.json", lambda: load_model(folder), named=folder, every=2)
    check(folder / "model.safetensors", lambda: load_model(folder), named=folder, every=2)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        check(folder / name, lambda: load_tokenizer(folder), named=folder, every=2)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_changed_row_is_not_trained_on(suffix: str, tmp_path: Path) -> None:
    """Neither values that the checksum is not of, nor arrays of unequal lengths."""
    for change in ("value", "length"):
        rollouts = groups("a")
        lines = tmp_path / "whole.jsonl"
        lines.write_bytes(b"".join(map(encode_rollout, rollouts)))
        data = [json.loads(line) for line in lines.read_text().splitlines()]
        row = data[1]["rows"][0]
        if change == "value":
            row["logprobs"][-1] -= 0.5
        else:
            row["logprobs"].append(0.0)
        lines.write_text("".join(json.dumps(record) + "\n" for record in data))
        path = lines
        if suffix == "parquet":
            path = tmp_path / "whole.parquet"
            rebuilt = pa.Table.from_pylist([flat(record) for record in data])
            parquet.write_table(rebuilt, path)
        with pytest.raises(ConfigError, match="crc32" if change == "value" else "shapes"):
            read_rollouts(path)


def flat(rollout: dict[str, object]) -> dict[str, object]:
    """A rollout as a line of a parquet file: what has no fixed structure as JSON, metrics left out."""
    return rollout | {"label": json.dumps(rollout["label"]), "metadata": "{}", "tool_uses": "{}", "metrics": []}
