"""The section ``async``: its key, and what it does not go with."""

import re

import pytest
import yaml

from agentrl.config.engine_checks import check_placement
from agentrl.config.load import dump, load_config, validate
from agentrl.core.errors import ConfigError


def test_the_section_is_named_async_wherever_a_user_reads_it() -> None:
    config = load_config(None, ["async.max_staleness=3"])
    assert config.asynchronous.max_staleness == 3
    written = yaml.safe_load(dump(config))
    assert written["async"] == {"max_staleness": 3, "mask_older_than": None, "streaming": False}
    assert validate(written) == config
    with pytest.raises(ConfigError, match=r"async\.max_stale'\. Did you mean 'async\.max_staleness'"):
        load_config(None, ["async.max_stale=3"])
    with pytest.raises(ConfigError, match=r"async\.max_staleness=-1"):
        load_config(None, ["async.max_staleness=-1"])


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("weights.sync_every=9", r"weights\.sync_every=9"),
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


def test_a_time_limit_for_stragglers_without_staleness_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"rollout\.straggler_timeout_s=9 with async\.max_staleness=0: a step waits for all"
    ):
        load_config(None, ["rollout.straggler_timeout_s=9"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("weights.pause=finish", r"weights\.pause=finish.*set weights\.pause=abort or restart"),
        ("sampler.router=sglang", r"sampler\.router=sglang: the router would send requests to engines without memory"),
    ],
)
def test_engines_that_share_gpus_with_the_learner_keep_no_requests(setting: str, message: str) -> None:
    shared = ["async.max_staleness=1", "placement.mode=colocate"]
    check_placement(load_config(None, shared), "cpu")
    with pytest.raises(ConfigError, match=message):
        check_placement(load_config(None, [*shared, setting]), "cpu")


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps_per_rollout=2",
        "placement.mode=colocate",
        "learner.megatron.overlap_grad_reduce=True",
    ],
)
def test_streaming_refuses_what_needs_all_groups_of_a_step(setting: str) -> None:
    assert load_config(None, ["async.streaming=true"]).asynchronous.streaming
    key = setting.partition("=")[0] if "overlap" in setting else setting
    with pytest.raises(ConfigError, match=re.escape(f"async.streaming=true with {key}")):
        load_config(None, ["async.streaming=true", setting, "learner.backend=megatron"])
