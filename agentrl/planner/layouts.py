"""Layouts of the learner, from the one with the least communication and recomputation on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

from agentrl.config.layers import Layer, load_layers
from agentrl.config.learner import Recompute
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, NoLayoutError
from agentrl.learner.fsdp.backend import FsdpBackend
from agentrl.learner.fsdp.memory import FsdpMemory
from agentrl.learner.megatron.backend import MegatronBackend
from agentrl.learner.megatron.families.registry import read_family
from agentrl.learner.megatron.memory import MegatronWork, megatron_memory
from agentrl.learner.memory import LearnerMemory, MemoryOptions, with_critic
from agentrl.models.reference_policy import CRITIC_KEY
from agentrl.planner.engine import MACHINE
from agentrl.planner.training_summary import KEEPS_GRADIENTS, critic_estimator, memory_options, micro_tokens

_FSDP = tuple(
    (recompute, reshard)
    for choices in (("none", "selective"), ("all_but_attention", "full"))
    for reshard in (False, True)
    for recompute in choices
)
"""``recompute`` and ``reshard_after_forward``, from the fastest on: gathering again is hidden behind computation in part."""
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
_LAST = "num_layers_in_last_pipeline_stage"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout of the learner, and what a rank of it needs."""

    backend: str
    settings: Tree
    """The section ``learner``."""
    memory: LearnerMemory
    """With a critic that shares the GPU."""
    critic: int = 0
    """Bytes of a rank of a critic that has its own GPUs; 0 without."""


class Models:
    """The models that a learner is planned for, each read once for all layouts of FSDP.

    Args:
        policy: of transformers, on ``meta``; weights that are not trained are without ``requires_grad``.
        critic: folder of the critic, if there is one.
    """

    def __init__(self, policy: Any, critic: Path | None = None) -> None:
        self.policy, self.critic = policy, critic
        self._critic_memory: Callable[[Config, MemoryOptions], LearnerMemory] | None = None

    @cached_property
    def policy_memory(self) -> FsdpMemory:
        """Estimates the memory of a rank of the policy.

        Raises:
            ModelError: transformers does not say which layers the model has.
        """
        return FsdpMemory(self.policy)

    def critic_memory(self, config: Config, options: MemoryOptions) -> LearnerMemory | None:
        """Return the memory of an FSDP rank of the critic; None without one.

        Args:
            config: of the run.
            options: of the policy.
        """
        if self.critic is None:
            return None
        if self._critic_memory is None:
            self._critic_memory = critic_estimator(config, self.critic)
        return self._critic_memory(config, options)


@dataclass(frozen=True, slots=True)
class Request:
    """What a learner is planned for."""

    layers: tuple[Layer, ...]
    """The configuration. What they set is kept; other keys are proposed."""
    configured: Tree
    """Their values."""
    folder: Path
    """With the model's ``config.json``."""
    models: Models
    ranks: int
    shares_gpus: bool = True
    """Whether the critic has the policy's GPUs."""

    def config(self, learner: Tree) -> Config:
        """Return the configuration with the section ``learner`` under what is configured.

        Raises:
            ConfigError: it is not valid.
        """
        return load_layers([Layer("plan", {"learner": learner}), *self.layers])

    def keep(self, name: str, choices: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the choices of a key of ``learner``: its value alone, if it is configured."""
        section = self.configured.get("learner") or {}
        return (section[name],) if name in section else choices


def layouts(request: Request, backend: str) -> Iterator[Candidate]:
    """Yield the layouts of a backend in the order in which they are proposed.

    Raises:
        ConfigError: the backend is not known here.
        NoLayoutError: no layout divides the model, or the backend lacks what a key sets.
        ModelError: the backend lacks the model's family.
    """
    if backend not in _LAYOUTS:
        raise ConfigError(f"learner.backend={backend}: memory is estimated for {' and '.join(_LAYOUTS)}")
    return _LAYOUTS[backend](request)


def _fsdp_layouts(request: Request) -> Iterator[Candidate]:
    """Yield the layouts of FSDP2 that divide the model.

    Raises:
        NoLayoutError: none does; the message is that of the last one.
    """
    last_error, has_layout = ConfigError(f"learner.ranks={request.ranks}: no layout of FSDP2 divides the model"), False
    sizes = tuple(1 << power for power in range(min(MACHINE, request.ranks).bit_length()))
    combinations = product(
        request.keep("context_parallel", sizes),
        request.keep("cpu_offload", ("none", "optimizer")),
        _pairs(request),
        request.keep("replicas", _replicas(request.ranks)),
        request.keep("expert_parallel", (1,)),
    )
    for context, offload, (recompute, reshard), replicas, experts in combinations:
        settings: Tree = {"ranks": request.ranks, "recompute": recompute, "reshard_after_forward": reshard}
        settings |= {"context_parallel": context} if context > 1 else {}
        settings |= {"replicas": replicas} if replicas > 1 else {}
        settings |= {"expert_parallel": experts} if experts > 1 else {}
        settings |= {"cpu_offload": offload} if offload != "none" else {}
        config = request.config({"backend": "fsdp", **settings})
        try:
            FsdpBackend(config.learner).check(config.algo, [request.folder])
        except ConfigError as error:
            last_error = error
            continue
        has_layout = True
        options = memory_options(config, request.folder)
        policy = request.models.policy_memory(config.learner, options)
        critic = request.models.critic_memory(config, options)
        yield _candidate(request, "fsdp", settings, policy, critic)
    if not has_layout:
        raise NoLayoutError(str(last_error))


def _replicas(ranks: int) -> tuple[int, ...]:
    """Return the numbers of copies of the weights, from the one with the least communication between machines on."""
    return (ranks // MACHINE, 1) if ranks > MACHINE and ranks % MACHINE == 0 else (1,)


def _pairs(request: Request) -> tuple[tuple[str, bool], ...]:
    """Return ``recompute`` and ``reshard_after_forward``."""
    recompute, reshard = request.keep("recompute", ()), request.keep("reshard_after_forward", ())
    pairs = dict.fromkeys(
        (recompute[0] if recompute else recompute_choice, reshard[0] if reshard else reshard_choice)
        for recompute_choice, reshard_choice in _FSDP
    )
    return tuple(pairs)


def _megatron_layouts(request: Request) -> Iterator[Candidate]:
    """Yield the layouts of Megatron-Core that divide the model.

    Raises:
        NoLayoutError: none does; the message is that of the last one.
    """
    family, hf = read_family(request.folder, "model.path")
    config = request.config({"backend": "megatron", "ranks": request.ranks})
    general = memory_options(config, request.folder)
    work = MegatronWork(
        ranks=request.ranks,
        tokens=micro_tokens(config),
        logits_chunk=config.learner.logits_chunk,
        bfloat16=general.bfloat16,
        reference=general.reference,
        offloads=config.learner.cpu_offload == "optimizer",
        freeze=tuple(config.learner.freeze),
    )
    model = family.options(hf)
    last_error, has_layout = (
        ConfigError(f"learner.ranks={request.ranks}: no layout of Megatron-Core divides the model"),
        False,
    )
    for recompute, proposed in _megatron_options(request, model):
        options = proposed | config.learner.megatron
        learner = config.learner.model_copy(update={"megatron": options})
        try:
            MegatronBackend(learner).check(config.algo, [])  # `megatron_memory` checks the model
            layout_work = replace(work, recompute=general.recompute if recompute == "auto" else recompute)
            memory = megatron_memory(family, hf, options, layout_work)
            critic = None
            if request.models.critic is not None:
                freeze = tuple(learner.for_critic(config.algo.critic.optimizer).freeze)
                critic_work = replace(layout_work, reference=False, values=True, freeze=freeze)
                critic = megatron_memory(*read_family(request.models.critic, CRITIC_KEY), options, critic_work)
        except ConfigError as error:
            last_error = error
            continue
        has_layout = True
        settings = {"ranks": request.ranks, "recompute": recompute, "megatron": proposed}
        yield _candidate(request, "megatron", settings, memory, critic)
    if not has_layout:
        raise NoLayoutError(str(last_error))


_LAYOUTS = {"fsdp": _fsdp_layouts, "megatron": _megatron_layouts}
"""By learner backend."""


def _candidate(
    request: Request, backend: str, settings: Tree, policy: LearnerMemory, critic: LearnerMemory | None
) -> Candidate:
    if critic is None:
        return Candidate(backend, settings, policy)
    if request.shares_gpus:
        return Candidate(backend, settings, with_critic(policy, critic, keeps_gradients=KEEPS_GRADIENTS[backend]))
    return Candidate(backend, settings, policy, critic.total)


def _megatron_options(request: Request, model: Mapping[str, Any]) -> list[tuple[Recompute | Literal["auto"], Tree]]:
    """Return ``learner.recompute`` and options of Megatron-Core, from the smallest product of parallel sizes on.

    Equal products are in the order of recomputation, expert, pipeline and context parallel size.
    """
    megatron_settings = (request.configured.get("learner") or {}).get("megatron") or {}

    def sizes(name: str, most: int) -> tuple[int, ...]:
        powers = tuple(1 << power for power in range(most.bit_length()))
        return (megatron_settings[name],) if name in megatron_settings else powers

    experts, layers = int(model.get("num_moe_experts") or 1), int(model["num_layers"])
    combinations = product(
        sizes("tensor_model_parallel_size", min(MACHINE, request.ranks)),
        sizes("pipeline_model_parallel_size", min(layers, request.ranks)),
        sizes("context_parallel_size", min(MACHINE, request.ranks)),
        sizes("expert_model_parallel_size", min(experts, request.ranks)),
        request.keep("recompute", _RECOMPUTE),
    )
    order = {recompute: number for number, recompute in enumerate(_RECOMPUTE)}
    ordered = sorted(
        combinations,
        key=lambda layout: (
            layout[0] * layout[1] * layout[2],
            order.get(layout[4], 0),
            layout[3],
            layout[1],
            layout[2],
        ),
    )
    return [(layout[4], _options(*layout[:4], layers=layers, has_experts=experts > 1)) for layout in ordered]


def _options(tensor: int, stages: int, context: int, expert: int, *, layers: int, has_experts: bool) -> Tree:
    """Return the options of a layout, without those that are 1."""
    options: Tree = {
        "tensor_model_parallel_size": tensor,
        "pipeline_model_parallel_size": stages,
        "context_parallel_size": context,
        "expert_model_parallel_size": expert,
    }
    options = {name: size for name, size in options.items() if size > 1}
    if tensor > 1:
        options["sequence_parallel"] = True
        if has_experts:
            options["expert_tensor_parallel_size"] = 1
    if layers % stages:
        # The last stage also has the head: it gets fewer layers.
        options[_LAST] = layers - (stages - 1) * -(-layers // stages)
    return options
