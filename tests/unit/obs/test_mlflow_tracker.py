"""MLflow: the real client, with files, and in `make test-long` with a database: to make one takes four seconds of CPU."""

from pathlib import Path

import pytest
from requires import requires

from agentrl.obs import mlflow_tracker
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.mlflow_tracker import Mlflow, metric_name, open_mlflow
from agentrl.obs.trackers import run_id
from tests.unit.obs.test_trackers import rollout


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in mlflow_tracker.DEFAULTS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)  # artifacts are next to the database


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("train/reward", "train/reward"),
        ("eval/pass@1", "eval/pass_at_1"),
        ("eval/reward/hops=2", "eval/reward/hops_2"),
        ("train/kl/policy=a b", "train/kl/policy_a b"),
        ("eval/größe", "eval/gr__e"),
    ],
)
def test_names(key: str, name: str) -> None:
    assert metric_name(key) == name


@requires("mlflow")
@pytest.mark.parametrize("store", ["file://{}/mlflow", pytest.param("sqlite:///{}/mlflow.db", marks=pytest.mark.long)])
def test_a_resumed_run_is_the_same_run(tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    address, folder = store.format(tmp_path), tmp_path / "run"
    folder.mkdir()
    notes: list[str] = []
    for step, seed in ((1, 3), (2, 4)):
        tracker = open_mlflow(
            folder, address, "seeds", config={"run": {"seed": seed, "dir": "x" * 600}}, note=notes.append
        )
        assert tracker is not None, notes
        with MetricsLog(folder, trackers=[tracker], table_rows=1, resume_after=step - 1) as log:
            log.write(step, {"train/reward": step / 4, "eval/pass@1": 0.5, "train/loss": float("nan")})
            log.samples(step, [rollout(step)])
    client = MlflowClient(tracking_uri=address)
    [run] = client.search_runs([client.get_experiment_by_name("seeds").experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    assert run.data.tags[mlflow_tracker.RUN_TAG] == run_id(folder)
    assert run.data.params["run.seed"] == "3"
    assert run.data.params["run.dir"] == "x" * 500
    rewards = client.get_metric_history(run.info.run_id, "train/reward")
    assert [(metric.step, metric.value) for metric in rewards] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["eval/pass_at_1"] == 0.5
    names = [file.path for file in client.list_artifacts(run.info.run_id, "samples")]
    assert names == ["samples/step_000001.md", "samples/step_000002.md"]
    assert notes == [f"MLflow: run run of experiment seeds at {address}"] * 2


@requires("mlflow")
def test_an_address_without_mlflow_is_reported_and_the_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    notes: list[str] = []
    assert open_mlflow(tmp_path, "http://me:secret@127.0.0.1:9", "a", config={}, note=notes.append) is None
    assert notes[0].startswith("the run continues without MLflow (obs.mlflow=http://<redacted>@127.0.0.1:9): ")
    assert "secret" not in notes[0]


def test_a_server_that_is_lost_is_reported_once() -> None:
    class Lost:
        requests = 0

        def set_terminated(self, mlflow_run_id: str) -> None:
            self.requests += 1
            raise OSError("no route to 127.0.0.1")

        def log_text(self, mlflow_run_id: str, text: str, file: str) -> None:
            self.set_terminated(mlflow_run_id)

    client, notes = Lost(), []
    tracker = Mlflow(client, "id", notes.append)
    tracker.samples(1, [])
    tracker.samples(2, [])
    tracker.close()
    assert notes == ["MLflow logs nothing more of this run: OSError: no route to 127.0.0.1"]
    assert client.requests == 1
