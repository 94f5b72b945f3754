"""The configuration in the folder of a run.

::

    config.yaml     all keys, with `REDACTED` in place of secrets
    secrets.yaml    the secrets alone, mode 0600; absent if there are none
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.layers import Layer, differences
from agentrl.config.load import read_yaml
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact, secret_part
from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_atomically, write_private
from agentrl.core.errors import ConfigError

CONFIG = "config.yaml"
SECRETS = "secrets.yaml"

FIXED = (
    "run.seed",
    "env.name",
    "tasks.name",
    "tasks.options",
    "tasks.train_split",
    "tasks.data_source",
    "data.path",
    "data.limit",
    "data.streaming",
    "data.shuffle_buffer",
    "data.convert",
    "data.max_prompt_tokens",
    "model.path",
    "model.warm_start",
    "model.warm_start_options",
    "learner.lora",
)
"""Keys that a resumed run may not change, of its sources either: with another value it would be another run."""


def save_config(config: Config, folder: Path) -> None:
    """Write the configuration of a run to its folder."""
    tree = config.model_dump(mode="json")
    secrets = secret_part(tree)
    if secrets:
        write_private(folder / SECRETS, dump_yaml(secrets))
    else:
        (folder / SECRETS).unlink(missing_ok=True)
    with write_atomically(folder / CONFIG) as partial:
        partial.write_text(dump_yaml(redact(tree)), encoding="utf-8")


def saved_layers(folder: Path) -> list[Layer]:
    """Return the configuration that `save_config` wrote.

    Raises:
        ConfigError: a file cannot be read.
    """
    return [Layer(str(file), _values(file)) for file in config_files(folder)]


def config_files(folder: Path) -> list[Path]:
    """Return the files that `save_config` wrote, to be given to a command as ``--config``, in this order."""
    secrets = folder / SECRETS
    return [folder / CONFIG, *([secrets] if secrets.is_file() else [])]


def check_resumed(saved: Config, resumed: Config, folder: Path) -> None:
    """Check that a resumed run has the seed, environment, tasks, model and adapters that it started with.

    Raises:
        ConfigError: it has another one; the message names the key and both values.
    """
    faults = []
    if [*saved.sources] != [*resumed.sources]:
        names = [", ".join(config.sources) or "none" for config in (resumed, saved)]
        faults = [
            f"sources: {names[0]}; the run in {folder} has {names[1]}; leave them as they are, or start another run"
        ]
    faults += [
        f"{change.key}={change.after}: the run in {folder} has {change.before}; leave out {change.key}, or start another run"
        for change in differences(saved, resumed)
        if _is_fixed(change.key)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def _is_fixed(key: str) -> bool:
    section, _, source_key = key.partition(".")
    if section == "sources":
        key = source_key.partition(".")[2]
    fixed_keys = (*FIXED, "weight") if section == "sources" else FIXED
    return any(key == fixed_key or key.startswith(f"{fixed_key}.") for fixed_key in fixed_keys)


def _values(file: Path) -> Tree:
    tree = read_yaml(file)
    if not tree:
        raise ConfigError(f"configuration {file}: the file is empty")
    return tree
