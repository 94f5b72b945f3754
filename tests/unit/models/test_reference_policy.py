"""Which folder is a run's reference policy, and whether it fits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from agentrl.config.layers import Layer, load_layers, save_config, saved_layers
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.reference_policy import check_reference, pin_reference, resolve_critic, resolve_reference
from tests.algo_config import make_algo
from tests.vision_folders import write_processor_folder

WITH_KL = "algo.kl_coef=0.001"


def folder(path: Path, words: list[str], size: int) -> Path:
    """A model's configuration of ``size`` ids with a tokenizer of ``words``; without weights, which are not needed."""
    vocabulary = {word: number for number, word in enumerate(words)}
    if words:
        inner = Tokenizer(models.WordLevel(vocabulary, unk_token=words[0]))
        PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=words[0]).save_pretrained(path)
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    return path


def test_without_a_kl_term_there_is_no_reference():
    assert resolve_reference(load_config(None, ["algo.reference=/no/such/folder"])) is None


def test_the_default_is_the_model(tmp_path):
    model_folder = folder(tmp_path / "model", ["a"], 8)
    assert resolve_reference(load_config(None, [WITH_KL, f"model.path={model_folder}"])) == model_folder
    other_folder = folder(tmp_path / "other", ["a"], 8)
    config = load_config(None, [WITH_KL, f"model.path={model_folder}", f"algo.reference={other_folder}"])
    assert resolve_reference(config) == other_folder


def test_an_unknown_reference_names_its_key():
    with pytest.raises(ModelError, match=r"algo\.reference=/no/such/folder: there is no such folder"):
        resolve_reference(load_config(None, [WITH_KL, "algo.reference=/no/such/folder"]))


@pytest.mark.parametrize("kl", [WITH_KL, "algo.kl_coef=0"])
def test_the_reference_is_written_down_at_the_start_with_a_kl_term_and_without(tmp_path, kl):
    first, warm = (folder(tmp_path / name, ["a"], 8) for name in ("first", "warm"))
    started = pin_reference(load_config(None, [kl, f"model.path={first}"]))
    assert started.algo.reference == str(first)
    assert pin_reference(load_config(None, [kl, f"model.path={first}"]), warm).algo.reference == str(warm)
    assert pin_reference(started, warm) == started, "a resumed run, which reads it from its folder, keeps it"


def test_a_kl_term_added_on_resuming_is_to_the_warm_started_model(tmp_path):
    first, warm = (folder(tmp_path / name, ["a"], 8) for name in ("first", "warm"))
    save_config(pin_reference(load_config(None, [f"model.path={first}"]), warm), tmp_path)
    resumed = load_layers([*saved_layers(tmp_path), Layer("command line", {"algo": {"kl_coef": 0.001}})])
    assert resolve_reference(pin_reference(resumed)) == warm


def test_what_is_set_is_left_alone():
    config = load_config(None, [WITH_KL, "algo.reference=x"])
    assert pin_reference(config) == config


def test_a_vocabulary_may_be_larger_than_the_tokenizer_and_not_smaller(tmp_path):
    policy = folder(tmp_path / "policy", ["a", "b", "c"], 8)
    check_reference(policy, folder(tmp_path / "padded", ["a", "b", "c"], 3), trust_remote_code=False)
    check_reference(policy, folder(tmp_path / "wide", ["a", "b", "c"], 64), trust_remote_code=False)
    check_reference(policy, folder(tmp_path / "silent", [], 3), trust_remote_code=False)
    with pytest.raises(
        ConfigError, match=r"algo\.reference=\S+small: its vocabulary has 2 tokens, the tokenizer of \S+ has 3;"
    ):
        check_reference(policy, folder(tmp_path / "small", ["a", "b"], 2), trust_remote_code=False)


def test_another_tokenizer_is_refused_although_the_sizes_agree(tmp_path):
    policy = folder(tmp_path / "policy", ["a", "b", "c"], 8)
    with pytest.raises(ConfigError, match=r"\(3 tokens\) is not the policy's \(3 tokens.*from id 1 on"):
        check_reference(policy, folder(tmp_path / "odd", ["a", "x", "c"], 8), trust_remote_code=False)
    with pytest.raises(ConfigError, match=r"\(4 tokens\) is not the policy's \(3 tokens.*from id 3 on, at 'd'"):
        check_reference(policy, folder(tmp_path / "more", ["a", "b", "c", "d"], 8), trust_remote_code=False)


def test_a_configuration_without_a_vocabulary_is_an_error(tmp_path):
    policy, odd = folder(tmp_path / "policy", ["a"], 8), folder(tmp_path / "odd", ["a"], 8)
    (odd / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"odd/config\.json: vocab_size=None is not a number"):
        check_reference(policy, odd, trust_remote_code=False)
    (odd / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 8}}))
    check_reference(policy, odd, trust_remote_code=False)


def test_a_critic_starts_from_the_policy_or_its_own_folder(tmp_path: Path) -> None:
    policy, critic = (write_processor_folder(tmp_path / name, "qwen2.5-vl") for name in ("policy", "critic"))
    assert resolve_critic(make_algo(advantage={"name": "gae"}), policy) == policy
    assert resolve_critic(make_algo(advantage={"name": "gae"}, critic={"path": str(critic)}), policy) == critic
    assert resolve_critic(make_algo(), policy) is None
