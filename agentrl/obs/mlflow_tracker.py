"""MLflow: metrics of a run at a tracking server or in a database."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from agentrl.config.secret_values import hide_secrets
from agentrl.core.extras import require
from agentrl.obs.trackers import markdown, run_id

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

T = TypeVar("T")
RUN_TAG = "agentrl.run"
"""Tag of a run at MLflow with the id of the training run: a resume finds it so."""
BATCH = 100
"""Parameters or metrics of one request: MLflow takes that many parameters."""
PARAMETER_LENGTH = 500
"""Characters of a parameter's value that every version of MLflow stores."""
DEFAULTS = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""Variables of the environment that are set unless they are: MLflow reports nothing, and gives a lost server up in time."""


def metric_name(key: str) -> str:
    """Return a metric's name at MLflow, which takes no ``@`` and ``=``: ``eval/pass@1`` is ``eval/pass_at_1``.

    Other characters that it refuses are ``_``: ``eval/reward/hops=2`` is ``eval/reward/hops_2``.
    """
    return re.sub(r"[^\w\-. :/]", "_", key.replace("@", "_at_"), flags=re.ASCII)


class Mlflow:
    """A run at MLflow; opened by `open_mlflow`. One thread sends what is logged, in order."""

    def __init__(self, client: MlflowClient, mlflow_run_id: str, note: Callable[[str], None]) -> None:
        self._client = client
        self._run_id = mlflow_run_id
        self._note = note
        self._failed = False
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="mlflow")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics, under the names of `metric_name`. MLflow keeps both values of a step that a resumed run repeats."""
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(metric_name(key), value, now_ms, step) for key, value in metrics.items()]
        for batch in _batches(rows):
            self._send(self._client.log_batch, self._run_id, metrics=batch)

    def samples(self, step: int, table: Sequence[Sequence[object]]) -> None:
        """Log the sample table of a step as Markdown, among the artifacts."""
        self._send(self._client.log_text, self._run_id, markdown(table), f"samples/step_{step:06d}.md")

    def close(self) -> None:
        """Send pending data, and end the run at MLflow."""
        self._send(self._client.set_terminated, self._run_id)
        self._sender.shutdown()

    def _send(self, request: Callable[..., object], *arguments: object, **options: object) -> None:
        self._sender.submit(self._request, request, *arguments, **options)

    def _request(self, request: Callable[..., object], *arguments: object, **options: object) -> None:
        if self._failed:
            return
        try:
            request(*arguments, **options)
        except Exception as error:  # any error: a tracker that fails must not end the run
            self._failed = True
            self._note(f"MLflow logs nothing more of this run: {hide_secrets(f'{type(error).__name__}: {error}')}")


def open_mlflow(
    folder: Path, address: str, experiment: str, *, config: Mapping[str, object], note: Callable[[str], None]
) -> Mlflow | None:
    """Start a run at MLflow, or resume that of ``folder``.

    Returns None, and calls ``note``, if MLflow cannot be reached: the training run continues without it.

    Args:
        folder: folder of the run, whose name is that of the run at MLflow.
        address: of the tracking server or database.
        experiment: at MLflow; it is made if it does not exist.
        config: configuration to log, by full key.
        note: prints a message for the user.

    Raises:
        MissingError: the package is not installed.
    """
    shown_address = hide_secrets(address)
    require("mlflow", f"obs.mlflow={shown_address}")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow.tracking import MlflowClient

    try:
        client = MlflowClient(tracking_uri=address)
        mlflow_run_id = _start_run(client, experiment, folder, config)
    except Exception as error:  # any error: a tracker that fails must not end the run
        message = hide_secrets(f"{type(error).__name__}: {error}")
        note(f"the run continues without MLflow (obs.mlflow={shown_address}): {message}")
        return None
    note(f"MLflow: run {folder.resolve().name} of experiment {experiment} at {shown_address}")
    return Mlflow(client, mlflow_run_id, note)


def _start_run(client: MlflowClient, experiment: str, folder: Path, config: Mapping[str, object]) -> str:
    """Return MLflow's id of the run, which has been started or continues."""
    from mlflow.entities import Param

    own_id = run_id(folder)
    existing = client.get_experiment_by_name(experiment)
    experiment_id = client.create_experiment(experiment) if existing is None else existing.experiment_id
    runs = client.search_runs([experiment_id], filter_string=f"tags.`{RUN_TAG}` = '{own_id}'", max_results=1)
    if runs:
        client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)
    run = client.create_run(experiment_id, run_name=folder.resolve().name, tags={RUN_TAG: own_id})
    # Parameters are those of the start: MLflow does not change them.
    for batch in _batches([Param(metric_name(key), value[:PARAMETER_LENGTH]) for key, value in _leaves(config)]):
        client.log_batch(run.info.run_id, params=batch)
    return str(run.info.run_id)


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the values of a configuration by full key, texts as they are and others as JSON."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value)


def _batches(rows: Sequence[T]) -> Iterator[Sequence[T]]:
    for start in range(0, len(rows), BATCH):
        yield rows[start : start + BATCH]
