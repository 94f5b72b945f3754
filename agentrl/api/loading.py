"""The configuration of a run that is started, resumed or forked, and its check before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.api.settings import load_environment
from agentrl.config.checks import Rule, endpoint_faults
from agentrl.config.layers import Layer, differences, load_layers, merge_layers, saved_layers
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.obs.console import print_message

if TYPE_CHECKING:
    from agentrl.train.fork import Fork
    from agentrl.train.run import RunStart


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration of a run that is started, resumed or forked."""

    layers: list[Layer]
    config: Config
    resumed: Path | None = None
    """Folder of the run that is resumed."""
    fork: Fork | None = None
    """The checkpoint of another run that it begins with."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


def run_rules(replay: Path | None) -> list[Rule]:
    """Return the rules of a run, in addition to those of its configuration: recorded rollouts need no weight sync."""
    if replay is not None:
        return [endpoint_faults]
    from agentrl.weight_sync.registry import transport_faults

    return [endpoint_faults, transport_faults]


def load_new(layers: list[Layer], rules: Sequence[Rule]) -> Loaded:
    """Return the configuration of a new run.

    Raises:
        ConfigError, UnknownNameError: it is not valid.
    """
    return Loaded(layers, load_environment(layers, rules))


def load_resumed(folder: Path, settings: Sequence[Layer], rules: Sequence[Rule]) -> Loaded:
    """Return the configuration of the run in ``folder`` with ``settings`` on top.

    Raises:
        ConfigError, UnknownNameError: it is not valid, or it would become another run.
    """
    from agentrl.train.resume import check_run_keys

    run_layers = saved_layers(folder)
    saved_config = load_layers(run_layers)
    layers = [*run_layers, *_moved_paths(folder, saved_config), *settings]
    config = load_environment(layers, rules)
    check_run_keys(folder, recorded_keys(config))
    return Loaded(layers, config, folder, notes=_notes(run_layers, saved_config, config))


def load_fork(name: str, settings: Sequence[Layer], rules: Sequence[Rule]) -> Loaded:
    """Return the configuration of a run that begins with the checkpoint ``RUN@STEP`` of another: the other's, with
    ``settings`` on top.

    Raises:
        ConfigError, UnknownNameError: there is no such checkpoint, the configuration is not valid, or the weights of the
            checkpoint cannot be used with it.
    """
    from agentrl.train.fork import Fork, find_fork

    folder, step = find_fork(name)
    run_layers = saved_layers(folder)
    saved_config = load_layers(run_layers)
    layers = [*run_layers, Layer("fork", {"run": {"dir": None}}), *_moved_paths(folder, saved_config), *settings]
    config = load_environment(layers, rules)
    fork = Fork.check(folder, step, recorded_keys(saved_config), recorded_keys(config), config.train.steps)
    return Loaded(layers, config, fork=fork, notes=_notes(run_layers, saved_config, config))


def _moved_paths(folder: Path, saved_config: Config) -> list[Layer]:
    """Return a layer with the path of the policy of a run's warm start, for keys with that of before the run was moved."""
    from agentrl.train.warm_start import FOLDER

    policy = folder.resolve() / FOLDER / "model"

    def is_moved(path: str | None) -> bool:
        return path is not None and Path(path).parts[-2:] == policy.parts[-2:] and not Path(path).exists()

    moved: dict[str, object] = {}
    if is_moved(saved_config.algo.reference):
        moved["algo"] = {"reference": str(policy)}
    roles = saved_config.env.roles.items()
    if frozen := {role: {"frozen": str(policy)} for role, options in roles if is_moved(options.frozen)}:
        moved["env"] = {"roles": frozen}
    return [Layer(f"{folder}, which was moved", moved)] if moved and policy.is_dir() else []


def _notes(run_layers: Sequence[Layer], saved_config: Config, config: Config) -> tuple[str, ...]:
    changes = [str(change) for change in differences(saved_config, config) if change.key != "run.dir"]
    return (f"configuration {run_layers[0].origin}", *changes)


def checked_start(loaded: Loaded, console: Console, replay: Path | None = None, *, discard: bool = False) -> RunStart:
    """Check everything that needs no server, print what is to be known before the start, and return how the run begins.

    Raises:
        UserError: with the value and the key to change.
    """
    from agentrl.train.run import RunStart

    lines, contents, fork = list(loaded.notes), {}, loaded.fork
    if replay is not None:
        from agentrl.train.replay import check_replay

        check_replay(loaded.config, replay)
    else:
        from agentrl.train.preflight import check_run

        plan = check_run(loaded.config)
        contents = plan.contents
        fork = fork and fork.with_contents(contents)
        lines += [f"template {plan.template}", *plan.training, *plan.warnings]
    for line in lines:
        print_message(console, line, "bold yellow" if line.startswith("warning: ") else "")
    return RunStart(loaded.resumed, fork, replay, contents, discard)


def run_dir_setting(layers: Sequence[Layer]) -> str | None:
    """Return ``run.dir`` of settings, or None."""
    section = merge_layers(layers).get("run")
    run_dir = section.get("dir") if isinstance(section, dict) else None
    return None if run_dir is None else str(run_dir)
