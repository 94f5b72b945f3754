"""The ``obs`` section: terminal output, trackers, traces and recorded rollouts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from agentrl.config.base import Section
from agentrl.core.user_code import MAX_SECONDS


class ObsConfig(Section):
    """Terminal output, trackers, traces and recorded rollouts."""

    tensorboard: bool | Literal["auto"] = "auto"
    """Write TensorBoard event files next to ``metrics.jsonl``; ``auto`` does if the package is installed, and says so if not."""
    rollouts: Literal["all", "first", "none"] = "all"
    """Which of a step's rollouts to write to ``rollouts/``: all, the first group of each step, or none."""
    rollout_format: Literal["auto", "jsonl", "records", "parquet"] = "auto"
    """File format of rollouts: JSON lines; compressed records, a fifth as large, which ``agentrl view`` and
    ``agentrl.obs.rollouts.read_rollouts`` read; or parquet, converted from JSON lines at the end of a step. ``auto``: records
    with runner processes (``rollout.runners``), which encode them, otherwise JSON lines."""
    wandb: Literal["off", "online", "offline"] = "off"
    """Weights & Biases: off, online (needs a key), or offline for ``wandb sync`` later."""
    wandb_project: str = "agentrl"
    """The project of the run at Weights & Biases."""
    wandb_entity: str | None = None
    """User or team that the project belongs to; null: the default of the API key."""
    wandb_group: str | None = None
    """Group of the run at Weights & Biases, such as the seeds of one experiment."""
    wandb_tags: list[str] = Field(default_factory=list)
    """Tags of the run at Weights & Biases."""
    trackio: bool = False
    """Log to trackio: in its folder on this machine (``TRACKIO_DIR``), or at the server or Space that ``TRACKIO_SERVER_URL`` or
    ``TRACKIO_SPACE_ID`` names."""
    trackio_project: str = "agentrl"
    """The project of the run at trackio."""
    mlflow: str | None = None
    """Address of MLflow: a tracking server, such as ``http://127.0.0.1:5000``, or a database, such as ``sqlite:///mlflow.db``.
    Its login is in ``MLFLOW_TRACKING_USERNAME`` and ``MLFLOW_TRACKING_PASSWORD``, or ``MLFLOW_TRACKING_TOKEN``."""
    mlflow_experiment: str = "agentrl"
    """The experiment of the run at MLflow."""
    table_rows: int = Field(default=8, ge=0)
    """Rollouts of each step in the trackers' sample tables."""
    progress: Literal["auto", "live", "plain"] = "auto"
    """A live table, plain lines, or ``auto``: a live table in a terminal only."""
    stall_warning_s: float = Field(default=120.0, ge=0, le=MAX_SECONDS)
    """Seconds without progress before the run prints what it waits for; repeated after twice and four times as long. On
    SIGUSR1 it is printed at once. 0: on SIGUSR1 only."""

    trace: bool = False
    """Write spans of steps, phases, episodes, turns, tool calls and requests to ``traces/`` in the run folder, for Perfetto."""
    trace_steps: int = Field(default=20, ge=1)
    """Newest steps whose traces are kept."""
    otlp: str | None = None
    """Address of an OpenTelemetry collector that gets the spans over HTTP, such as ``http://127.0.0.1:4318/v1/traces``. Headers
    are in the environment variable ``OTEL_EXPORTER_OTLP_HEADERS``."""

    @field_validator("mlflow")
    @classmethod
    def _is_tracking_address(cls, value: str | None) -> str | None:
        if value is not None and not value.partition("://")[1]:
            raise ValueError(f"{value!r} is no address of MLflow, such as http://127.0.0.1:5000 or sqlite:///mlflow.db")
        return value

    @field_validator("otlp")
    @classmethod
    def _is_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"{value!r} is no address of a collector: it begins with http:// or https://")
        return value
