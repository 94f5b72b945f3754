"""Why a run does not learn, and what makes it slow, from its metrics and rollouts."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.doctor import episode_checks, judge_checks, reward_checks, tool_checks, update_checks
from agentrl.doctor.record import Finding, RunRecord

# Causes stand before their symptoms: without reward variance, for example, every other metric is still.
_CHECKS = (
    update_checks.null_metrics,
    update_checks.nonfinite_gradients,
    reward_checks.few_tasks,
    reward_checks.rewarded_length,
    update_checks.kl_divergence,
    update_checks.gradient_norm,
    update_checks.sampler_mismatch,
    update_checks.cut_distribution,
    tool_checks.unread_tools,
    tool_checks.failing_tools,
    judge_checks.failing_judges,
    episode_checks.truncated_episodes,
    episode_checks.cut_turns,
    episode_checks.filtered_groups,
    update_checks.entropy,
    reward_checks.constant_reward,
    reward_checks.reward_variance,
    update_checks.unchanged_weights,
    reward_checks.evaluation_drop,
    reward_checks.reward_change,
    update_checks.untrained_tokens,
    update_checks.policy_ratio,
    update_checks.critic,
    episode_checks.episode_length,
    tool_checks.slow_tools,
    episode_checks.few_slots,
    episode_checks.idle_engines,
)


def learning_findings(run: RunRecord) -> Iterator[Finding]:
    """Yield what keeps the run from learning, and what makes it slow."""
    for check in _CHECKS:
        yield from check(run)
