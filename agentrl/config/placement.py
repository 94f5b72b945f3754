"""Which GPUs the learner and the engines of a run get: the ``placement`` section."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import Section
from agentrl.config.sections import SamplerConfig
from agentrl.core.errors import ConfigError

Mode = Literal["separate", "colocate", "disaggregate"]
"""See `PlacementConfig.mode`."""

_SIZES = (
    ("tp", "tp_size", "tensor_parallel_size"),
    ("pp", "pp_size", "pipeline_parallel_size"),
    ("dp", "dp_size", "data_parallel_size"),
)
"""SGLang's options whose product is the number of its GPUs, each with its spellings."""


class PlacementConfig(Section):
    """Where engines and learner run."""

    mode: Mode = "separate"
    """``separate``: the engines on this machine, on its last GPUs; the learner's ranks where Ray puts them, on the first ones
    here; with one GPU both share it, and none ever gives its memory back. ``colocate``: the engines on the learner's GPUs,
    in turns: whoever does not work has given its memory back. ``disaggregate``: the engines on GPUs of their own. The last
    two reserve what they need from Ray, on one machine or several, as a placement group."""


def sampler_device(sampler: SamplerConfig) -> Literal["cpu", "cuda"]:
    """Return where the engines that a run starts compute."""
    gpu = sampler.backend == "sglang" and sampler.sglang_options.get("device", "cuda") != "cpu"
    return "cuda" if gpu else "cpu"


def engine_ranks(sampler: SamplerConfig) -> int:
    """Return how many processes one engine computes with, each on a GPU of its own where it computes on GPUs.

    That is the product of its tensor, pipeline and data parallel sizes; with ``enable_dp_attention`` SGLang divides the
    tensor parallel ranks among its data parallel ones, so that these count nothing.

    Raises:
        ConfigError: one of them is no number.

    """
    if sampler.backend != "sglang":
        return 1
    options = {name.replace("-", "_"): value for name, value in sampler.sglang_options.items()}
    sizes = _SIZES[:2] if options.get("enable_dp_attention") else _SIZES
    ranks = 1
    for names in sizes:
        value = next((options[name] for name in names if options.get(name) is not None), 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"sampler.sglang.{names[1]}={value!r}: SGLang takes a whole number from 1 on")
        ranks *= value
    return ranks
