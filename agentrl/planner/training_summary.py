"""Lines at the start of a run on what the learner trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.learner import LearnerConfig, OptimizerState, Recompute
from agentrl.config.schema import Config
from agentrl.config.started_engines import memory_shares, started_engines
from agentrl.core.kernel_cache import kernel_folder
from agentrl.models.freezing import count_trained, frozen_names, matching_names
from agentrl.models.learning_rates import Use, count_weights, describe_optimizer
from agentrl.models.load import empty_model
from agentrl.models.reference_policy import CRITIC_KEY, resolve_critic
from agentrl.models.shipped_architectures import meta_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentrl.learner.memory import LearnerMemory, MemoryOptions

KEEPS_GRADIENTS = {"fsdp": False, "megatron": True}
"""Learner backends whose memory is known, and whether their ranks at rest have gradients, which are zeros."""
FITS, FITS_SHARED = 0.95, 0.9
"""Share of a GPU's memory that the estimate may need: NCCL's buffers and a bucket of weights come on top. The second is for
GPUs that engines share, which keep some memory while the learner trains."""


def describe_model(name: str, folder: Path | None) -> str:
    """Return a line on the policy: its ``model.path``, and if it is here its folder and size."""
    line = f"{'model':<13}{name}"
    return line if folder is None else f"{line} ({folder}), {count_weights(folder):,} weights"


def describe_training(config: Config, folder: Path, critic: Path | None, use: Use = "policy") -> list[str]:
    """Return lines on what is trained of the policy in ``folder``, and with which learning rates.

    Raises:
        ConfigError: a key of ``learner`` does not fit the model.
        ModelError: the model's configuration cannot be loaded.
    """
    lines = [
        f"{'optimizer':<13}{describe_optimizer(config.learner.optimizer, folder, use, lora=config.learner.lora is not None)}"
    ]
    if critic is not None:
        lines.append(f"{'critic':<13}{describe_optimizer(config.algo.critic.optimizer, critic, 'critic')}")
    if (lora := config.learner.lora) is not None:
        if lora.target != "linear":
            from agentrl.learner.fsdp.lora import adapted_layers

            adapted_layers(empty_model(folder, "eager"), lora)  # each pattern names one
        per_policy = f", each of the policies {', '.join(lora.policies)}" if len(lora.policies) > 1 else ""
        lines.append(f"{'trained':<13}LoRA adapters of rank {lora.rank}{per_policy} (learner.lora)")
    if config.learner.freeze:
        trained, total = count_trained(folder, config.learner.freeze)
        lines.append(f"{'trained':<13}{trained:,} of {total:,} weights (learner.freeze)")
    if _device(config.learner) == "cuda" and (compiled := _describe_compilation(config, use)):
        lines.append(f"{'compiles':<13}{compiled}; later starts take less: kept in {kernel_folder()}")
    return lines


def _describe_compilation(config: Config, use: Use) -> str:
    """Return what the learner compiles, and when; empty if nothing."""
    if config.learner.compile:
        return "decoder layers in the first step (about 60 s)"
    if config.batch.share_prefixes and use == "policy":
        return "attention of shared prefixes (batch.share_prefixes) in the first step that has such (about 20 s)"
    return ""


def describe_memory(config: Config, folder: Path, critic: Path | None = None) -> list[str]:
    """Return lines on the memory that each rank of the learner needs to train the policy in ``folder``, and its critic.

    There are none for a backend of another package, whose memory is not known here.

    Raises:
        ConfigError: see `estimate_memory`.
        ModelError: the model's configuration cannot be loaded.
    """
    if config.learner.backend not in KEEPS_GRADIENTS:
        return []
    config, lines = fit_to_gpu(config, folder, critic=critic is not None)
    memory, device = estimate_memory(config, folder, critic)
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in asdict(memory).items() if size)
    ranks = config.learner.ranks
    line = f"about {memory.total / 2**30:.1f} GiB on each of {ranks} learner ranks ({device}): {parts}"
    if critic is not None and not memory.critic:
        critic_bytes = critic_estimator(config, critic)(config, memory_options(config, folder)).total
        lines.insert(0, f"{'memory':<13}about {critic_bytes / 2**30:.1f} GiB on each of {ranks} ranks of the critic")
    return [f"{'memory':<13}{line}", *lines]


def fit_to_gpu(
    config: Config, folder: Path, gpu_memory: Callable[[], int | None] | None = None, *, critic: bool = False
) -> tuple[Config, list[str]]:
    """Return the configuration with keys that are ``auto`` replaced by the fastest that a GPU's memory has room for.

    The keys are ``batch.tokens_per_micro``, ``learner.recompute`` and ``learner.optimizer.state``, with that of a critic.
    Unchanged if none of them is ``auto``, the learner is not on GPUs, or their memory is not known.

    Args:
        config: of the run.
        folder: of the policy; its weights are not read.
        gpu_memory: returns the bytes of a GPU; None: of the smallest that this process sees.
        critic: whether the run's critic is counted, if it has one.

    Returns:
        the configuration, and lines that say what was chosen.

    Raises:
        ConfigError: see `frozen_names`.
        ModelError: the model's configuration cannot be loaded.
    """
    learner = config.learner
    if learner.backend not in KEEPS_GRADIENTS or _device(learner) != "cuda":
        return config, []
    from agentrl.learner.device import gpu_bytes

    choices = [*_memory_choices(config)]
    if len(choices) == 1 or (gpu := (gpu_memory or gpu_bytes)()) is None:
        return config, []
    critic_folder = resolve_critic(config.algo, folder, fetch=False) if critic else None
    limit, beside = memory_limit(config, gpu)
    sizes, estimate = dict[MemoryChoice, int](), memory_estimator(config, folder, critic_folder)
    for choice in choices:
        sizes[choice] = estimate(choice.apply(config), True).total
        if sizes[choice] <= limit:
            break
    else:
        choice = min(sizes, key=lambda choice: sizes[choice])
    size = f"about {sizes[choice] / 2**30:.1f} GiB of the {gpu / 2**30:.1f} of a GPU{beside}"
    lines = [f"{'fits':<13}{choice}: {size}"]
    if sizes[choice] > limit:
        lines.append(
            f"warning: more than the {max(0.0, limit) / 2**30:.1f} GiB that it may need; learner.cpu_offload=optimizer, more "
            "learner.ranks or a lower batch.tokens_per_micro need less"
        )
    return choice.apply(config), lines


def memory_limit(config: Config, gpu_bytes: int) -> tuple[float, str]:
    """Return the bytes of a GPU that a rank of the learner may need by the estimate, and a text about engines that share it.

    With ``placement.mode=separate`` on a machine with one GPU, all engines that the run starts keep their shares of it while the
    learner trains: those of the policy, of teachers, frozen roles, snapshots, judges and evaluations.
    """
    if config.placement.shares_gpus:
        return FITS_SHARED * gpu_bytes, ""
    shares = memory_shares(started_engines(config))
    if not shares or not _has_one_gpu():
        return FITS * gpu_bytes, ""
    engines = "an engine" if len(shares) == 1 else f"{len(shares)} engines"
    share_names = ", ".join(f"{share:g}" for share in dict.fromkeys(shares))
    beside = f" beside {engines} with sampler.sglang.mem_fraction_static={share_names}"
    return limit_beside_engines(sum(shares), gpu_bytes), beside


def limit_beside_engines(share: float, gpu_bytes: int) -> float:
    """Return the bytes of a GPU that a rank may need while engines keep a ``share`` of it, the sum of ``mem_fraction_static``."""
    return (FITS - share) * gpu_bytes


def _has_one_gpu() -> bool:
    from agentrl.cluster.placement_layout import gpus_here

    return gpus_here() == 1


@dataclass(frozen=True, slots=True)
class MemoryChoice:
    """Values of the keys that `fit_to_gpu` chooses."""

    tokens: int
    recompute: Recompute
    state: OptimizerState

    def __str__(self) -> str:
        """Return the keys with their values."""
        return (
            f"batch.tokens_per_micro={self.tokens} learner.recompute={self.recompute} "
            f"learner.optimizer.state={self.state}"
        )

    def apply(self, config: Config) -> Config:
        """Return the configuration with these values. A critic's moments are as the policy's, unless its key is set."""
        batch = config.batch.model_copy(update={"tokens_per_micro": self.tokens})
        optimizer = config.learner.optimizer.model_copy(update={"state": self.state})
        learner = config.learner.model_copy(update={"recompute": self.recompute, "optimizer": optimizer})
        update: dict[str, Any] = {"batch": batch, "learner": learner}
        critic = config.algo.critic
        if critic.optimizer.state == "auto" and critic.optimizer.name == "adamw":
            critic_optimizer = critic.optimizer.model_copy(update={"state": self.state})
            critic = critic.model_copy(update={"optimizer": critic_optimizer})
            update["algo"] = config.algo.model_copy(update={"critic": critic})
        return config.model_copy(update=update)


_SIZES = (16384, 14336, 12288, 10240, 8192)
_ORDER: tuple[tuple[Recompute, OptimizerState, tuple[int, ...]], ...] = (
    ("none", "float32", (32768,)),
    ("selective", "float32", (32768,)),
    ("none", "float32", (16384,)),
    ("selective", "float32", _SIZES),
    ("selective", "8bit", _SIZES),
    ("selective", "float32", (4096,)),
    ("selective", "8bit", (4096,)),
    ("all_but_attention", "float32", (16384, 8192, 4096)),
    ("all_but_attention", "8bit", (16384, 8192, 4096)),
    ("full", "float32", (16384, 8192, 4096)),
    ("full", "8bit", (16384, 8192, 4096)),
)
"""Choices from the fastest on. Products of fewer than 8,192 tokens leave more of a GPU idle than 8-bit moments cost."""


def _memory_choices(config: Config) -> Iterator[MemoryChoice]:
    """Yield what the keys that are set leave of `_ORDER`."""
    from agentrl.learner.megatron.layout import RECOMPUTE

    learner = config.learner
    recompute: Recompute | None = None if learner.recompute == "auto" else learner.recompute
    if RECOMPUTE in learner.megatron:
        recompute = recompute or "none"
    optimizer = learner.optimizer
    state: OptimizerState | None = None if optimizer.state == "auto" else optimizer.state
    if state is None and (learner.backend != "fsdp" or learner.lora is not None or optimizer.name != "adamw"):
        state = "float32"
    tokens = config.batch.tokens_per_micro
    choices = (
        MemoryChoice(size if tokens == "auto" else tokens, recompute or of_layers, state or of_moments)
        for of_layers, of_moments, sizes in _ORDER
        if learner.backend == "fsdp" or of_layers != "all_but_attention"
        for size in sizes
    )
    yield from dict.fromkeys(choices)


def estimate_memory(
    config: Config, folder: Path, critic: Path | None = None, *, accumulates: bool = True
) -> tuple[LearnerMemory, str]:
    """Return the memory that each rank of the learner needs to train the policy in ``folder``, and its kind of device.

    Args:
        config: of the run.
        folder: of the policy; its weights are not read.
        critic: folder of the critic, if there is one. It is counted if it shares the policy's GPUs.
        accumulates: whether an optimizer step has several micro-batches.

    Raises:
        ConfigError: see `frozen_names` and `megatron_memory`.
        ModelError: the model's configuration cannot be loaded.
    """
    return memory_estimator(config, folder, critic)(config, accumulates), _device(config.learner)


def memory_estimator(
    config: Config, folder: Path, critic: Path | None = None
) -> Callable[[Config, bool], LearnerMemory]:
    """Return `estimate_memory` for configurations with the same model, so that it is built only once.

    Args:
        config: of the run. The others differ from it in ``batch``, and in how the learner computes.
        folder: see `estimate_memory`.
        critic: see `estimate_memory`.

    Raises:
        ConfigError: see `estimate_memory`.
        ModelError: see `estimate_memory`.
    """
    from agentrl.learner.memory import with_critic

    backend, shared = config.learner.backend, config.placement.shares_gpus
    policy_memory = _ESTIMATORS[backend](config.learner, folder, values=False)
    critic_memory = critic_estimator(config, critic) if critic is not None and shared else None

    def estimate(config: Config, accumulates: bool) -> LearnerMemory:
        options = memory_options(config, folder, accumulates=accumulates)
        memory = policy_memory(config.learner, options)
        if critic_memory is None:
            return memory
        return with_critic(memory, critic_memory(config, options), keeps_gradients=KEEPS_GRADIENTS[backend])

    return estimate


def critic_estimator(config: Config, folder: Path) -> Callable[[Config, MemoryOptions], LearnerMemory]:
    """Return a function of configuration and the policy's options for the memory of a rank of the critic in ``folder``.

    Raises:
        ConfigError: see `estimate_memory`.
        ModelError: see `estimate_memory`.
    """
    learner = config.learner.for_critic(config.algo.critic.optimizer)
    memory = _ESTIMATORS[config.learner.backend](learner, folder, values=True)

    def estimate(config: Config, options: MemoryOptions) -> LearnerMemory:
        return memory(config.learner.for_critic(config.algo.critic.optimizer), replace(options, reference=False))

    return estimate


_Estimator = Callable[["LearnerConfig", "MemoryOptions"], "LearnerMemory"]


def _fsdp_estimator(learner: LearnerConfig, folder: Path, *, values: bool) -> _Estimator:
    from agentrl.learner.fsdp.memory import FsdpMemory

    return FsdpMemory(trained_critic(learner, folder) if values else trained_model(learner, folder))


def _megatron_estimator(learner: LearnerConfig, folder: Path, *, values: bool) -> _Estimator:
    from agentrl.learner.megatron.families.registry import read_family
    from agentrl.learner.megatron.memory import MegatronWork, megatron_memory

    family = read_family(folder, "model.path")

    def estimate(learner: LearnerConfig, options: MemoryOptions) -> LearnerMemory:
        work = MegatronWork(
            options.ranks,
            options.tokens,
            learner.logits_chunk,
            options.bfloat16,
            options.reference,
            options.recompute,
            values,
            learner.cpu_offload == "optimizer",
            tuple(learner.freeze),
        )
        return megatron_memory(*family, learner.megatron, work)

    return estimate


_ESTIMATORS = {"fsdp": _fsdp_estimator, "megatron": _megatron_estimator}
"""By learner backend, a function of learner and options for the policy, or with ``values`` the critic, in a folder."""


def trained_model(learner: LearnerConfig, folder: Path) -> Any:
    """Return the model in ``folder`` on ``meta``. Weights that are not trained are without ``requires_grad``.

    Raises:
        ConfigError: see `frozen_names`.
        ModelError: the model's configuration cannot be loaded.
    """
    hf = meta_model(folder)
    weights = dict(hf.named_parameters())
    for name in weights if learner.lora is not None else frozen_names(weights.keys(), learner.freeze):
        weights[name].requires_grad_(False)
    return hf


def trained_critic(learner: LearnerConfig, folder: Path) -> PreTrainedModel:
    """Return the critic in ``folder`` on ``meta``, with settings of `LearnerConfig.for_critic`; see `trained_model`."""
    from agentrl.learner.layers import image_weights

    hf = meta_model(folder, CRITIC_KEY, values=True)
    weights = dict(hf.named_parameters())
    for name in matching_names(image_weights(hf), learner.freeze):
        weights[name].requires_grad_(False)
    return hf


def memory_options(config: Config, folder: Path, *, accumulates: bool = True) -> MemoryOptions:
    """Return what the memory of a rank depends on besides model and configuration; see `estimate_memory`."""
    from agentrl.learner.device import recompute_mode, uses_bfloat16
    from agentrl.learner.memory import MemoryOptions

    learner = config.learner
    on_gpu = _device(learner) == "cuda"
    of_gpus: Recompute = "selective" if learner.recompute == "auto" else learner.recompute
    return MemoryOptions(
        ranks=learner.ranks,
        tokens=-(-micro_tokens(config) // learner.context_parallel),
        bfloat16=learner.precision != "float32" if on_gpu else uses_bfloat16(learner),
        recompute=of_gpus if on_gpu else recompute_mode(learner),
        compiled=on_gpu if learner.compile == "auto" else learner.compile,
        reference=_has_second_model(config, folder),
        accumulates=accumulates,
        replicas=learner.replicas,
    )


def micro_tokens(config: Config) -> int:
    """Return the tokens of the largest micro-batch: a row that is longer than ``batch.tokens_per_micro`` is one alone."""
    return max(config.batch.micro_tokens, config.max_tokens)


def _has_second_model(config: Config, folder: Path) -> bool:
    """Return whether there is a reference policy besides the base model of LoRA adapters."""
    is_base = config.learner.lora is not None and config.algo.reference in (None, config.model.path, str(folder))
    return config.algo.needs_reference and not is_base


def _device(learner: LearnerConfig) -> str:
    """Return the kind of device. A configuration for GPUs is described as on GPUs, also on a machine without."""
    from agentrl.learner.device import resolve_device

    return "cuda" if learner.device == "cuda" else resolve_device(learner)
