"""The section ``async``: its key, and what it does not go with."""

import pytest
import yaml

from agentrl.config.checks import check_placement
from agentrl.config.load import dump, load_config, validate
from agentrl.core.errors import ConfigError


def test_the_section_is_named_async_wherever_a_user_reads_it() -> None:
    config = load_config(None, ["async.max_staleness=3"])
    assert config.asynchronous.max_staleness == 3
    written = yaml.safe_load(dump(config))
    assert written["async"] == {"max_staleness": 3, "mask_older_than": None}
    assert validate(written) == config
    with pytest.raises(ConfigError, match=r"async\.max_stale'\. Did you mean 'async\.max_staleness'"):
        load_config(None, ["async.max_stale=3"])
    with pytest.raises(ConfigError, match=r"async\.max_staleness=-1"):
        load_config(None, ["async.max_staleness=-1"])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("weights.sync_every=9", r"weights\.sync_every=9"),
        ("self_play={}", "self_play"),
        ("async.mask_older_than=1", "no token is older"),
        ("algo={old_logprobs: learner, correction: {rollout_is: none}}", r"algo\.correction\.rollout_is=token"),
    ],
)
def test_what_cannot_go_on_while_the_learner_trains_is_refused(setting: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"async\.max_staleness=1.*{named}|{named}.*async\.max_staleness=1"):
        load_config(None, ["async.max_staleness=1", setting])
    load_config(None, ["async.max_staleness=1"])


@pytest.mark.parametrize("most", [31, 97])
def test_groups_that_no_step_could_train_in_time_are_refused(most: int) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.over_sampling_batch_size={most} with async\.max_staleness=2"):
        load_config(None, ["async.max_staleness=2", f"rollout.over_sampling_batch_size={most}"])
    load_config(None, ["async.max_staleness=2", "rollout.over_sampling_batch_size=40"])


def test_filters_of_groups_are_refused_in_self_play() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filter_groups\.filters with self_play"):
        load_config(None, ["self_play={}", "rollout.filter_groups.filters=[zero_variance]"])


def test_engines_that_share_gpus_with_the_learner_are_refused() -> None:
    config = load_config(None, ["async.max_staleness=1", "placement.mode=colocate"])
    config.sampler.backend = "sglang"
    config.learner.device = "cuda"
    with pytest.raises(ConfigError, match=r"async\.max_staleness=1.*placement\.mode=disaggregate"):
        check_placement(config, config.sampler.device)
