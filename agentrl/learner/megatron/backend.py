"""The backend ``megatron``: Megatron-Core with tensor, pipeline, expert and data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.algo.registry import needs_critic
from agentrl.batch.packing import MULTIPLE
from agentrl.config.algo import AlgoConfig
from agentrl.core.errors import ConfigError
from agentrl.core.extras import install_command
from agentrl.learner.base import LearnerBackend, RankClass
from agentrl.learner.megatron.allowed_options import check_options
from agentrl.learner.megatron.layout import RECOMPUTE, Layout

_KEY = "learner.backend=megatron"


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
            "algo.critic.optimizer.name=muon": needs_critic(algo) and algo.critic.optimizer.name == "muon",
            "learner.reshard_after_forward": config.reshard_after_forward,
            "learner.cpu_offload": config.cpu_offload != "none",
            "learner.context_parallel (set learner.megatron.context_parallel_size)": config.context_parallel > 1,
        }
        for key, is_set in lacking.items():
            if is_set:
                raise ConfigError(f"{key}: {_KEY} lacks it; leave it out, or set learner.backend=fsdp")
        check_options(config.megatron)
        if RECOMPUTE in config.megatron and config.recompute not in ("auto", "none"):
            raise ConfigError(
                f"learner.recompute={config.recompute} with learner.megatron.{RECOMPUTE}: leave one of them out"
            )
        layout = Layout.from_options(config.megatron)
        from agentrl.learner.megatron.families.registry import read_family

        for folder in models:
            family, hf = read_family(folder, "model.path")
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
