"""Layers of a configuration: preset, files in their order, command line; and where each value came from."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
import yaml

from agentrl.algo.batch_loss import make_objective
from agentrl.api.settings import has_gpu
from agentrl.cli.main import build_parser, main
from agentrl.cli.options import config_layers
from agentrl.config.algo import AlgoConfig
from agentrl.config.layers import Layer, annotate, differences, leaf_texts, load_layers
from agentrl.config.load import load_config, shipped_folder
from agentrl.core.errors import ConfigError

RECIPES = [f"algo/{path.stem}" for path in sorted((shipped_folder() / "algo").glob("*.yaml"))]
CPU = "preset search_r1/gpu" if has_gpu() else "preset search_r1/cpu"


def parsed(*words: str) -> argparse.Namespace:
    return build_parser("train").parse_args(["train", *words])


def origins(*words: str) -> dict[str, str]:
    """The origin of each key of the configuration of a command line, as the dry run shows them."""
    layers = config_layers(parsed(*words))
    text = annotate(load_layers(layers), layers)
    assert yaml.safe_load(text) == load_layers(layers).model_dump(mode="json"), "the comments change nothing"
    by_key, path = {}, []
    for line in text.splitlines():
        name, _, value_text = line.strip().partition(":")
        path[(len(line) - len(line.lstrip())) // 2 :] = [name]
        if "# " in value_text:
            by_key[".".join(path)] = value_text.rpartition("# ")[2]
    return by_key


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    first, second = tmp_path / "lr.yaml", tmp_path / "more.yaml"
    first.write_text("learner: {optimizer: {lr: 1.0e-5, warmup_steps: 2}}\n")
    second.write_text("learner: {optimizer: {lr: 2.0e-5}}\nrollout: {batch_size: 64}\n")
    return str(first), str(second)


def test_a_file_keeps_the_preset_of_the_environment(files: tuple[str, str]) -> None:
    config = load_layers(config_layers(parsed("--env", "search_r1", "--config", files[0])))
    preset = load_layers(config_layers(parsed("--env", "search_r1")))
    assert (config.train.steps, config.tasks.name) == (preset.train.steps, "multihop")
    assert {difference.key for difference in differences(preset, config)} == {
        "learner.optimizer.lr",
        "learner.optimizer.warmup_steps",
    }


def test_every_file_counts_and_each_value_has_its_origin(files: tuple[str, str]) -> None:
    words = ["--env", "search_r1", "--config", files[0], "--config", files[1], "rollout.batch_size=4", "train.steps=7"]
    config, actual_origins = load_layers(config_layers(parsed(*words))), origins(*words)
    optimizer = config.learner.optimizer
    assert (optimizer.lr, optimizer.warmup_steps, config.rollout.batch_size, config.train.steps) == (2e-5, 2, 4, 7)
    assert actual_origins["learner.optimizer.lr"] == f"--config {files[1]}"
    assert actual_origins["learner.optimizer.warmup_steps"] == f"--config {files[0]}"
    assert (
        actual_origins["rollout.batch_size"]
        == actual_origins["train.steps"]
        == actual_origins["env.name"]
        == "command line"
    )
    assert actual_origins["rollout.max_turns"] == CPU
    assert actual_origins["run.seed"] == "default"
    backwards = config_layers(parsed("--config", files[1], "--config", files[0]))
    assert load_layers(backwards).learner.optimizer.lr == 1e-5


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ((), CPU),
        (("--env", "search_r1"), CPU),
        (("env.name=search_r1",), CPU),
        (("env.name=single_turn",), None),
        (("--config", "search_r1/cpu_discover"), "preset search_r1/cpu_discover"),
        (("--env", "search_r1", "--config", "search_r1/cpu_discover"), "preset search_r1/cpu_discover"),
    ],
)
def test_the_preset_is_that_of_the_environment_or_the_one_named(words: tuple[str, ...], preset: str | None) -> None:
    actual_origins = [layer.origin for layer in config_layers(parsed(*words)) if layer.origin.startswith("preset")]
    assert actual_origins == ([preset] if preset else [])


def test_a_file_without_an_environment_is_the_whole_configuration(files: tuple[str, str]) -> None:
    layers = config_layers(parsed("--config", files[0], "train.steps=3"))
    assert load_layers(layers).tasks.name is None
    assert not any(layer.origin.startswith("preset") for layer in layers)


@pytest.mark.parametrize(
    ("words", "preset"),
    [
        ((), CPU),
        (("--env", "search_r1"), CPU),
        (("--config", "search_r1/cpu_discover"), "preset search_r1/cpu_discover"),
        (("--config", "FILE"), None),
        (("--env", "search_r1", "--config", "FILE"), CPU),
    ],
)
def test_a_recipe_is_put_on_any_preset(words: tuple[str, ...], preset: str | None, files: tuple[str, str]) -> None:
    words = tuple(word.replace("FILE", files[0]) for word in words)
    plain, layers = config_layers(parsed(*words)), config_layers(parsed(*words, "--config", "algo/gspo"))
    assert [layer.origin for layer in layers if layer.origin.startswith("preset")] == ([preset] if preset else [])
    assert [layer.origin for layer in layers][:-1] == [*[layer.origin for layer in plain][:-1], "recipe algo/gspo"]
    assert load_layers(layers).algo.loss.name == "gspo"


def test_the_dry_run_shows_what_a_recipe_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--env", "search_r1", "--config", "algo/gspo", "--dry-run"]) == 0
    text, plan = capsys.readouterr()
    assert re.search(r"    name: gspo +# recipe algo/gspo\n", text)
    assert re.search(r"  aggregation: sequence_mean +# recipe algo/gspo\n", text)
    assert "grpo advantages, gspo loss" in plan


@pytest.mark.parametrize("below", RECIPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_on_another_is_the_whole_recipe(recipe: str, below: str) -> None:
    layers = config_layers(parsed("--config", below, "--config", recipe))
    alone = load_layers(config_layers(parsed("--config", recipe)))
    assert differences(alone, load_layers(layers)) == []


def test_the_origin_of_what_a_recipe_replaces_is_the_recipe() -> None:
    actual_origins = origins("--config", "algo/gspo", "--config", "algo/cispo")
    assert {origin for key, origin in actual_origins.items() if key.startswith("algo.loss")} == {"recipe algo/cispo"}


def test_options_go_with_the_name_they_are_for(tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text("algo: {loss: {options: {clip_low: 0.1}}, advantage: {name: grpo, options: {std_eps: 0.1}}}\n")

    def algo(*words: str) -> AlgoConfig:
        return load_layers(config_layers(parsed("--config", str(base), *words))).algo

    assert algo("--config", "algo/cispo").loss.options == {"clip_high": 2.0}, "options without a name are the default's"
    assert algo("algo.loss.name=reinforce").loss.options == {}
    assert algo("algo.loss.name=reinforce").advantage.options == {"std_eps": 0.1}
    assert algo("algo.loss.name=ppo_clip").loss.options == {"clip_low": 0.1}, "the same loss"
    assert algo("algo.loss.options.clip_high=0.3").loss.options == {"clip_low": 0.1, "clip_high": 0.3}
    assert algo("algo.advantage.name=rloo").advantage.options == {}
    for words in (("algo.loss.options.clip_high=3", "algo.loss.name=cispo"), ("algo.loss={name: cispo}",)):
        assert algo(*words).loss.name == "cispo", "settings of the command line are one layer, in any order"
    assert load_config(base, ["algo.loss.name=cispo"]).algo.loss.options == {}
    with pytest.raises(ConfigError, match=r"unknown key 'algo\.loss\.options\.clip_low'"):
        make_objective(algo("algo.loss.name=cispo", "algo.loss.options.clip_low=0.1"))
    with pytest.raises(ConfigError, match=r"algo\.loss"):
        algo("algo.loss=null")
    actual_origins = origins("--config", str(base), "algo.loss.name=cispo", "algo.advantage.name=rloo")
    assert actual_origins["algo.loss.options"] == actual_origins["algo.advantage.options"] == "default"


def test_text_of_any_kind_stays_one_line() -> None:
    template = "a # b\n  c: d\té\x00"
    layers = [Layer("x", {"env": {"options": {"text": template, "list": [template, {"k": 1}], "a: b": 1e-5}}})]
    text = annotate(load_layers(layers), layers)
    assert yaml.safe_load(text)["env"]["options"] == layers[0].tree["env"]["options"]
    assert all(line.rstrip().endswith(("# x", "# default")) or ":" in line for line in text.splitlines())


def test_differences_are_by_key() -> None:
    state_before = load_config(None, ["env.options={a: 1, b: 2}"])
    config_after = load_config(None, ["env.options={b: 3, c: 4}", "learner.optimizer.lr=1e-5"])
    assert list(map(str, differences(state_before, config_after))) == [
        "env.options.b: 2 → 3",
        "env.options.c: null → 4",
        "learner.optimizer.lr: auto → 1.0e-05",
        "env.options.a: 1 → null",
    ]
    assert differences(state_before, state_before) == []


def test_values_are_text_as_yaml_has_them() -> None:
    values = {"a": 0.0, "b": {"c": -0.0, "d": 1e-6, "e": float("inf")}, "f": [], "g": [0.5], "h": "1.5", "i": None}
    texts = {"a": "0.0", "b.c": "-0.0", "b.d": "1.0e-06", "b.e": ".inf", "f": "[]", "g": "[0.5]", "h": "'1.5'"}
    assert leaf_texts(values) == texts


def test_sft_shows_origins_and_no_secret_too(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["sft", "--config", "search_r1/sft_warm", "tools.search.options.client.token=abcd", "--dry-run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "abcd" not in text
    assert "# preset search_r1/sft_warm" in text
