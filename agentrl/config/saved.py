"""The configuration in the folder of a run.

::

    config.yaml     all keys, with `REDACTED` in place of secrets
    secrets.yaml    the secrets alone, mode 0600; absent if there are none
"""

from __future__ import annotations

from pathlib import Path

from agentrl.config.layers import Layer
from agentrl.config.load import read_yaml
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact, secret_part
from agentrl.config.yaml_text import dump_yaml
from agentrl.core.atomic_files import write_atomically, write_private
from agentrl.core.errors import ConfigError

CONFIG = "config.yaml"
SECRETS = "secrets.yaml"


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


def _values(file: Path) -> Tree:
    tree = read_yaml(file)
    if not tree:
        raise ConfigError(f"configuration {file}: the file is empty")
    return tree
