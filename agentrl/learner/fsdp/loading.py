"""Loading of Hugging Face folders as models of the learner, and probes of what their architectures do."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import nn
from torch.distributed.fsdp import FSDPModule

from agentrl.batch.microbatch import MicroBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError, ModelError
from agentrl.learner.attention import IMPLEMENTATION
from agentrl.learner.context_parallel import Context, join_context
from agentrl.learner.device import compiles, recompute_mode, resolve_device, uses_bfloat16
from agentrl.learner.fsdp.experts import (
    accept_replayed_experts,
    expert_modules,
    pass_experts_by_layer,
    use_grouped_products,
)
from agentrl.learner.fsdp.lora import add_adapters, fill_adapters
from agentrl.learner.fsdp.model import PackedModel, PolicyModel, ValueModel
from agentrl.learner.fsdp.sharding import RankMesh, reshard, shard
from agentrl.learner.fsdp.weights import allocate, fill, untie_different
from agentrl.learner.images import image_inputs
from agentrl.learner.layers import decoder_layers, image_weights, prepare_layers, vision_blocks, vision_tower
from agentrl.models.batch_invariant import make_batch_invariant
from agentrl.models.freezing import frozen_names, matching_names
from agentrl.models.load import empty_model
from agentrl.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = logging.getLogger(__name__)
_PROBE_T, _OTHER_T = torch.arange(1, 10), torch.arange(7, 0, -1)
"""Token ids of the rows that probe a model; float8 products want 16 in all."""
_PROBE_WINDOW = 4
"""Tokens of a window in which the rows attend; fewer than they have."""
_ROUNDING, _ROUNDING_BFLOAT16 = 1e-4, 0.1
"""Maximum absolute and relative difference of log-probabilities that counts as rounding."""


_FAULTS_OF_MACHINES = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)
"""RuntimeErrors that no architecture causes; gloo raises plain ones."""


def load_policy(
    folder: Path,
    config: LearnerConfig,
    device: torch.device,
    mesh: RankMesh | None,
    key: str = "model.path",
    context: Context | None = None,
) -> PolicyModel:
    """Load ``folder`` in float32 with packed attention, each rank its shards, and check the model's logits. Collective.

    If layers of the model mix packed rows, such as convolutions, Mamba or linear attention, every row gets a separate bin.

    Args:
        folder: a Hugging Face model folder.
        config: of the learner.
        device: of this rank.
        mesh: of the ranks; None for one rank, which has whole weights.
        key: configuration key of the folder, for messages.
        context: that of the policy, for a reference. None: joined as configured.

    Raises:
        ConfigError: see `frozen_names`; layers mix rows, with ``learner.context_parallel`` above 1.
        ModelError: the folder cannot be loaded, or the architecture does more than a head on hidden states.
    """
    policy = PolicyModel(empty_model(folder, IMPLEMENTATION, key=key), config.logits_chunk)
    _load(policy, folder, config, device, mesh, key, context)
    return policy


def load_critic(
    folder: Path, config: LearnerConfig, device: torch.device, mesh: RankMesh | None, key: str = "algo.critic.path"
) -> ValueModel:
    """Load ``folder`` as a critic: as `load_policy`, with a value head, which is one of zeros if the folder has none.

    Raises:
        ConfigError: layers mix rows, with ``learner.context_parallel`` above 1.
        ModelError: the folder cannot be loaded, or transformers has no such head for the architecture.
    """
    critic = ValueModel(empty_model(folder, IMPLEMENTATION, values=True, key=key), config.logits_chunk)
    _load(critic, folder, config, device, mesh, key, None)
    return critic


def load_frozen(
    folder: Path,
    config: LearnerConfig,
    device: torch.device,
    mesh: RankMesh | None,
    key: str,
    context: Context | None,
) -> PolicyModel:
    """Load ``folder`` as a frozen model that only scores tokens; see `load_policy`."""
    frozen = load_policy(folder, config.model_copy(update={"freeze": [], "lora": None}), device, mesh, key, context)
    frozen.eval()
    frozen.requires_grad_(False)
    return frozen


def _load(
    model: PackedModel,
    folder: Path,
    config: LearnerConfig,
    device: torch.device,
    mesh: RankMesh | None,
    key: str,
    context: Context | None,
) -> None:
    """Load a model, check it, and let it compute micro-batches together with the ranks of ``context``, or of a new one."""
    model.key = key
    with _named_errors(model, folder, key):
        model.images = image_inputs(model.hf, folder, key)
        _fill(model, folder, config, device, mesh, key)
    with _named_errors(model, folder, key), _probing(model, config):
        model.separates_rows = _selects_keys(model.hf) or _mixes_rows(model)
        if isinstance(model, PolicyModel):
            _check_head(model, folder, key)
            _check_rows(model, folder, key)
    if config.context_parallel > 1 and model.separates_rows:
        raise ConfigError(
            f"learner.context_parallel={config.context_parallel}: layers of {type(model.hf).__name__} ({key}={folder}) that "
            "are not attention need all tokens of a row on one rank; set learner.context_parallel=1"
        )
    model.context = context or join_context(config.context_parallel, config.step_timeout_s)


def _fill(
    model: PackedModel, folder: Path, config: LearnerConfig, device: torch.device, mesh: RankMesh | None, key: str
) -> None:
    """Set a model on `meta` up for training, shard it, and read its weights."""
    files, tower = WeightFiles(folder, key), vision_tower(model.hf)
    untie_different(model.hf, files)
    if config.lora is not None:
        add_adapters(model.hf, config.lora)
    parameters = dict(model.hf.named_parameters())
    of_critic = isinstance(model, ValueModel)
    frozen = (
        matching_names(image_weights(model.hf), config.freeze) if of_critic else frozen_names(parameters, config.freeze)
    )
    for name in frozen:
        parameters[name].requires_grad_(False)
    use_grouped_products(model.hf)
    _name_windows(model.hf)
    if _selects_keys(model.hf):
        _prepare_indexers(model.hf)
    if tower is not None:
        tower.set_attn_implementation("sdpa")  # of whole images, which are no rows
    model.hf.train()
    _disable_dropout(model.hf)
    model.autocast, model.compiled = uses_bfloat16(config), compiles(config)
    layers = decoder_layers(model.hf)
    if config.batch_invariant:
        make_batch_invariant(model.hf, "learner.batch_invariant")
        model.batch_invariant = True
    if config.fp8:
        from agentrl.learner.fsdp.fp8 import convert_linears

        convert_linears(layers)
    accept_replayed_experts(model.hf)
    for layer in layers:
        # A compiler cannot take exchanges whose sizes the host waits for.
        exchanges = config.expert_parallel > 1 and bool(expert_modules(layer))
        prepare_layers([layer], compiled=model.compiled and not exchanges, recompute=recompute_mode(config))
    prepare_layers(vision_blocks(model.hf), compiled=False, recompute=recompute_mode(config))
    pass_experts_by_layer(model.hf)
    if resolve_device(config) == "cuda" and model.autocast:
        model.hf.get_input_embeddings().register_forward_hook(_as_bfloat16)
    if mesh is not None:
        shard(model, mesh, config)
    allocate(model, device)
    if config.lora is not None:
        fill_adapters(model.hf, config.lora, seed=0)
    fill(model.hf, folder, files, values=of_critic, key=key)


def _name_windows(hf: PreTrainedModel) -> None:
    """Give attention of Phi-3.5-MoE its sliding window, which transformers puts into the mask; packed attention takes none."""
    config = hf.config.get_text_config()
    if config.model_type == "phimoe":
        for module in hf.modules():
            if hasattr(module, "num_key_value_groups"):
                setattr(module, "sliding_window", config.sliding_window)  # noqa: B010  modules are typed as tensors


def _selects_keys(hf: PreTrainedModel) -> bool:
    """Return whether an indexer selects the keys of each query: sparse attention of DeepSeek V3.2 and GLM-5."""
    return any(name.endswith(".indexer") for name, _ in hf.named_modules())


def _prepare_indexers(hf: PreTrainedModel) -> None:
    """Have sparse attention computed by transformers, over one row a bin, and freeze the indexers.

    Selected keys are scattered into a mask over all keys of a row. No gradient reaches an indexer through the selection.
    """
    hf.set_attn_implementation("sdpa")
    for name, parameter in hf.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)


def _as_bfloat16(module: nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
    """Cast a single rank's embeddings to bfloat16, as several ranks gather weights in bfloat16."""
    return embeddings.to(torch.bfloat16) if torch.is_autocast_enabled(embeddings.device.type) else embeddings


@contextmanager
def _named_errors(model: PackedModel, folder: Path, key: str) -> Iterator[None]:
    """Raise errors of an architecture's code, which has other modules or arguments than expected, with the folder's key."""
    try:
        yield
    except _FAULTS_OF_MACHINES:
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        words = str(error).strip().splitlines() or ["no message"]
        if "gloo" in words[0]:
            raise
        raise ModelError(
            f"{key}={folder}: the fsdp learner cannot compute {type(model.hf).__name__}: {type(error).__name__}: {words[0]}; "
            "choose another"
        ) from error


@contextmanager
def _probing(model: PackedModel, config: LearnerConfig) -> Iterator[None]:
    """Compute without compilation, and in float32 if this rank has full float32 weights: one rank without float8."""
    autocast, compiled = model.autocast, model.compiled
    model.autocast = autocast and (isinstance(model, FSDPModule) or config.fp8)
    model.compiled = False
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
    model.autocast, model.compiled = autocast, compiled


def _disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0, and let routers choose experts without noise: an engine samples without either."""
    for module in model.modules():
        if any("jitter" in name for name in vars(module)):
            module.training = False  # that of its experts stays
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("drop")):
                setattr(module, name, 0.0)


def _mixes_rows(model: PackedModel) -> bool:
    """Return whether a row's hidden states depend on the packed row before it.

    They do if they have a gradient with respect to its embeddings; exactly 0 shows that no layer carries
    anything over, in any precision. Differences of hidden states would show rounding too.
    """
    packed, split = _pack_rows(_PROBE_T, _OTHER_T), len(_PROBE_T)
    inputs: list[torch.Tensor] = []

    def record_embeddings(module: nn.Module, arguments: object, output: torch.Tensor) -> torch.Tensor:
        inputs.append(output.detach().requires_grad_())
        return inputs[-1]

    hook = model.hf.get_input_embeddings().register_forward_hook(record_embeddings)
    try:
        with torch.enable_grad(), _last_hidden(model) as hidden:
            model(packed, _score_positions(packed), 1.0)
    finally:
        hook.remove()
    [states] = hidden
    second_row = states.flatten(0, -2)[split:]
    weights = torch.arange(second_row.numel(), device=states.device).view_as(second_row).cos()
    [gradient] = torch.autograd.grad((second_row.float() * weights).sum(), inputs[:1])
    reshard(model)
    mixes = bool(gradient.flatten(0, -2)[:split].any())
    if mixes:
        _log.warning(
            "%s mixes packed rows: the learner computes one row a bin, with more padding", type(model.hf).__name__
        )
    return mixes


@torch.no_grad()
def _check_head(policy: PolicyModel, folder: Path, key: str) -> None:
    """Check that the model's logits are its last hidden states times the head's weight, exactly.

    Raises:
        ModelError: the architecture scales or caps hidden states or logits, also in its head.
    """
    packed = _pack_rows(_PROBE_T, _OTHER_T)
    head_inputs: list[torch.Tensor] = []
    head_is_linear: list[bool] = []
    fake_logits: list[torch.Tensor] = []

    def replace_logits(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        head_inputs.append(inputs[0])
        head: Any = module
        product = F.linear(inputs[0], head.weight, head.bias)
        head_is_linear.append(output.dtype is product.dtype and torch.allclose(output, product, _ROUNDING, _ROUNDING))
        # Small integers, which every dtype represents: a cap or a factor changes them, however small the logits are.
        fake_logits.append((torch.arange(output.numel(), device=output.device) % 128 - 64).view_as(output).float())
        return fake_logits[-1]

    policy(packed, _score_positions(packed), 1.0)  # gathers the weights that are outside of layers
    hook = policy.head.register_forward_hook(replace_logits)
    try:
        kind = policy.hf.device.type
        with _last_hidden(policy) as hidden, torch.autocast(kind, torch.bfloat16, enabled=policy.autocast):
            logits = policy.hf(**_inputs(packed, policy)).logits
    finally:
        hook.remove()
        reshard(policy)
    same_inputs = bool(head_inputs) and torch.equal(head_inputs[0], hidden[0])
    if not (same_inputs and all(head_is_linear) and torch.equal(logits.float(), fake_logits[0])):
        raise ModelError(
            f"{key}={folder}: {type(policy.hf).__name__} changes logits in or after its head, which the fsdp learner lacks; "
            "choose another"
        )


@torch.no_grad()
def _check_rows(policy: PolicyModel, folder: Path, key: str) -> None:
    """Compare log-probabilities of packed rows with those of each row alone, with the architecture's own attention.

    Rows are longer than sliding windows, which are made small for it.

    Raises:
        ModelError: they differ: the architecture ignores positions, or its attention, or its routing in training, is another.
    """
    packed = _pack_rows(_PROBE_T, _OTHER_T)
    with _small_windows(policy.hf):
        with _last_hidden(policy) as hidden:
            packed_N = policy(packed, _score_positions(packed), 1.0)[0]
        rows = [_pack_rows(tokens_T) for tokens_T in (_PROBE_T, _OTHER_T)]
        with _own_inference(policy.hf):
            expected_N = torch.cat([policy(row, _score_positions(row), 1.0)[0] for row in rows])
    reshard(policy)
    rough = policy.autocast or hidden[0].dtype is not torch.float32
    limit = _ROUNDING_BFLOAT16 if rough else _ROUNDING
    if not torch.allclose(packed_N, expected_N, atol=limit, rtol=limit):
        difference = float((packed_N - expected_N).abs().max())
        raise ModelError(
            f"{key}={folder}: {type(policy.hf).__name__} gives packed rows other log-probabilities than each row alone with its "
            f"own attention (by up to {difference:.2g} nats), so the fsdp learner cannot train it; choose another"
        )


@contextmanager
def _own_inference(hf: PreTrainedModel) -> Iterator[None]:
    """Compute as transformers does without training: with the architecture's own attention."""
    training = {module: module.training for module in hf.modules()}
    models = [hf] if (tower := vision_tower(hf)) is None else [hf, tower]
    implementations = [str(model.config._attn_implementation) for model in models]
    hf.train(False)
    hf.set_attn_implementation("eager")
    try:
        yield
    finally:
        for model, implementation in zip(models, implementations, strict=True):
            model.set_attn_implementation(implementation)
        for module, is_training in training.items():
            module.training = is_training


@contextmanager
def _small_windows(hf: PreTrainedModel) -> Iterator[None]:
    """Give layers with a sliding window or chunks in attention small ones, if they are smaller than the longest row."""
    config = hf.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None) or sys.maxsize
    owners = [config, *hf.modules()]
    sizes = [
        (owner, name, vars(owner).get(name)) for owner in owners for name in ("sliding_window", "attention_chunk_size")
    ]
    small = [
        (owner, name, size) for owner, name, size in sizes if isinstance(size, int) and _PROBE_WINDOW < size < limit
    ]
    for owner, name, _ in small:
        setattr(owner, name, _PROBE_WINDOW)
    try:
        yield
    finally:
        for owner, name, size in small:
            setattr(owner, name, size)


@contextmanager
def _last_hidden(model: PackedModel) -> Iterator[list[torch.Tensor]]:
    """Record the last hidden states of the passes in the block."""
    hidden_states: list[torch.Tensor] = []
    hook = model.body.register_forward_hook(lambda *arguments: hidden_states.append(arguments[-1].last_hidden_state))
    try:
        yield hidden_states
    finally:
        hook.remove()


def _inputs(micro: MicroBatch, model: PackedModel) -> dict[str, Any]:
    """Return the arguments of the model for a packed micro-batch."""
    positions, device = micro.position_ids_L[None], model.hf.device
    packed = model.attention_rows(positions, micro.row_L[None])
    ids = micro.token_ids_L[None].to(device)
    return {"input_ids": ids, "position_ids": positions.to(device), "use_cache": False, "packed": packed}


def _pack_rows(*rows: torch.Tensor) -> MicroBatch:
    """Return a micro-batch of packed rows of token ids."""
    positions = torch.cat([torch.arange(len(tokens_T)) for tokens_T in rows])
    row_L = torch.cat([torch.full_like(tokens_T, number) for number, tokens_T in enumerate(rows)])
    zeros = torch.zeros_like(positions)
    return MicroBatch(torch.cat(rows), positions, row_L, zeros, zeros, zeros, zeros, zeros, zeros, zeros, ())


def _score_positions(micro: MicroBatch) -> NDArray[np.int64]:
    """Return the positions of all tokens but the first of each row."""
    return np.flatnonzero(micro.position_ids_L.numpy())
