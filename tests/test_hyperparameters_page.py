"""The table of docs/reference/hyperparameters.md has the values of the presets, and its text the defaults."""

import re
from pathlib import Path
from typing import Any

from agentrl.config.load import find_config, load_config
from agentrl.config.schema import Config
from agentrl.models.learning_rates import usual_rates

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "hyperparameters.md").read_text()


def test_the_table_is_that_of_the_presets() -> None:
    rows = re.findall(r"^\| [\d.]+[MB] \| `(.+?)` \| (\S+) \| (\d+) \| (\d+) × (\d+) \| (\S+) \|", PAGE, re.MULTILINE)
    assert len(rows) >= 9
    for preset, lr, warmup, prompts, episodes, kl in rows:
        config = load_config(find_config(preset))
        optimizer, rollout = config.learner.optimizer, config.rollout
        assert (optimizer.lr, optimizer.warmup_steps) == (float(lr), int(warmup)), preset
        assert (rollout.batch_size, rollout.n_samples_per_prompt) == (int(prompts), int(episodes)), preset
        assert config.algo.kl_coef == float(kl), preset


def test_named_defaults_are_those_of_the_configuration() -> None:
    named = re.findall(r"`([a-z]+(?:\.[a-z_]+)+)` \(([\d.e-]+)\)", PAGE)
    assert len(named) >= 8
    for key, value in named:
        config: Any = Config()
        for name in key.split("."):
            config = getattr(config, name)
        assert config == float(value), key


def test_the_table_of_learning_rates_is_that_of_auto() -> None:
    rows = re.findall(r"^\| (\d+) million \| (\S+) \| (\S+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 3
    for size, policy, critic_rate, warmup in rows:
        rates = usual_rates(int(size) * 1_000_000)
        assert (rates.policy, rates.critic_or_sft, rates.warmup_steps) == (
            float(policy),
            float(critic_rate),
            int(warmup),
        )
        assert rates.size == int(size) * 1_000_000
