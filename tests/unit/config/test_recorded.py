"""Keys that a run recorded, compared with those of a later program: it may have keys that the recorded run did not know."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config.recorded import FIXED, GROUPED, SAMPLED, TRAINED, changed_keys, recorded_keys, recorded_value
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import Checkpoints
from agentrl.sft.resume import check_resumed, sft_keys
from agentrl.testing import FakeLearner

KINDS = (*FIXED, *SAMPLED, *GROUPED, *TRAINED)


def keys_of(**tree: Any) -> dict[str, str]:
    return recorded_keys(Config.model_validate(tree))


def without(keys: dict[str, str], name: str) -> dict[str, str]:
    assert name in keys
    return {key: value for key, value in keys.items() if key != name}


@pytest.mark.parametrize("name", ["rollout.max_turns", "data.streaming", "sampler.top_p", "algo.kl_coef", "run.seed"])
def test_a_key_that_was_not_recorded_had_its_default(name: str) -> None:
    keys = keys_of()
    older = without(keys, name)
    assert changed_keys(older, keys, KINDS) == []
    [change] = changed_keys(older, keys | {name: "another"}, KINDS)
    assert (change.key, change.before, change.after) == (name, keys[name], "another")


def test_a_key_of_an_optional_section_had_its_default_if_the_section_was_there() -> None:
    keys = keys_of(learner={"lora": {"alpha": 8}})
    assert changed_keys(without(keys, "learner.lora.rank"), keys, KINDS) == []
    changes = {change.key: change.before for change in changed_keys(keys_of(), keys, KINDS)}
    assert changes["learner.lora.rank"] == changes["learner.lora.alpha"] == "null"
    assert recorded_value({"tools.search.command": "x"}, "tools.search.max_restarts") == "3"
    assert recorded_value({}, "sources.math.weight") == "null", "a source without a key has that of the run"


def test_supervised_fine_tuning_is_resumed_with_keys_that_it_did_not_know(tmp_path: Path) -> None:
    config = Config.model_validate({"learner": {"replicas": 1}})
    keys = sft_keys(config, "crc")
    checkpoints = Checkpoints(tmp_path, keep=1)
    folder = checkpoints.save(1, FakeLearner(), {"keys": without(keys, "learner.replicas")})
    checkpoints.finish()
    check_resumed(folder, keys)
    with pytest.raises(ConfigError, match=r"learner\.replicas: 1 -> 2"):
        check_resumed(folder, keys | {"learner.replicas": "2"})
