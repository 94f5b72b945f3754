"""The backend ``megatron``: Megatron-Core with tensor, pipeline, expert and data parallelism, and the options that it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.algo.registry import needs_critic
from agentrl.batch.packing import MULTIPLE
from agentrl.config.algo import AlgoConfig
from agentrl.config.validation import nearest_key
from agentrl.core.errors import ConfigError
from agentrl.core.extras import install_command
from agentrl.learner.base import LearnerBackend, RankClass
from agentrl.learner.megatron.layout import RECOMPUTE, UNEVEN_STAGES, Layout

KEY = "learner.megatron"
_BOOL, _NUMBER = (True, False), None
_FIRST = "num_layers_in_first_pipeline_stage"
_OPTIONS: Mapping[str, tuple[object, ...] | None] = {
    **dict.fromkeys((*Layout.__slots__, *UNEVEN_STAGES), _NUMBER),
    "sequence_parallel": _BOOL,
    RECOMPUTE: ("full",),
    "recompute_method": ("uniform", "block"),
    "recompute_num_layers": _NUMBER,
    "use_distributed_optimizer": _BOOL,
    "overlap_grad_reduce": _BOOL,
    "overlap_param_gather": _BOOL,
    "bucket_size": _NUMBER,
    "moe_router_load_balancing_type": ("none", "aux_loss"),
    "moe_aux_loss_coeff": _NUMBER,
    "moe_z_loss_coeff": _NUMBER,
}
"""Names, and values where others are wrong."""
_OTHER_KEYS = {
    "optimizer": "learner.optimizer.name",
    "lr": "learner.optimizer.lr",
    "weight_decay": "learner.optimizer.weight_decay",
    "adam_beta1": "learner.optimizer.betas",
    "adam_beta2": "learner.optimizer.betas",
    "adam_eps": "learner.optimizer.eps",
    "clip_grad": "learner.optimizer.max_grad_norm",
    "params_dtype": "learner.precision",
    "bf16": "learner.precision",
    "fp16": "learner.precision",
    "optimizer_cpu_offload": "learner.cpu_offload=optimizer",
}
"""Options of Megatron-Core's optimizer, and the keys of agentrl that set them."""


def check_options(options: Mapping[str, object]) -> None:
    """Check the options ``learner.megatron``.

    Raises:
        ConfigError: an option is unknown or not supported, or its value is not.
    """
    for name, value in options.items():
        if name in _OTHER_KEYS:
            raise ConfigError(f"{KEY}.{name}={value!r}: set {_OTHER_KEYS[name]}")
        if name not in _OPTIONS:
            nearest = nearest_key(name, sorted(_OPTIONS))
            hint = f"did you mean {KEY}.{nearest}?" if nearest else f"supported are {', '.join(sorted(_OPTIONS))}"
            raise ConfigError(f"{KEY}.{name}={value!r}: agentrl does not support this option of Megatron-Core; {hint}")
        values = _OPTIONS[name]
        if values is not None and not any(value == allowed and type(value) is type(allowed) for allowed in values):
            choices = " or ".join(str(allowed).lower() if values is _BOOL else str(allowed) for allowed in values)
            raise ConfigError(f"{KEY}.{name}={value!r} is not supported; set it to {choices}")
    if options.get("overlap_param_gather"):
        for name, default in (("overlap_grad_reduce", False), ("use_distributed_optimizer", True)):
            if not options.get(name, default):
                raise ConfigError(f"{KEY}.overlap_param_gather=true needs {KEY}.{name}=true")


_KEY = "learner.backend=megatron"
_REASONS = {
    "learner.lora": "Megatron-Core has no adapters",
    "learner.fp8": "Megatron-Core computes in float8 with Transformer Engine only",
    "learner.optimizer.name=muon": "Megatron-Core's needs the package emerging_optimizers",
    "algo.critic.optimizer.name=muon": "Megatron-Core's needs the package emerging_optimizers",
}
"""Why the backend lacks what a key sets, if that is not agentrl's."""


class MegatronBackend(LearnerBackend):
    """Ranks of tensor, pipeline and context parallelism are one data-parallel replica."""

    @property
    def data_parallel_size(self) -> int:
        """The number of data-parallel ranks."""
        return self.config.ranks // Layout.from_options(self.config.megatron).ranks_per_replica

    def check(self, algo: AlgoConfig, models: Sequence[Path]) -> None:
        """Refuse what the backend lacks, and layouts that cannot divide the models."""
        config = self.config
        lacking = {
            "learner.lora": config.lora is not None,
            "learner.fp8": config.fp8,
            "learner.optimizer.name=muon": config.optimizer.name == "muon",
            "learner.optimizer.state=8bit": config.optimizer.state == "8bit",
            "algo.critic.optimizer.name=muon": needs_critic(algo) and algo.critic.optimizer.name == "muon",
            "algo.critic.optimizer.state=8bit": needs_critic(algo) and algo.critic.optimizer.state == "8bit",
            "learner.reshard_after_forward": config.reshard_after_forward,
            "learner.recompute=all_but_attention": config.recompute == "all_but_attention",
            "learner.replicas": config.replicas > 1,
            "learner.expert_parallel (set learner.megatron.expert_model_parallel_size)": config.expert_parallel > 1,
            "learner.context_parallel (set learner.megatron.context_parallel_size)": config.context_parallel > 1,
        }
        for key, is_set in lacking.items():
            if is_set:
                reason = f" ({_REASONS[key]})" if key in _REASONS else ""
                raise ConfigError(f"{key}: {_KEY} lacks it{reason}; leave it out, or set learner.backend=fsdp")
        check_options(config.megatron)
        if RECOMPUTE in config.megatron and config.recompute not in ("auto", "none"):
            raise ConfigError(
                f"learner.recompute={config.recompute} with learner.megatron.{RECOMPUTE}: leave one of them out"
            )
        layout = Layout.from_options(config.megatron)
        from agentrl.learner.megatron.families.base import layer_features
        from agentrl.learner.megatron.families.registry import read_family

        for folder in models:
            family, hf = read_family(folder, "model.path")
            if family.reads_images:
                _check_images(config.megatron, layer_features(family), f"model.path={folder}")
                _check_first_stage(config.megatron, layout, layer_features(family), hf.num_hidden_layers)
            layout.check(family.options(hf) | {"vocab_size": hf.vocab_size}, config.megatron, config.ranks)
        _check_lengths(layout, bool(config.megatron.get("sequence_parallel")))

    def rank_class(self) -> RankClass:
        """Import `MegatronRank`.

        Raises:
            ConfigError: Megatron-Core is not installed.
        """
        try:
            import megatron.core  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{_KEY} needs Megatron-Core ({error}): {install_command('megatron')}") from error
        from agentrl.learner.megatron.rank import MegatronRank

        return MegatronRank


def _check_images(options: Mapping[str, object], layer_features: int, setting: str) -> None:
    """Refuse what is not supported of a model that reads images.

    Raises:
        ConfigError: an option is not supported.
    """
    reasons = {
        "virtual_pipeline_model_parallel_size": (
            (Layout.from_options(options).chunks > 1),
            "the vision tower is on a stage with one chunk",
        ),
        "overlap_grad_reduce": (
            bool(options.get("overlap_grad_reduce")),
            "a micro-batch without images gives the tower no gradient",
        ),
        RECOMPUTE: (
            RECOMPUTE in options and layer_features > 0,
            "its layers add features of images between those that are recomputed; set learner.recompute=full",
        ),
    }
    for name, (is_set, reason) in reasons.items():
        if is_set:
            raise ConfigError(
                f"{KEY}.{name}={options[name]}: {setting} reads images, for which it is refused: {reason}"
            )


def _check_first_stage(options: Mapping[str, object], layout: Layout, layer_features: int, layers: int) -> None:
    """Check that the first stage has the layers that add features of images, unless options divide the layers in other ways.

    Raises:
        ConfigError: it has not.
    """
    if options.keys() & {*UNEVEN_STAGES} - {_FIRST}:
        return  # `build_model` checks it
    count = options.get(_FIRST) or layers // layout.pipeline_model_parallel_size
    assert isinstance(count, int)
    if count < layer_features:
        raise ConfigError(
            f"{KEY}.pipeline_model_parallel_size={layout.pipeline_model_parallel_size}: the first stage has {count} layers, and "
            f"{layer_features} add features of images; set {KEY}.{_FIRST}={layer_features}"
        )


def _check_lengths(layout: Layout, sequence_parallel: bool) -> None:
    """Check that ranks can divide the tokens of a micro-batch, and that virtual stages have stages."""
    size = (layout.tensor_model_parallel_size if sequence_parallel else 1) * layout.context_parallel_size
    if MULTIPLE % size:
        raise ConfigError(
            f"learner.megatron.context_parallel_size={layout.context_parallel_size} and tensor_model_parallel_size="
            f"{layout.tensor_model_parallel_size} divide tokens among {size} ranks, and micro-batches are multiples of "
            f"{MULTIPLE} tokens; set it to a size with which their product divides {MULTIPLE}"
        )
    if layout.chunks > 1 and layout.pipeline_model_parallel_size == 1:
        raise ConfigError(
            f"learner.megatron.virtual_pipeline_model_parallel_size={layout.chunks} without pipeline stages; set "
            "learner.megatron.pipeline_model_parallel_size to 2 or more, or leave it out"
        )
