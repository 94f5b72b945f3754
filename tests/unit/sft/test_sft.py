"""Supervised fine-tuning: demonstrations token for token, data that depend on the configuration alone, a loss that falls."""

import asyncio
import json
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.config.load import find_config, load_config
from agentrl.config.model import RenderConfig
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, DataError, EnvironmentFailure, LearnerError, RunStopped, TaskError
from agentrl.core.registry import make_env, make_tasks, model_folder, tool_service
from agentrl.core.task import Demonstrator, Task
from agentrl.core.types import Fork, ForkReason, Message, Provenance, RowKey
from agentrl.models.export import export_model
from agentrl.models.load import load_model, load_tokenizer
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.sft.batches import _unpack, batches
from agentrl.sft.demonstrate import Demonstration, demonstrate
from agentrl.sft.demonstrations import Demonstrations
from agentrl.sft.preflight import RendererOf
from agentrl.sft.run import sft

WARM = model_folder("multihop-warm")
assert WARM is not None

SMALL = [
    "tasks.name=multihop",
    "tasks.options={scale: 0.1, hops: [1, 2]}",
    "env.options={topk: 2}",
    "model.path=multihop-warm",
    "sft.batch_size=4",
    "sft.workers=0",
    "sft.reseed_option=seed",
    "sft.steps_per_world=2",
    "learner.device=cpu",
    "learner.threads=1",
    "obs.tensorboard=false",
]


def config(*overrides: str) -> Config:
    return load_config(None, [*SMALL, *overrides])


def demonstrations(*overrides: str) -> Demonstrations:
    return Demonstrations(config(*overrides), RendererOf(WARM, RenderConfig()))


def test_provenance_marks_exactly_what_the_expert_said() -> None:
    """Layout: prompt (observed), turn (demonstrated), information (observed), turn (demonstrated)."""
    tasks = make_tasks("multihop", {"scale": 0.1, "hops": [1]})
    task = tasks.split("train")[0]
    renderer = make_renderer(load_tokenizer(WARM))
    row, reward, _ = asyncio.run(
        demonstrate(
            partial(make_env, "search_r1", {"topk": 1}),
            task,
            tasks.demonstrator(task, np.random.default_rng(0)),
            seed=1,
            tool_clients={"search": tool_service("search").local_client(tasks.corpora(), {})},
            renderer=renderer,
            max_turns=5,
        )
    )
    assert row.key == RowKey(task.id, f"{task.id}/demonstration-1")
    relation, (subject, answer) = task.metadata["relations"][0], task.metadata["path"]
    result = row.provenance == Provenance.DEMONSTRATED
    assert renderer.decode(row.token_ids[result]) == (
        f"<think> {relation} </think><search> {subject} </search><think> answer </think><answer> {answer} </answer>"
    )
    assert reward == 1.0
    assert (row.mask == result).all()
    assert set(row.provenance) == {Provenance.OBSERVED, Provenance.DEMONSTRATED}
    text = renderer.decode(row.token_ids)
    assert text.startswith("<|im_start|>user\nAnswer the given question.")
    assert f'</search>\n\n<information>Doc 1(Title: "{subject}") {subject} ' in text


def test_a_turn_without_a_stop_string_ends_with_the_end_token() -> None:
    data = demonstrations("tasks.options={scale: 0.1, hops: [1], faults: {format: 1.0}}")
    end = data.renderer.end_token_id
    for row in data[0][0].rows:
        sampled_ids = row.token_ids[row.mask.astype(bool)]
        assert (sampled_ids == end).sum() == 1
        assert "My previous action is invalid." in data.renderer.decode(row.token_ids)


def test_a_tool_that_is_not_there_is_the_environments_failure() -> None:
    tasks = make_tasks("multihop", {"scale": 0.1})
    renderer = make_renderer(load_tokenizer(WARM))
    task = tasks.split("train")[0]
    expert = tasks.demonstrator(task, np.random.default_rng(0))
    with pytest.raises(EnvironmentFailure, match="calls tool 'search'; there are: none"):
        run_demonstration(partial(make_env, "search_r1"), expert, task, renderer)


class Greeter(Env):
    """Greets after each turn, for a reward that a sum in another order would change; the episode has no end."""

    def step(self, action):  # type: ignore[no-untyped-def]
        return (Message("user", "hello"),), 0.1, False, False, {}


class Scripted:
    """Says the same in each turn."""

    def __init__(self, text: str) -> None:
        self.text = text

    def act(self, observation: tuple[Message, ...]) -> str:
        return self.text


def run_demonstration(
    env_factory: Callable[[], Env], expert: Demonstrator, task: Task, renderer: ChatRenderer, max_turns: int = 3
) -> Demonstration:
    return asyncio.run(
        demonstrate(env_factory, task, expert, seed=0, tool_clients={}, renderer=renderer, max_turns=max_turns)
    )


def test_a_row_ends_with_the_answer_to_the_last_turn() -> None:
    """Layout: prompt o, then for each of three turns what the expert says d and the greeting o; no token limit."""
    renderer = make_renderer(load_tokenizer(WARM))
    row, reward, _ = run_demonstration(Greeter, Scripted("a " * 1000), Greeter.example_task(), renderer)
    assert reward == 0.1 + 0.1 + 0.1
    changes = np.flatnonzero(np.diff(row.provenance))
    assert row.provenance[[0, *(changes + 1)]].tolist() == [0, 2, 0, 2, 0, 2, 0]
    assert (
        renderer.decode(row.token_ids[changes[-1] + 1 :])
        == "\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("max_turns", [1, 3])
def test_a_fork_is_an_error_after_the_last_turn_too(max_turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = make_renderer(load_tokenizer(WARM))
    monkeypatch.setattr(renderer, "bridge", lambda *_: Fork(ForkReason.THINKING, "earlier reasoning is left out"))
    with pytest.raises(TaskError, match=r"task 'example': one row cannot show the demonstration.*'thinking'"):
        run_demonstration(Greeter, Scripted("hi"), Greeter.example_task(), renderer, max_turns)


def test_items_are_a_function_of_the_configuration() -> None:
    first_demos, two = demonstrations("sft.steps=5"), demonstrations("sft.steps=5")
    assert len(first_demos) == 3
    assert [len(first_demos[i]) for i in range(3)] == [2, 2, 1]
    two[0]  # the order of asking must not matter
    for a, b in zip(first_demos[2][0].rows, pickle.loads(pickle.dumps(two))[2][0].rows, strict=True):
        assert (a.token_ids == b.token_ids).all()
    other_demonstrations = demonstrations("sft.steps=5", "sft.seed=7")
    assert any(
        a.key.rollout_id != b.key.rollout_id
        for a, b in zip(first_demos[0][0].rows, other_demonstrations[0][0].rows, strict=True)
    )


def test_curriculum() -> None:
    stages = "sft.curriculum=[{steps: 2, tasks: {hops: [1]}, env: {topk: 1}}, {steps: 2, tasks: {hops: [2]}}]"
    data = demonstrations("sft.steps=6", stages)
    decode = data.renderer.decode

    def searches(item: int) -> set[int]:
        return {decode(row.token_ids).count("<information>Doc") for step in data[item] for row in step.rows}

    assert searches(0) == {1}
    assert searches(1) == {2}
    assert not any("Doc 2(" in decode(row.token_ids) for step in data[0] for row in step.rows)
    assert data.stage(4) is None
    with pytest.raises(ConfigError, match=r"sft\.steps=3"):
        demonstrations("sft.steps=3", stages)


def test_workers_change_nothing() -> None:
    def ids(workers: int) -> list[list[int]]:
        run = config("sft.steps=4", f"sft.workers={workers}")
        actual_batches = batches(run, Demonstrations(run, RendererOf(WARM, RenderConfig())))
        return [micro.token_ids_L.tolist() for batch in actual_batches for [micro] in batch.micro]

    assert ids(0) == ids(2)


def test_ctrl_c_is_not_for_the_server_of_the_workers() -> None:
    """In a process without a server."""
    code = (
        "from agentrl.sft.workers import sft_processes\nfrom multiprocessing import forkserver\nsft_processes()\n"
        "print(open(f'/proc/{forkserver._forkserver._forkserver_pid}/status').read())"
    )
    status = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    blocked = int(status.partition("SigBlk:")[2].split()[0], 16)
    assert blocked >> (signal.SIGINT - 1) & 1


def test_a_worker_process_that_dies_ends_the_run_with_its_key() -> None:
    def packed_items() -> Iterator[bytes]:
        yield pickle.dumps(["batch"])
        raise RuntimeError("DataLoader worker (pid(s) 7) exited unexpectedly")

    unpacked = _unpack(packed_items(), 2)
    assert next(unpacked) == "batch"
    with pytest.raises(DataError, match=r"\(sft\.workers=2\) was killed or crashed"):
        next(unpacked)


def test_batches_weigh_policy_and_context() -> None:
    run = config("sft.steps=1", "sft.context_weight=0.3")
    [batch] = batches(run, Demonstrations(run, RendererOf(WARM, RenderConfig())))
    [[micro]] = batch.micro
    result = micro.provenance_L == Provenance.DEMONSTRATED
    assert batch.kind == "sft"
    assert float(micro.weight_L[result].sum()) == pytest.approx(1.0, abs=1e-4)
    assert float(micro.weight_L[~result].sum()) == pytest.approx(0.3, abs=1e-4)
    assert batch.metrics["sft/reward"] == 1.0


def test_data_workers_start_before_the_learner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both import for seconds, and the time limit of a run counts from its first step on."""
    started: list[str] = []

    def start_batches(*_: Any) -> Iterator[Any]:
        started.append("workers")
        return iter(())

    def start_learner(*_: Any) -> Any:
        started.append("learner")
        raise LearnerError("there is none")

    monkeypatch.setattr("agentrl.sft.run.batches", start_batches)
    monkeypatch.setattr("agentrl.sft.run._start_learner", start_learner)
    with pytest.raises(LearnerError):
        sft(config(f"run.dir={tmp_path / 'run'}", "sft.steps=1"), note=print)
    assert started == ["workers", "learner"]


def test_a_run_lowers_the_loss_and_writes_a_policy(tmp_path: Path) -> None:
    run = config(f"run.dir={tmp_path / 'run'}", "sft.steps=5", "learner.optimizer.lr=1e-3", "sft.steps_per_world=1")
    out = sft(run, note=print)
    assert out == tmp_path / "run" / "model"
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 6))
    losses = [row["train/loss"] for row in rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:2])
    assert rows[-1]["train/lr"] < rows[0]["train/lr"] == pytest.approx(1e-3)
    written = load_model(out, "bfloat16")
    assert written.config.dtype is torch.bfloat16
    weights = load_model(tmp_path / "run" / "checkpoint" / "step_000005" / "model", "bfloat16").state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in written.state_dict().items())
    assert (out / "tokenizer.json").read_bytes() == (WARM / "tokenizer.json").read_bytes()
    assert load_tokenizer(out).chat_template
    assert len({path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}) == 1, "all are readable"


def test_minutes_end_a_run_early(tmp_path: Path) -> None:
    small = [setting for setting in SMALL if not setting.startswith(("tasks.", "env.", "model."))]
    command = find_config("search_r1/sft_control")  # the README's
    run = load_config(command, [*small, f"run.dir={tmp_path}", "sft.minutes=0.0001"])
    assert sft(run, note=print).is_dir()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) < 5


def test_ctrl_c_saves_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupting(message: str) -> None:
        if "step 5/" in message:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("agentrl.sft.run.SHOWN_EVERY", 5)
    run = config(f"run.dir={tmp_path}", "sft.steps=100000", "sft.batch_size=1", "sft.steps_per_world=6")
    handlers_before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RunStopped, match="after 5 of 100000"):
        sft(run, note=interrupting)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert signal.getsignal(signal.SIGINT) is handlers_before


def test_a_signal_in_the_last_save_does_not_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems signal more than once, and a finished run is finished."""

    def interrupted_export(*arguments: object) -> None:
        signal.raise_signal(signal.SIGHUP)
        export_model(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr("agentrl.sft.run.export_model", interrupted_export)
    before = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("the run has ended"))
    try:
        assert sft(config(f"run.dir={tmp_path}", "sft.steps=1", "sft.batch_size=1"), note=print).is_dir()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_taskset_is_needed() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.name"):
        sft(load_config(None, []), note=print)


def test_a_folder_with_files_is_refused_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"sft\.out=.*/policy holds files"):
        sft(config(f"run.dir={tmp_path / 'run'}", f"sft.out={tmp_path / 'policy'}"), note=print)
    assert not (tmp_path / "run").exists()
