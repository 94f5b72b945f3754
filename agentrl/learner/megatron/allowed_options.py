"""Options of Megatron-Core that can be set under ``learner.megatron``, those whose effect is tested. Imports no Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.validation import nearest_key
from agentrl.core.errors import ConfigError
from agentrl.learner.megatron.layout import RECOMPUTE, UNEVEN_STAGES, Layout

_KEY = "learner.megatron"
_BOOL, _NUMBER = (True, False), None
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
}
"""Options of Megatron-Core's optimizer, and the keys of agentrl that set them."""


def check_options(options: Mapping[str, object]) -> None:
    """Check the options ``learner.megatron``.

    Raises:
        ConfigError: an option is unknown or not supported, or its value is not.
    """
    for name, value in options.items():
        if name in _OTHER_KEYS:
            raise ConfigError(f"{_KEY}.{name}={value!r}: set {_OTHER_KEYS[name]}")
        if name not in _OPTIONS:
            nearest = nearest_key(name, sorted(_OPTIONS))
            hint = f"did you mean {_KEY}.{nearest}?" if nearest else f"supported are {', '.join(sorted(_OPTIONS))}"
            raise ConfigError(f"{_KEY}.{name}={value!r}: agentrl does not support this option of Megatron-Core; {hint}")
        values = _OPTIONS[name]
        if values is not None and not any(value == allowed and type(value) is type(allowed) for allowed in values):
            choices = " or ".join(str(allowed).lower() if values is _BOOL else str(allowed) for allowed in values)
            raise ConfigError(f"{_KEY}.{name}={value!r} is not supported; set it to {choices}")
    if options.get("overlap_param_gather"):
        for name, default in (("overlap_grad_reduce", False), ("use_distributed_optimizer", True)):
            if not options.get(name, default):
                raise ConfigError(f"{_KEY}.overlap_param_gather=true needs {_KEY}.{name}=true")
