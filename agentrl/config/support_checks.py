"""Rules for training with top-k and top-p: ``sampler.renormalise``, and score centering over what they leave."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config

_KEY = "sampler.renormalise"
MASK_TOKENS = 4096
"""SGLang's default of ``sampling_mask_max_tokens``: the most ids of a returned sampling support."""


def renormalisation_faults(config: Config) -> Iterator[str]:
    """Yield why log-probabilities of the loss are not all those of the tokens that top-k and top-p keep."""
    sampler, algo, key = config.sampler, config.algo, f"{_KEY}={config.sampler.renormalise}"
    if sampler.renormalise == "none":
        return
    if sampler.top_p == 1 and sampler.top_k <= 0:
        yield f"{key} without sampler.top_p below 1 or sampler.top_k: sampling keeps all tokens; leave it out"
    if sampler.allow_unnormalised:
        yield f"{key} with sampler.allow_unnormalised=true: leave out one of the two"
    if algo.distillation.teachers:
        yield f"{key} with algo.distillation.teachers: they score the whole distribution; leave them out"
    if sampler.renormalise == "engine":
        yield from _engine_support(config)
        return
    if algo.old_logprobs != "learner":
        yield (
            f"{key} with algo.old_logprobs={algo.old_logprobs}: engines return log-probabilities of the whole distribution; set "
            f"algo.old_logprobs=learner, or {_KEY}=engine"
        )
    if algo.correction.active:
        yield (
            f"{key} with algo.correction: engine and learner have log-probabilities of different distributions; set "
            f"algo.correction.rollout_is=none, and leave out rollout_rs and m2po_threshold, or set {_KEY}=engine"
        )
    if algo.needs_reference and not algo.distillation.teachers:
        yield (
            f"{key} with algo.kl_coef={algo.kl_coef:g}: the reference keeps other tokens; set algo.kl_coef=0, or {_KEY}=engine"
        )


def _engine_support(config: Config) -> Iterator[str]:
    """Yield why SGLang would not return the support of tokens."""
    sampler, key = config.sampler, f"{_KEY}=engine"
    if not sampler.uses_sglang:
        return
    most = sampler.sglang_option("sampling_mask_max_tokens", MASK_TOKENS)
    if not isinstance(most, int) or not 1 < sampler.top_k <= most:
        yield (
            f"{key} with sampler.top_k={sampler.top_k}: SGLang returns the ids that top-p leaves of a limited top-k; set "
            f"sampler.top_k from 2 to sampler.sglang.sampling_mask_max_tokens={most}"
        )
    if sampler.has_router_program:
        yield f"{key} with sampler.router=sglang: the router drops the option of requests; set sampler.router=builtin"
    if sampler.speculative_algorithm is not None:
        yield (
            f"{key} with sampler.sglang.speculative_algorithm={sampler.speculative_algorithm}: SGLang returns no sampling "
            f"support of drafts; leave it out, or set {_KEY}=learner"
        )


def centering_faults(config: Config) -> Iterator[str]:
    """Yield why the engine's expected score is not that of the loss."""
    key = "algo.score_centering=true"
    by_source = config.algo.by_source
    if len({algo.score_centering for algo in by_source.values()}) > 1:
        yield "algo.score_centering differs among sources, which are trained in one batch; set it for the run"
    if not any(algo.score_centering for algo in by_source.values()):
        return
    if config.sampler.renormalise != "engine":
        yield (
            f"{key} with {_KEY}={config.sampler.renormalise}: it is computed over the ids that engines return; set "
            f"{_KEY}=engine with sampler.top_k"
        )
    for algo in by_source.values():
        correction = algo.correction
        if algo.loss.name != "reinforce":
            yield (
                f"{key} with algo.loss.name={algo.loss.name}: what clips or masks by another ratio has another expected score; "
                "set algo.loss.name=reinforce, with algo.correction for importance weights"
            )
        if correction.rollout_is not in ("none", "token") or correction.needs_all_tokens or correction.rollout_rs:
            yield (
                f"{key} with algo.correction: only weights of single tokens have a known mean; set "
                "algo.correction.rollout_is=token or none, and leave out rollout_is_batch_normalize, rollout_rs and "
                "m2po_threshold"
            )
