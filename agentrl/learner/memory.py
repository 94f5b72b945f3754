"""Memory that a learner rank needs: what an estimate depends on and what it has, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from agentrl.config.learner import Recompute

FLOAT32 = 4
"""Bytes of a float32 number: weights, gradients, moments, logits."""


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on the device of one rank at a moment of an optimizer step."""

    weights: int
    """float32, this rank's shards."""
    optimizer: int
    """AdamW's two moments, this rank's shards; Muon has one for matrices of layers. Offloaded ones are there in the update."""
    copies: int = 0
    """bfloat16 copies of weights; see `agentrl.learner.fsdp.compute_copies`."""
    reference: int = 0
    """The frozen reference policy, this rank's shards; 0 without one."""
    critic: int = 0
    """What a critic on the same device adds: its state at rest, or what its own step needs more; see `with_critic`."""
    gradients: int = 0
    """float32, this rank's shards of trained weights, and whole ones that are not yet reduced or added."""
    gathered: int = 0
    """Whole weights of layers in the dtype of matrix products."""
    activations: int = 0
    """What the backward pass reads, and what it computes of one layer."""
    logits: int = 0
    """Logits of a chunk of tokens (``learner.logits_chunk``), with their gradient and that of the head's weights."""

    @property
    def total(self) -> int:
        """The sum. Fragmentation, NCCL's buffers and the CUDA context come on top, a few GB."""
        return sum(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """What the memory of a rank depends on besides model and configuration."""

    ranks: int
    """Ranks of the learner."""
    tokens: int
    """Tokens of a micro-batch that this rank computes: with ``learner.context_parallel`` a part."""
    bfloat16: bool
    """Whether matrix products are computed in bfloat16, else float32."""
    recompute: Recompute
    """What is computed again in the backward pass."""
    compiled: bool
    """Whether layers are compiled, so that a single rank casts weights where they are used."""
    reference: bool = False
    """Whether there is a reference policy."""
    accumulates: bool = True
    """Whether an optimizer step has several micro-batches, so that one has the gradients of those before."""
    replicas: int = 1
    """Copies of the sharded weights."""

    @property
    def shards(self) -> int:
        """Ranks that a copy of the weights is sharded over."""
        return self.ranks // self.replicas

    @property
    def size(self) -> int:
        """Bytes of a factor of a product."""
        return 2 if self.bfloat16 else FLOAT32

    @property
    def hidden_size(self) -> int:
        """Bytes of a number of the hidden states between layers: float32 on a CPU, where autocast leaves embeddings so."""
        return self.size if self.ranks > 1 or self.compiled else FLOAT32


def with_critic(policy: LearnerMemory, critic: LearnerMemory, *, keeps_gradients: bool) -> LearnerMemory:
    """Return the memory of a device with a rank of the policy and one of the critic: one trains while the other rests.

    Args:
        policy: of its rank alone.
        critic: of its rank alone.
        keeps_gradients: whether ranks at rest have gradients, which are zeros.
    """
    resting = [memory.weights + memory.optimizer + keeps_gradients * memory.gradients for memory in (policy, critic)]
    return replace(policy, critic=max(resting[1], resting[0] + policy.reference + critic.total - policy.total))
