"""``agentrl train --resume``: the run's own configuration, settings on top, and what is refused."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml

from agentrl.api.loading import Loaded
from agentrl.cli.main import build_parser, main
from agentrl.cli.train import load_run
from agentrl.config.layers import save_config
from agentrl.config.recorded import recorded_keys
from agentrl.core.checksums import write_checksums
from agentrl.core.errors import ConfigError
from agentrl.data.task_sources import open_tasks, read_splits, split_contents
from agentrl.models.resolve import model_contents, resolve_model
from agentrl.obs.journal import read_journal
from agentrl.runtime.run_dir import locked
from agentrl.train.pipeline.journal import Journal
from agentrl.train.rollout_source import TaskPosition
from tests.unit.core.test_atomic_files import full_disk_after
from tests.unit.train.test_group_files import ended

OVERRIDES = [
    "run.seed=7",
    "learner.optimizer.lr=1e-5",
    "learner.optimizer.warmup_steps=4",
    "learner.optimizer.weight_decay=0.1",
    "algo.kl_coef=0.001",
    "rollout.n_samples_per_prompt=4",
    "rollout.batch_size=4",
    "train.steps=9",
    "env.options.topk=3",
    "tools.search.options.client.token=t0k3n",
]


def loaded(*words: str) -> Loaded:
    return load_run(build_parser("train").parse_args(["train", *words]))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of ``--env search_r1`` and `OVERRIDES`, with a checkpoint, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    folder = Path("runs/search_r1-20260101-000000")
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    config = loaded("--env", "search_r1", *OVERRIDES).config
    state = {"step": 2, "position": 8, "keys": recorded_keys(config)}
    (folder / "checkpoints" / "step_000002" / "state.json").write_text(json.dumps(state))
    save_config(config, folder)
    return folder


@pytest.mark.parametrize("named", [False, True])
def test_resume_alone_is_the_configuration_of_the_start(run: Path, named: bool) -> None:
    actual = loaded("--resume", *([f"run.dir={run}"] if named else []))
    started = loaded("--env", "search_r1", *OVERRIDES).config
    assert actual.resumed == run
    assert actual.config.model_copy(update={"run": started.run}) == started
    assert actual.notes == (f"configuration {run / 'config.yaml'}",), "no difference to say"


def test_settings_and_files_on_top_are_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "lr.yaml").write_text("learner: {optimizer: {lr: 2.0e-5}}\n")
    actual = loaded("--resume", "--config", "lr.yaml", "train.steps=40", "tools.search.options.client.token=other")
    assert actual.notes[1:] == (
        "tools.search.options.client.token: <redacted> → <redacted>",
        "learner.optimizer.lr: 1.0e-05 → 2.0e-05",
        "train.steps: 9 → 40",
    )
    assert (actual.config.train.steps, actual.config.learner.optimizer.lr, actual.config.run.seed) == (40, 2e-5, 7)
    assert actual.config.tools["search"].options["client"] == {"token": "other"}


@pytest.mark.parametrize(
    ("setting", "state_before"),
    [
        ("run.seed=8", "7"),
        ("env.name=single_turn", "search_r1"),
        ("tasks.name=other", "multihop"),
        ("tasks.options={scale: 0.1}", "null"),
        ("tasks.train_split=eval", "train"),
        ("data.limit=5", "null"),
        ("model.path=elsewhere", "multihop-warm"),
        ("learner.optimizer.name=muon", "adamw"),
        ("learner.freeze=[model.embed_tokens.*]", r"\[\]"),
        ("model.warm_start=search_r1/sft_warm", "null"),
    ],
)
def test_another_run_is_refused_with_the_key(run: Path, setting: str, state_before: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(ConfigError, match=rf"(?m)^{key}\S*=.*: the run in {run} has {state_before}; leave out {key}"):
        loaded("--resume", setting)


def test_another_start_of_the_critic_is_refused_as_its_weights_are_the_checkpoints(run: Path) -> None:
    with pytest.raises(ConfigError, match=rf"algo\.critic\.path=elsewhere: the run in {run} has null; leave out"):
        loaded("--resume", "algo.advantage.name=gae", "algo.critic.path=elsewhere")


def test_a_run_that_was_moved_has_the_policy_of_its_warm_start_where_it_is_now(run: Path) -> None:
    file, earlier_policy = run / "config.yaml", "/before/runs/first/warm_start/model"
    file.write_text(file.read_text().replace("  reference: null\n", f"  reference: {earlier_policy}\n", 1))
    assert loaded("--resume").config.algo.reference == earlier_policy, "the run has no warm start"
    policy = run.resolve() / "warm_start" / "model"
    policy.mkdir(parents=True)
    for words in (("--resume",), ("--fork", f"{run}@2")):
        actual = loaded(*words)
        assert actual.config.algo.reference == str(policy)
        assert f"algo.reference: {earlier_policy} → {policy}" in actual.notes
    assert loaded("--resume", "algo.reference=mine").config.algo.reference == "mine"


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of all files of a run but the lock."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != "lock"}


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a file of rows without a checkpoint: step 1 was taken, a finished group waits, and one goes on."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(f'{{"prompt": "{number}", "label": "{number}"}}\n' for number in range(8)))
    Path("package").mkdir()
    Path("package/inner.py").write_text("ONE = 1.0\n")
    Path("helper.py").write_text("from package import inner\n")
    Path("mine.py").write_text("def score(sample):\n    import helper\n\n    return helper.inner.ONE\n")
    words = ("--env", "single_turn", "data.path=rows.jsonl", "data.label_key=label", "reward=mine.py:score")
    config = loaded(*words, "rollout.batch_size=2", "rollout.n_samples_per_prompt=2", "sampler.backend=embedded").config
    folder = tmp_path / "runs" / "recorded"
    (folder / "rollouts").mkdir(parents=True)
    (folder / "rollouts" / "step_000001.jsonl").write_text("")
    save_config(config, folder)
    journal = Journal(
        folder,
        keys={
            **recorded_keys(config),
            **split_contents(config, read_splits(config, open_tasks(config))),
            **model_contents(resolve_model(config.model.path)),
        },
    )
    journal.begin()
    for position in range(4):
        journal.record_admitted(position, 0)
    for position in range(3):
        asyncio.run(journal.record_finished(position, [ended("a", 1.0), ended("b", 0.0)]))
    asyncio.run(journal.record_taken(1, [0, 1], TaskPosition(2)))
    journal.close()
    return folder


def resume(folder: Path, *words: str) -> int:
    return main(["train", "--resume", "--dry-run", f"run.dir={folder}", *words])


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ((), "groups of steps 1 to 1, trained again: 2 (4 rollouts with their rewards), groups that wait for a step: 1 (2 "),
        ((), "rollouts with their rewards), groups in progress: 1"),
        (("learner.optimizer.lr=1e-4",), "in progress: 1 (learner.optimizer.lr: auto → 0.0001)"),
        (("rollout.batch_size=4",), "2 (4 rollouts with their rewards) (rollout.batch_size: 2 → 4)"),
        (("--resample", "reward.function=f1"), "no recorded rollouts are used again"),
        (("obs.table_rows=2", "sampler.request_timeout_s=9"), "in progress: 1\n"),
    ],
)  # fmt: skip
def test_what_is_used_again_is_said_in_one_line(
    recorded: Path, settings: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resume(recorded, *settings) == 0
    [shown] = [text for text in capsys.readouterr().err.splitlines() if text.startswith("resume ")]
    assert "starts at step 0; journal: " in shown
    assert line in shown + "\n"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("reward.function", "f1"),
        ("reward.error_score", "0.5"),
        ("data.label_key", "prompt"),
        ("data.input_key", "label"),
        ("render.format", "chatml"),
        ("sampler.temperature", "0.5"),
        ("sampler.max_new_tokens", "8"),
        ("rollout.max_turns", "3"),
        ("rollout.max_tokens", "512"),
        ("rollout.reset_seed", "episode"),
    ],
)
def test_recorded_rollouts_are_not_trained_with_another_way_to_sample_or_grade_and_nothing_is_changed(
    recorded: Path, key: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(recorded)
    assert resume(recorded, f"{key}={value}") == 2
    error = capsys.readouterr().err
    assert "recorded rollouts (groups of steps 1 to 1, trained again: 2" in error
    assert f"\n  {key}" in error
    assert "--resample" in error
    assert files_of(recorded) == before


@pytest.mark.parametrize("setting", ["run.seed=3", "tasks.train_split=eval", "learner.lora={rank: 4}", "data.limit=4"])
def test_another_run_is_refused_before_the_first_checkpoint_too(recorded: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?m)^{setting.partition('=')[0]}\S*=.*: the run in {recorded} has "):
        loaded("--resume", f"run.dir={recorded}", setting)


def test_other_data_and_another_reward_in_the_same_file_are_noticed(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(recorded)
    rows = Path("rows.jsonl").read_text()
    Path("rows.jsonl").write_text(rows.replace('"label": "5"', '"label": "6"'))
    assert main(["train", "--resume", f"run.dir={recorded}"]) == 2
    assert "content of data.path: 8 tasks, crc32 " in capsys.readouterr().err
    Path("rows.jsonl").write_text(rows)
    for name in ("mine.py", "helper.py", "package/inner.py"):
        code = Path(name).read_text()
        Path(name).write_text(f"{code}# changed\n")
        assert main(["train", "--resume", f"run.dir={recorded}"]) == 2
        key = "reward.function" if name == "mine.py" else name
        assert f"code of {key}: {Path(name).name} " in capsys.readouterr().err
        Path(name).write_text(code)
    assert resume(recorded) == 0
    Path("helper.py").write_text("ONE = 2.0\n")
    assert files_of(recorded) == before
    assert resume(recorded, "--resample") == 0


def test_another_model_in_the_same_folder_is_noticed(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = loaded("--resume", f"run.dir={recorded}").config
    model = shutil.copytree(resolve_model(config.model.path), recorded / "model")
    before = model_contents(model)
    assert model_contents(resolve_model(config.model.path)) == before
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    (model / "tokenizer.json").write_text("{}")
    (model / "notes.md").write_text("no part of a model")
    after = model_contents(model)
    names = {key for key in before if before[key] != after[key]}
    assert names == {"content of model.path (weights)", "content of model.path (tokenizer.json)"}


def test_other_data_is_refused_after_a_checkpoint_without_recorded_rollouts(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = read_journal(recorded)
    assert journal is not None
    checkpoint = recorded / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps({"step": 1, "position": 2, "keys": journal.keys[0]}))
    (recorded / "journal" / "log.jsonl").unlink()
    assert resume(recorded) == 0
    assert (
        "resumes from step 1: weights, optimizer, random states, 2 tasks of the task order" in capsys.readouterr().err
    )
    Path("rows.jsonl").write_text(Path("rows.jsonl").read_text() + '{"prompt": "8", "label": "8"}\n')
    assert resume(recorded) == 2
    assert f"the steps of {checkpoint} were made with other values" in capsys.readouterr().err
    assert resume(recorded, "--resample") == 0
    shown = capsys.readouterr().err
    assert "(content of data.path: 8 tasks, crc32 " in shown
    assert "a task may come twice or not at all" in shown
    assert f"agentrl train --fork {recorded}@latest begins the order again" in shown
    assert main(["train", "--fork", f"{recorded}@1", "--dry-run"]) == 0
    assert "the order of the tasks begins again" in capsys.readouterr().err


@pytest.mark.parametrize("position", range(3))
def test_damaged_rollouts_are_refused_before_anything_starts(
    recorded: Path, capsys: pytest.CaptureFixture[str], position: int
) -> None:
    """Of two groups that a step has taken, and one that waits."""
    path = recorded / "journal" / "groups" / f"{position:08d}.rollouts"
    data = bytearray(path.read_bytes())
    data[-20] ^= 1
    path.write_bytes(data)
    before = files_of(recorded)
    assert main(["train", "--resume", f"run.dir={recorded}"]) == 2
    error = capsys.readouterr().err
    assert f"{path}, record 2 is not a rollout of the journal, or is damaged" in error
    assert "Add --resample" in error
    assert files_of(recorded) == before
    assert resume(recorded, "--resample") == 0


def test_damaged_metrics_are_refused_before_anything_starts(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "metrics.jsonl").write_text('{"step": 1}\n{"stXp": 2}\n{"step": 3}\n')
    before = files_of(recorded)
    assert main(["train", "--resume", f"run.dir={recorded}"]) == 2
    assert f"{recorded / 'metrics.jsonl'}, line 2 is damaged: it has no step" in capsys.readouterr().err
    assert files_of(recorded) == before


def test_a_journal_that_lacks_a_file_is_refused_and_nothing_is_changed(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "journal" / "groups" / "00000001.rollouts").unlink()
    (recorded / "end.json").write_text("{}")
    before = files_of(recorded)
    assert main(["train", "--resume", f"run.dir={recorded}", "obs.table_rows=3"]) == 2
    assert "00000001.rollouts is missing" in capsys.readouterr().err
    assert files_of(recorded) == before
    assert resume(recorded, "--resample") == 0


def test_a_damaged_newest_checkpoint_is_named_with_the_one_before_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    older, newest = run / "checkpoints" / "step_000001", run / "checkpoints" / "step_000002"
    (newest / "model").mkdir()
    (newest / "model" / "model.safetensors").write_bytes(b"weights")
    write_checksums(newest, without=("state.json",))
    (newest / "model" / "model.safetensors").write_bytes(bytes(7))
    older.mkdir()
    (older / "state.json").write_text("{}")
    for fault in (f"{newest / 'model' / 'model.safetensors'} is damaged", f"{newest / 'state.json'} is not a state"):
        assert main(["train", "--resume", "sampler.backend=embedded"]) == 1
        error = " ".join(capsys.readouterr().err.split())
        assert fault in error
        assert (
            f"The one before it is {older}: move step_000002 away, then agentrl train --resume run.dir={run}" in error
        )
        state = newest / "state.json"
        state.write_bytes(state.read_bytes()[:-20])


def test_a_full_disk_is_named_with_its_file_and_the_command_that_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    words = ["--env", "single_turn", f"data.path={tmp_path}/rows.jsonl", "data.label_key=label", "reward=exact_match"]
    folder = tmp_path / "run"
    with full_disk_after(200):
        assert main(["train", *words, f"run.dir={folder}", "sampler.backend=embedded", "learner.device=cpu"]) == 1
    shown = capsys.readouterr()
    assert f"{folder / 'config.yaml'}: File too large" in shown.err
    assert f"mend this, then resume it with: agentrl train --resume run.dir={folder}" in shown.out


def test_resample_without_resume_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "search_r1", "--resample", "--dry-run"]) == 2
    assert "add --resume" in capsys.readouterr().err


def test_another_environment_by_option_is_refused_too(run: Path) -> None:
    with pytest.raises(ConfigError, match="no run of single_turn under"):
        loaded("--resume", "--env", "single_turn")
    with pytest.raises(ConfigError, match=r"env\.name=single_turn: the run in"):
        loaded("--resume", "--env", "single_turn", f"run.dir={run}")
    assert loaded("--resume", "--env", "search_r1").resumed == run


def test_a_dry_run_shows_the_run_and_the_command_line_as_origins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "--dry-run", "train.steps=40", "algo.kl_coef=0"]) == 0
    shown = capsys.readouterr()
    assert yaml.safe_load(shown.out)["learner"]["optimizer"]["lr"] == 1e-5
    assert f"# {run / 'config.yaml'}" in shown.out
    assert "t0k3n" not in shown.out + shown.err
    assert "train.steps: 9 → 40" in shown.err


def test_a_run_that_goes_on_already_is_refused_with_its_process(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with locked(run):
        assert main(["train", "--resume", "algo.kl_coef=0"]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_a_seed_edited_in_the_configuration_of_the_run_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "config.yaml"
    file.write_text(file.read_text().replace("seed: 7\n", "seed: 8\n", 1))
    assert main(["train", "--resume", "algo.kl_coef=0"]) == 2
    assert "run.seed=8" in capsys.readouterr().err


def test_a_mistyped_folder_starts_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--resume", "run.dir=runs/none"]) == 2
    assert str(run) in capsys.readouterr().err
    assert not Path("runs/none").exists()
