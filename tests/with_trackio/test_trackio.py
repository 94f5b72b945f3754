"""trackio, with its database in a folder; and a run of the command line that is resumed, with MLflow as well."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from requires import requires

pytestmark = [pytest.mark.trackio, requires("trackio")]


@pytest.fixture(autouse=True, scope="module")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Have trackio's folder here; trackio reads the variable when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(tmp_path_factory.mktemp("trackio")))
        for name in ("TRACKIO_SERVER_URL", "TRACKIO_SPACE_ID"):
            patch.delenv(name, raising=False)
        yield


def logs(project: str, name: str) -> list[dict[str, object]]:
    """What was logged of the project's only run, in order."""
    from trackio.sqlite_storage import SQLiteStorage

    [record] = SQLiteStorage.get_run_records(project)
    assert record["name"] == name
    return SQLiteStorage.get_logs(project, name, run_id=record["id"])


def test_a_resumed_run_is_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import trackio

    from agentrl.obs.metrics import MetricsLog
    from agentrl.obs.trackers import run_id
    from agentrl.obs.trackio_tracker import open_trackio
    from tests.unit.obs.test_trackers import rollout

    folder = tmp_path / "run"
    folder.mkdir()
    user_run = trackio.init("users", embed=False, auto_log_cpu=False)
    capsys.readouterr()
    notes: list[str] = []
    for step in (1, 2):
        tracker = open_trackio(folder, "tests", config={"run": {"seed": 3}}, note=notes.append)
        assert tracker is not None, notes
        with MetricsLog(folder, trackers=[tracker], table_rows=1, resume_after=step - 1) as log:
            log.write(step, {"train/reward": step / 4, "eval/pass@1": 0.5, "train/loss": float("nan")})
            log.samples(step, [rollout(step)])
    assert capsys.readouterr().out == "", "prints would break the live table"
    user_run.log({"loss": 1.0})  # a run that the script has open goes on
    user_run.finish()
    name = f"run-{run_id(folder)}"
    rows = logs("tests", name)
    assert [row["step"] for row in rows] == [1, 1, 2, 2]
    assert [(row["train/reward"], row["eval/pass@1"]) for row in rows[::2]] == [(0.25, 0.5), (0.5, 0.5)]
    assert "Who?" in str(rows[1]["samples"])
    assert notes == [f"trackio: run {name} of project tests; `trackio show --project tests` shows it"] * 2


def test_what_trackio_refuses_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.obs.trackio_tracker import open_trackio

    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9")
    notes: list[str] = []
    assert open_trackio(tmp_path, "tests", config={}, note=notes.append) is None
    assert notes[0].startswith("the run continues without trackio: ValueError: ")


def test_a_run_of_the_command_line_is_resumed_at_both_trackers(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient
    from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, agentrl

    from agentrl.obs.trackers import run_id
    from tests.integration.test_trackers import write_samples

    write_samples(tmp_path / "samples.jsonl", 3)
    words = [
        "train",
        *ONE_THREAD,
        "--replay",
        "samples.jsonl",
        "run.dir=run",
        "rollout.batch_size=1",
        "train.save_every=1",
    ]
    words += [
        "rollout.n_samples_per_prompt=2",
        "obs.trackio=true",
        "obs.mlflow=sqlite:///mlflow.db",
        "obs.progress=plain",
    ]
    for steps, resume in ((2, []), (3, ["--resume"])):
        end = agentrl(*words, *resume, f"train.steps={steps}", cwd=tmp_path, target=IN_PROCESS_LEARNER, forks=False)
        assert end.returncode == 0, end.stdout + end.stderr
    rows = [row for row in logs("agentrl", f"run-{run_id(tmp_path / 'run')}") if "train/reward" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("agentrl").experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/reward")
    assert [metric.step for metric in history] == [1, 2, 3]
    assert run.info.status == "FINISHED"
