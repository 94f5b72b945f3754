"""Packages that only an extra of agentrl installs: whether one is there, and the message if it is not."""

from __future__ import annotations

from importlib.util import find_spec

from agentrl.core.errors import MissingError

DISTRIBUTION = "agentrl-framework"
"""The name at a package index. ``agentrl`` there is another project; the import and the command are ``agentrl``."""

EXTRAS = {
    "PIL": "images",
    "datasets": "datasets",
    "docker": "docker",
    "faiss": "e5",
    "gguf": "models",
    "huggingface_hub": "train",
    "jinja2": "train",
    "matplotlib": "plots",
    "mcp": "mcp",
    "megatron": "megatron",
    "mlflow": "mlflow",
    "opentelemetry": "otlp",
    "pandas": "pandas",
    "peft": "lora",
    "pyarrow": "parquet",
    "ray": "train",
    "reasoning_gym": "reasoning-gym",
    "renderers": "renderers",
    "safetensors": "train",
    "sglang": "sglang",
    "sglang_router": "router",
    "tensorboard": "tensorboard",
    "textarena": "textarena",
    "tokenizers": "train",
    "torch": "train",
    "trackio": "trackio",
    "transformers": "train",
    "wandb": "wandb",
}
"""The extra that installs a package, by the name under which it is imported."""


def is_installed(package: str) -> bool:
    """Return whether ``package`` can be imported, without importing it."""
    return find_spec(package) is not None


def require(package: str, feature: str) -> None:
    """Check that a package of an extra is installed, before it is imported.

    Args:
        package: a key of `EXTRAS`.
        feature: what needs it, with the key that asks for it, such as ``obs.rollout_format=parquet``.

    Raises:
        MissingError: the package is not installed; the message has the command that installs it.
    """
    if not is_installed(package):
        raise not_installed_error(package, feature)


def not_installed_error(package: str, feature: str) -> MissingError:
    """Return the error for a package of `EXTRAS` that is not installed; see `require`."""
    return MissingError(f"{feature} needs the package {package}: {install_command(package)}")


def install_command(package: str) -> str:
    """Return the command that installs a package of `EXTRAS`. Example: ``pip install 'agentrl-framework[docker]'``."""
    return f"pip install '{DISTRIBUTION}[{EXTRAS[package]}]'"


def missing_extra_error(error: ModuleNotFoundError, feature: str) -> MissingError | None:
    """Return the error of an import that failed for lack of an extra, or None if it failed for another reason."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS or is_installed(package):
        return None
    return not_installed_error(package, feature)
