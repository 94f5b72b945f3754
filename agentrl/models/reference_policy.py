"""Weights besides the policy's: the reference policy, frozen roles and the critic; the check that they read its tokens."""

from __future__ import annotations

from pathlib import Path

from agentrl.algo.registry import needs_critic
from agentrl.config.algo import AlgoConfig
from agentrl.config.schema import Config
from agentrl.config.tasks import INITIAL
from agentrl.core.errors import ConfigError
from agentrl.models.load import has_tokenizer, load_tokenizer, read_vocab_size
from agentrl.models.resolve import resolve_model

KEY = "algo.reference"


def resolve_reference(config: Config, *, fetch: bool = True) -> Path | None:
    """Return the folder of the reference policy, or None if the algorithm does not need one.

    Raises:
        MissingError: ``fetch`` is False and the model would have to be downloaded.
        ModelError: the model does not exist; the message names ``algo.reference``.
    """
    if not config.algo.needs_reference:
        return None
    key = KEY if config.algo.reference else "model.path"
    return resolve_model(config.algo.reference or config.model.path, key, fetch=fetch)


def pin_reference(config: Config, start: Path | None = None) -> Config:
    """Return ``config`` with a fixed ``algo.reference``, to be written to the run's folder, with or without a KL term.

    If the configuration does not set it, it is the run's initial policy. A resumed run reads it from its folder, so that a
    KL term switched on at a resume is to the policy that the run started with.

    Args:
        config: configuration of the run.
        start: folder of the run's initial policy; None: that of ``model.path``.

    Raises:
        ModelError: the model does not exist.
    """
    if config.algo.reference is not None:
        return config
    pinned = str(start or resolve_model(config.model.path))
    return config.model_copy(update={"algo": config.algo.model_copy(update={"reference": pinned})})


def check_reference(policy: Path, reference: Path, key: str = KEY, *, trust_remote_code: bool) -> None:
    """Check that the reference, or another model that reads the policy's tokens, and the policy use the same tokens.

    Its vocabulary may be larger than the tokenizer's (models are padded to round sizes), but not smaller; if
    both folders have a tokenizer, all tokens must have the same ids.

    Args:
        policy: Hugging Face folder of the policy.
        reference: Hugging Face folder of the other model.
        key: the configuration key that names it, for messages.
        trust_remote_code: run Python code of the folders if their tokenizers need it (``model.trust_remote_code``).

    Raises:
        ConfigError: they differ; the message has both sizes.
        ModelError: a folder cannot be read.
    """
    if policy == reference:
        return
    policy_ids = _tokens(policy, trusted=trust_remote_code)
    policy_tokens = max(policy_ids.values()) + 1 if policy_ids else read_vocab_size(policy)
    reference_tokens = read_vocab_size(reference)
    if reference_tokens < policy_tokens:
        requirement = (
            f"the tokenizer of {policy} has {policy_tokens}" if policy_ids else f"{policy} has {policy_tokens}"
        )
        raise ConfigError(
            f"{key}={reference}: its vocabulary has {reference_tokens} tokens, {requirement}; "
            f"set {key} to a model with the policy's tokenizer"
        )
    reference_ids = _tokens(reference, key, trusted=trust_remote_code)
    if policy_ids and reference_ids and policy_ids != reference_ids:
        difference = min(policy_ids.items() ^ reference_ids.items(), key=lambda item: item[1])
        raise ConfigError(
            f"{key}={reference}: its tokenizer ({len(reference_ids)} tokens) is not the policy's ({len(policy_ids)} tokens, "
            f"{policy}): they differ from id {difference[1]} on, at {difference[0]!r}; set {key} to a model with the same one"
        )


def resolve_frozen(config: Config, *, fetch: bool = True) -> dict[str, Path]:
    """Return the folders of frozen weights by `RoleConfig.frozen`; ``initial`` are those of ``model.path``.

    Raises:
        MissingError: ``fetch`` is False and a model would have to be downloaded.
        ModelError: a model does not exist; the message names the key.
    """
    folders: dict[str, Path] = {}
    for role, role_config in config.env.roles.items():
        if role_config.frozen == INITIAL:
            folders[INITIAL] = resolve_model(config.model.path, fetch=fetch)
        elif role_config.frozen is not None:
            folders[role_config.frozen] = resolve_model(role_config.frozen, f"env.roles.{role}.frozen", fetch=fetch)
    return folders


def check_frozen(config: Config, policy: Path, *, fetch: bool) -> None:
    """Check that frozen weights read the tokens of the policy in the folder ``policy``.

    Raises:
        ConfigError: they do not.
        MissingError, ModelError: see `resolve_frozen`.
    """
    for name, folder in resolve_frozen(config, fetch=fetch).items():
        role = next(role for role, role_config in config.env.roles.items() if role_config.frozen == name)
        trusted = config.model.trust_remote_code
        check_reference(policy, folder, f"env.roles.{role}.frozen", trust_remote_code=trusted)


def pin_frozen(config: Config, start: Path | None) -> Config:
    """Return ``config`` with the folder in place of ``initial``, as `pin_reference` does.

    Args:
        config: configuration of the run.
        start: folder of the run's initial policy; None: that of ``model.path``.

    Raises:
        ModelError: the model does not exist.
    """
    if all(role.frozen != INITIAL for role in config.env.roles.values()):
        return config
    pinned = str(start or resolve_model(config.model.path))
    roles = {
        name: role.model_copy(update={"frozen": pinned}) if role.frozen == INITIAL else role
        for name, role in config.env.roles.items()
    }
    return config.model_copy(update={"env": config.env.model_copy(update={"roles": roles})})


def _tokens(folder: Path, key: str = "model.path", *, trusted: bool) -> dict[str, int] | None:
    """Return the ids of all tokens of the folder's tokenizer, or None if it has none."""
    if not has_tokenizer(folder):
        return None
    vocabulary: dict[str, int] = load_tokenizer(folder, key, trust_remote_code=trusted).get_vocab()
    return vocabulary


CRITIC_KEY = "algo.critic.path"


def resolve_critic(algo: AlgoConfig, policy: Path, *, fetch: bool = True) -> Path | None:
    """Return the folder of the critic's initial weights, or None if the algorithm needs no critic.

    Args:
        algo: section of the run's configuration.
        policy: folder of the run's initial policy, which the critic starts from without ``algo.critic.path``.
        fetch: whether a model may be downloaded.

    Raises:
        MissingError: ``fetch`` is False and the model would have to be downloaded.
        ModelError: the model does not exist; the message names ``algo.critic.path``.
    """
    if not needs_critic(algo):
        return None
    path = algo.critic.path
    return policy if path is None else resolve_model(path, CRITIC_KEY, fetch=fetch)
