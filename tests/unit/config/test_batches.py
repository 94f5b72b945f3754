"""How a step's rollouts are divided into optimizer steps."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError

FOUR = ("rollout.batch_size", "rollout.n_samples_per_prompt", "batch.global_batch_size", "train.steps_per_rollout")


def settings(*numbers: int | None) -> list[str]:
    return [f"{key}={number}" for key, number in zip(FOUR, numbers, strict=True) if number is not None]


@pytest.mark.parametrize("numbers", [(32, 8, None, 1), (32, 8, 256, 1), (32, 8, 64, 4), (32, 8, None, 4), (3, 1, 1, 3)])
def test_numbers_that_fit(numbers: tuple[int | None, ...]) -> None:
    load_config(None, settings(*numbers))


@pytest.mark.parametrize(
    ("numbers", "advice"),
    [
        ((32, 8, 100, 1), "batch.global_batch_size=256"),
        ((32, 8, 128, 1), "batch.global_batch_size=256"),
        ((32, 8, None, 3), "rollout.batch_size=33"),
        ((2, 8, 4, 4), "rollout.batch_size=4 batch.global_batch_size=8"),
        ((30, 8, 64, 4), "rollout.batch_size=32"),
    ],
)
def test_a_mismatch_shows_the_four_numbers_and_a_setting(numbers: tuple[int | None, ...], advice: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_config(None, settings(*numbers))
    message = str(refusal.value)
    for setting in settings(*numbers):
        assert setting in message
    assert message.endswith(f"set for example {advice}")


@given(st.integers(1, 40), st.integers(1, 9), st.none() | st.integers(1, 300), st.integers(1, 7))
def test_the_advice_is_accepted(prompts: int, samples: int, wanted: int | None, steps: int) -> None:
    given_settings = settings(prompts, samples, wanted, steps)
    try:
        load_config(None, given_settings)
    except ConfigError as refusal:
        advice = re.findall(r"[\w.]+=\d+", str(refusal).split("set for example ")[1])
        load_config(None, [*given_settings, *advice])
    else:
        assert prompts % steps == 0
        assert wanted is None or wanted * steps == prompts * samples


def test_older_weights_of_the_engines_are_corrected_for() -> None:
    load_config(None, ["algo.old_logprobs=learner", "weights.sync_every=3"])
    with pytest.raises(ConfigError, match=r"weights\.sync_every=3.*algo\.old_logprobs=sampler"):
        load_config(None, ["algo.old_logprobs=learner", "algo.correction.rollout_is=none", "weights.sync_every=3"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algo.correction.rollout_is=token"], r"rollout_is=token with algo\.old_logprobs=sampler"),
        (["algo.overlong.max_tokens=5"], r"buffer_tokens=512 is more than algo\.overlong\.max_tokens=5"),
        (["algo.correction.rollout_rs=[token_k1]", "algo.correction.rollout_rs_threshold=0.5"], "set it above 1"),
        (["algo.reference_steps=5"], r"algo\.kl_coef above 0"),
    ],
)  # fmt: skip
def test_an_objective_that_does_not_fit_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(None, settings)


def test_an_engine_that_computes_otherwise_is_corrected_for() -> None:
    algo = load_config(None, ["sampler.backend=sglang"]).algo
    assert (algo.old_logprobs, algo.correction.rollout_is) == ("learner", "token")
    algo = load_config(None, []).algo
    assert (algo.old_logprobs, algo.correction.rollout_is) == ("sampler", "none")
