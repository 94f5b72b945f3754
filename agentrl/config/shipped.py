"""The configurations that come with agentrl, in the package ``agentrl_configs``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from agentrl.core.errors import ConfigError

RECIPES = ("algo/", "models/")
"""What the names of shipped recipes begin with."""


def shipped_folder() -> Path:
    """Return the folder that holds the shipped YAML files."""
    spec = find_spec("agentrl_configs")
    assert spec is not None, "agentrl_configs is part of the distribution"
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def find_config(name: str) -> Path:
    """Return the file of ``--config``: a path, or a shipped one by name such as ``search_r1/cpu``.

    Raises:
        ConfigError: neither exists; the message lists what is shipped.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    folder = shipped_folder()
    for candidate in (folder / name, folder / f"{name}.yaml"):
        if candidate.is_file():
            return candidate
    shipped = sorted(str(file.relative_to(folder).with_suffix("")) for file in folder.rglob("*.yaml"))
    raise ConfigError(
        f"--config {name}: no such file, and no shipped configuration of that name; shipped: {', '.join(shipped)}"
    )


def default_config(env: str, *, gpu: bool) -> Path | None:
    """Return the shipped configuration for an environment on this hardware, or None."""
    path = shipped_folder() / env / ("gpu.yaml" if gpu else "cpu.yaml")
    return path if path.is_file() else None


def shipped_name(file: Path) -> str | None:
    """Return the name of a shipped configuration such as ``search_r1/cpu``, or None for another file."""
    folder, path = shipped_folder().resolve(), file.resolve()
    return str(path.relative_to(folder).with_suffix("")) if path.is_relative_to(folder) else None


def is_recipe(file: Path) -> bool:
    """Return whether a file is a shipped recipe, of an algorithm or a model, which is put on top of any preset."""
    return (shipped_name(file) or "").startswith(RECIPES)
