"""Weights & Biases, where it is wanted and installed."""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from agentrl.core.errors import ConfigError
from agentrl.obs.trackers import COLUMNS

Mode = Literal["online", "offline"]

ID_FILE = "wandb_run_id"
"""In the run's folder: the id under which a resumed run goes on."""
STEP = "step"
"""The axis of all figures. W&B's own count only grows, and would refuse the steps that a resumed run does again."""


class Wandb:
    """One run at Weights & Biases, or on disk for ``wandb sync``; made by `open_wandb`."""

    def __init__(self, run: Any, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Send figures."""
        self._send({STEP: step, **figures})

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Send the table; W&B shows that of every step."""
        import wandb

        lines = [[step, *line] for line in table]
        self._send({STEP: step, "samples": wandb.Table(columns=[STEP, *COLUMNS], data=lines)})

    def close(self) -> None:
        """Send what is left and end W&B's own process."""
        import wandb

        if self._run is not None:
            self._run.finish()
        wandb.teardown()

    def _send(self, data: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(dict(data))
        except Exception as error:  # of any kind: a tracker that fails must not end hours of training
            self._note(f"Weights & Biases gets nothing more of this run: {type(error).__name__}: {error}")
            self._run = None


def open_wandb(
    folder: Path,
    *,
    mode: Mode,
    project: str,
    config: Mapping[str, Any],
    note: Callable[[str], None],
) -> Wandb | None:
    """Begin the run, or go on with the one whose id lies in ``folder``; None (and a note) where it is to go online
    but there is no key, or where ``WANDB_MODE`` switches it off.

    Args:
        folder: the run's; W&B's files lie in ``folder/wandb``.
        mode: ``WANDB_MODE`` of the environment goes before it.
        project: the project's name.
        config: what is shown as the run's configuration.
        note: tells the user.

    Raises:
        ConfigError: the package is not installed.

    """
    if find_spec("wandb") is None:
        raise ConfigError(
            f"obs.wandb={mode}, but wandb is not installed here: pip install 'agentrl[wandb]', or set obs.wandb=off"
        )
    wanted = os.environ.get("WANDB_MODE", mode)
    if wanted not in ("online", "offline"):
        note(f"Weights & Biases is switched off by WANDB_MODE={wanted}")
        return None
    if wanted == "online" and not has_key():
        note("obs.wandb=online, but there is no key: the run goes on without Weights & Biases. "
             "Set WANDB_API_KEY or type `wandb login`, or set obs.wandb=offline")  # fmt: skip
        return None
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return Wandb(_begin(folder, "online" if wanted == "online" else "offline", project, config, note), note)


def has_key() -> bool:
    """Return whether a key for W&B lies in the environment or in the netrc file; nothing is sent."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _begin(folder: Path, mode: Mode, project: str, config: Mapping[str, Any], note: Callable[[str], None]) -> Any:
    import wandb

    file = folder / ID_FILE
    run_id = file.read_text(encoding="utf-8").strip() if file.is_file() else secrets.token_hex(4)
    file.write_text(run_id + "\n", encoding="utf-8")
    try:
        run = _init(folder, mode, project, config, run_id)
    except wandb.errors.Error as error:
        note(f"Weights & Biases cannot be reached ({error}): the run is kept offline, for `wandb sync` later")
        mode = "offline"
        run = _init(folder, mode, project, config, run_id)
    run.define_metric("*", step_metric=STEP)
    note(f"Weights & Biases: {run.url if mode == 'online' else folder / 'wandb'}")
    return run


def _init(folder: Path, mode: Mode, project: str, config: Mapping[str, Any], run_id: str) -> Any:
    import wandb

    # Its own console capture would break the live table.
    chosen: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
    if mode == "offline" and "x_disable_machine_info" in wandb.Settings.model_fields:
        chosen["x_disable_machine_info"] = True  # it would ask for a cloud's metadata over the network
    return wandb.init(
        project=project,
        dir=str(folder),
        id=run_id,
        name=folder.resolve().name,
        resume="allow",
        mode=mode,
        config=dict(config),
        settings=wandb.Settings(**chosen),
    )
