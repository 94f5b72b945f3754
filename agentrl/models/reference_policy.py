"""The reference policy of a run: which folder it is, and whether it reads the policy's tokens."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.resolve import resolve_model

KEY = "algo.reference"


def resolve_reference(config: Config, *, fetch: bool = True) -> Path | None:
    """Return the folder of the reference policy, or None where the algorithm needs none.

    Raises:
        MissingError: without ``fetch``: it would have to be fetched from the hub.
        ModelError: there is no such model; the message names ``algo.reference``.

    """
    if not config.algo.needs_reference:
        return None
    key = KEY if config.algo.reference else "model.path"
    return resolve_model(config.algo.reference or config.model.path, key, fetch=fetch)


def pin_reference(config: Config, resumed: Path | None, start: Path | None = None) -> Config:
    """Return ``config`` with ``algo.reference`` set for good, to be written into the run's folder.

    What the configuration leaves open is, in this order: what a resumed run was pinned to when it started, the
    policy it started with, the present ``start``. So a resumed run keeps its reference though ``model.path`` may have
    changed since.

    Args:
        config: the present configuration.
        resumed: the folder of the run that goes on from a checkpoint, with its earlier ``config.yaml``; None starts anew.
        start: the folder of the policy that the run starts with; None: that of ``model.path``.

    Raises:
        ModelError: there is no such model.

    """
    if not config.algo.needs_reference or config.algo.reference is not None:
        return config
    earlier = _earlier(resumed / "config.yaml") if resumed else None
    pinned = earlier or str(start or resolve_model(config.model.path))
    return config.model_copy(update={"algo": config.algo.model_copy(update={"reference": pinned})})


def _earlier(file: Path) -> str | None:
    """Return the reference, or else the model, in a configuration that an earlier start wrote."""
    if not file.is_file():
        return None
    written = yaml.safe_load(file.read_text(encoding="utf-8"))
    found: str = written["algo"].get("reference") or written["model"]["path"]
    return found


def check_reference(policy: Path, reference: Path) -> None:
    """Refuse a reference that reads other tokens than the policy.

    Its vocabulary may be larger than the tokenizer (models are padded to round numbers), not smaller; where both folders
    hold a tokenizer, the two must give every token the same id.

    Args:
        policy: a Hugging Face folder.
        reference: another.

    Raises:
        ConfigError: they do not fit; the message has both numbers.
        ModelError: a folder cannot be read.

    """
    if policy == reference:
        return
    tokens = _tokens(policy)
    wanted = max(tokens.values()) + 1 if tokens else _vocabulary(policy)
    held = _vocabulary(reference)
    if held < wanted:
        what = f"the tokenizer of {policy} has {wanted}" if tokens else f"{policy} has {wanted}"
        raise ConfigError(
            f"{KEY}={reference}: its vocabulary has {held} tokens, {what}; set {KEY} to a model with the policy's "
            "tokenizer"
        )
    others = _tokens(reference)
    if tokens and others and tokens != others:
        odd = min(tokens.items() ^ others.items(), key=lambda item: item[1])
        raise ConfigError(
            f"{KEY}={reference}: its tokenizer ({len(others)} tokens) is not the policy's ({len(tokens)} tokens, "
            f"{policy}): they differ from id {odd[1]} on, at {odd[0]!r}; set {KEY} to a model with the same one"
        )


def _tokens(folder: Path) -> dict[str, int] | None:
    """Return the ids of all tokens of the folder's tokenizer, or None where it has none."""
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return None
    from agentrl.models.load import load_tokenizer  # takes seconds to import, and most runs need it not

    vocabulary: dict[str, int] = load_tokenizer(folder).get_vocab()
    return vocabulary


def _vocabulary(folder: Path) -> int:
    """Return the size of the model's vocabulary."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        size: int = config.get("text_config", config)["vocab_size"]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{folder}/config.json gives no vocab_size to compare with {KEY}: {error!r}") from error
    return size
