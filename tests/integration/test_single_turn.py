"""Prompts and a reward, by command line in a fresh directory: JSONL and parquet, own functions, and what goes wrong."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import preloaded
import pyarrow as pa
import pytest
from pyarrow import parquet
from shared_runs import Services, environment, metrics

from agentrl.cli.main import main
from agentrl.models.resolve import resolve_model

ROWS = [{"prompt": f"What is {n} + 1?", "label": str(n + 1), "meta": {"odd": n % 2}} for n in range(6)]
REWARDS = """
import asyncio
from agentrl import Sample


def score(sample: Sample) -> float:
    return sample.final.count("e") / (1 + len(sample.final))


async def of_a_group(samples: list[Sample]) -> list[dict[str, float]]:
    await asyncio.sleep(0)
    assert len({sample.prompt_id for sample in samples}) == 1
    longest = max(len(sample.final) for sample in samples)
    return [{"score": len(s.final) / (1 + longest), "label": float(s.label), "group": len(samples)} for s in samples]


def raises(sample):
    return {}[sample.label]
"""
TINY = ["rollout.batch_size=2", "rollout.n_samples_per_prompt=4", "sampler.max_new_tokens=12"]


def lines(rows: list[Any]) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    (tmp_path / "eval.jsonl").write_text(lines(ROWS[:2]))
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_train_on_a_file_with_a_reward_of_a_group(folder: Path, services: Services) -> None:
    done = services.agentrl(
        "train", "--env", "single_turn", "data.path=train.jsonl", "data.input_key=prompt", "data.label_key=label",
        "data.streaming=true", "data.workers=1",
        "data.eval_path=eval.jsonl", "data.metadata_key=meta", "reward.key=score", "reward=my_rewards.py:of_a_group",
        "train.steps=2", "train.eval_first=false", "eval.group_by=odd", "run.dir=run", "obs.progress=plain",
        "obs.tensorboard=false", *TINY, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [row for row in metrics(folder / "run") if "train/reward" in row]
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["rollout/group"] == 4 and 0 < row["train/reward"] < 1 for row in steps)
    assert all(1 <= row["rollout/label"] <= 6 and row["rollout/turns"] == 1 for row in steps)
    [last] = [row for row in metrics(folder / "run") if "eval/reward" in row]
    assert last["eval/label"] == 1.5
    assert {"eval/reward/odd=0", "eval/reward/odd=1"} <= set(last)
    rollouts = [json.loads(line) for line in (folder / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert {rollout["prompt_id"] for rollout in rollouts} <= {f"train.jsonl:{line}" for line in range(1, 7)}
    for rollout in rollouts:
        assert ROWS[int(rollout["label"]) - 1]["prompt"] in rollout["prompt"]
        [row] = rollout["rows"]
        assert sum(row["mask"]) == rollout["sampled_tokens"] > 0


@pytest.mark.long
def test_raw_prompts_of_parquet_for_a_model_without_a_chat_template(folder: Path, services: Services) -> None:
    shutil.copytree(resolve_model("multihop-warm"), folder / "base")
    (folder / "base/chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "base/tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "base/tokenizer_config.json").write_text(json.dumps(settings))
    parquet.write_table(pa.Table.from_pylist(ROWS), folder / "train.parquet")
    command = ["rollout", "--env", "single_turn", "--out", "out.jsonl", "model.path=base", "data.path=train.parquet"]
    command += ["data.apply_chat_template=false", "data.label_key=label", *TINY]
    done = services.agentrl(*command, "reward=my_rewards:score", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    rollouts = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert len(rollouts) == 8
    assert {rollout["prompt"] for rollout in rollouts} <= {row["prompt"] for row in ROWS}

    stopped = services.agentrl(*command[:4], "failed.jsonl", *command[5:], "reward=my_rewards:raises", cwd=folder)
    assert stopped.returncode == 1
    stderr = stopped.stderr
    for phrase in ("my_rewards:raises failed: KeyError: '", "(my_rewards.py:", "of task train.parquet:", "What is ",
                 "response ", "reward.on_error=drop"):  # fmt: skip
        assert phrase in stderr, stderr


def test_the_console_script_finds_modules_where_it_is_called(folder: Path) -> None:
    script = Path(sys.executable).parent / "agentrl"
    words = ["train", "--env", "single_turn", "data.path=train.jsonl", "reward=my_rewards:score", "--dry-run"]
    done = preloaded.run("installed_script:main", [str(script), *words], cwd=folder, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr
    assert "reward       my_rewards:score" in done.stderr
    assert "train.jsonl: 6 to train on" in done.stderr
    assert "evaluation   off" in done.stderr


GOOD = ["train", "--env", "single_turn", "data.path=train.jsonl", "data.label_key=label", "reward=numeric"]
MISTAKES = {
    "data.path=none.jsonl": "data.path=none.jsonl: there is no such file",
    "data.path=my_rewards.py": "rows are read from .jsonl, .json, .csv, .parquet files",
    "data.path=broken.jsonl": "broken.jsonl, line 2 (data.path) is no JSON",
    "data.path=empty.jsonl": "data.path=empty.jsonl: the file holds no rows",
    "data.eval_path=none.jsonl": "data.eval_path=none.jsonl: there is no such file",
    "data.input_key=question": "train.jsonl, line 1: 'question' (data.input_key=question) is missing; the row has the "
    "keys: prompt, label, meta",
    "data.label_key=answer": "'answer' (data.label_key=answer) is missing",
    "data.label_key=null": "set data.label_key to its column",
    "data.id_key=meta.id": "'meta.id' (data.id_key=meta.id) is missing",
    "data.path=null": "data.path to a file of prompts",
    "tasks.name=multihop": "data.path=train.jsonl and tasks.name=multihop both",
    "reward=null": "set reward.function to my_rewards.py:score",
    "reward.function=null": "built in: code, dapo, deepscaler, environment, exact_match, f1,",
    "reward=numerc": "Did you mean 'numeric'?",
    "reward=my_reward.py:score": "there is no file",
    "reward=my_rewards.py:scor": "It has: of_a_group, raises, score",
    "reward=my_reward:score": "there is no module 'my_reward'",
    "reward.on_error=ignore": "reward.on_error='ignore'",
    "rollout.generate=my_rewards.py:play": "rollout.generate=my_rewards.py:play: my_rewards.py has no 'play'",
    "model.path=base": "base has no chat template; set data.apply_chat_template=false",
    "model.path=bare": "bare has no weights: neither model.safetensors nor model.safetensors.index.json",
}


@pytest.mark.parametrize(("setting", "message"), MISTAKES.items())
@pytest.mark.parametrize("dry", [True, False])
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str, dry: bool) -> None:
    """In this process, as starting another takes seconds; nothing of them gets as far as a server."""
    (folder / "broken.jsonl").write_text(lines([ROWS[0], '{"prompt": "x"']))
    (folder / "empty.jsonl").write_text("\n")
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    shutil.copytree(resolve_model("multihop-warm"), folder / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    assert main([*GOOD, setting, *(["--dry-run"] if dry else [])]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("settings", "function", "on_error"),
    [
        (["reward=f1", "reward.on_error=drop"], "f1", "drop"),
        (["reward.on_error=drop", "reward=f1"], "f1", "drop"),
        (["--config", "short.yaml"], "exact_match", "score"),
        (["--config", "short.yaml", "reward=f1"], "f1", "score"),
        (["--config", "long.yaml", "reward=f1"], "f1", "drop"),
    ],
)
def test_the_short_form_of_the_reward(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: list[str], function: str, on_error: str
) -> None:
    import yaml

    (folder / "short.yaml").write_text("reward: exact_match\n")
    (folder / "long.yaml").write_text("reward: {function: exact_match, on_error: drop}\n")
    if settings[:2] == ["--config", "short.yaml"]:
        settings = [*settings, "reward.on_error=score"]
    words = ["train", "--env", "single_turn", "data.path=train.jsonl", "data.label_key=label", *settings, "--dry-run"]
    assert main(words) == 0
    reward = yaml.safe_load(capsys.readouterr().out)["reward"]
    assert (reward["function"], reward["on_error"]) == (function, on_error)


def test_a_dry_run_lists_what_this_machine_lacks_and_a_run_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.core.extras.find_spec", lambda name: None)
    words = [*GOOD, "sampler.backend=sglang", "model.path=somebody/some-model", "learner.device=cuda"]
    words += ["learner.ranks=64"]
    assert main([*words, "--dry-run"]) == 0
    output = capsys.readouterr().err
    for lack in ("SGLang is not installed", "learner.ranks=64 wants as many GPUs", "model.path=somebody/some-model"):
        assert lack in output
    assert main(words) == 2
    assert "SGLang is not installed" in capsys.readouterr().err
