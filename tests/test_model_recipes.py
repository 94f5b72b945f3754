"""Recipes of models: each fits on every preset, and its layout fits the GPUs that it names, by the estimate of `agentrl plan`."""

import re
from pathlib import Path

import pytest

from agentrl.cli.main import build_parser
from agentrl.cli.options import config_layers
from agentrl.config.engine_checks import check_placement
from agentrl.config.layers import Layer, load_layers
from agentrl.config.load import default_config, read_yaml, shipped_folder
from agentrl.learner.registry import make_backend
from agentrl.models.shipped_architectures import shipped_architectures
from agentrl.planner.engine import MACHINE, Gpus
from agentrl.planner.plan import make_plan

PAGE = (Path(__file__).parent.parent / "docs" / "reference" / "presets.md").read_text()
RECIPES = {path.stem: path for path in sorted((shipped_folder() / "models").glob("*.yaml"))}
SAME = {"glm4.6": "glm4.5", "glm4.7": "glm4.5", "deepseek_v3.1": "deepseek_v3", "deepseek_r1": "deepseek_v3"}
"""Recipes of the same architecture, and so with the same layout."""


def gpus(name: str) -> Gpus:
    """Return the GPUs that the second line of a recipe names."""
    line = RECIPES[name].read_text().splitlines()[1]
    match = re.search(r" on (\d+) × (H\d+)(?: 80 GB)? \((one GPU|one machine|(\d+) machines)\): ", line)
    assert match is not None, line
    count = int(match[1])
    assert (match[3] == "one GPU") == (count == 1)
    assert int(match[4] or 1) == -(-count // MACHINE)
    return Gpus.parse(count, match[2])


@pytest.mark.parametrize("env", ["search_r1", "python_math", "code_contest"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_fits_on_every_preset(name: str, env: str) -> None:
    words = ["--env", env, "--config", f"models/{name}"]
    command = f"# agentrl train --env search_r1 --config models/{name}"
    assert RECIPES[name].read_text().splitlines()[0] == command
    layers = config_layers(build_parser("train").parse_args(["train", *words]))
    assert [layer.origin for layer in layers][2] == f"recipe models/{name}"
    assert {*layers[2].tree} == {"model", "render", "placement", "sampler", "batch", "learner", "weights"}
    on_gpus = default_config(env, gpu=True)
    assert on_gpus is not None
    for config in (load_layers(layers), load_layers([layers[0], Layer("gpu", read_yaml(on_gpus)), layers[2]])):
        check_placement(config, "cuda")
        assert (config.learner.device, config.sampler.backend) == ("cuda", "sglang")
        assert config.learner.optimizer.lr == "auto", "no preset's rate for a small policy is left"
        assert config.sampler.context_length is None
        assert config.sampler.sglang_options.get("attention_backend") is None


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in SAME])
def test_the_layout_fits_the_gpus_that_are_named(name: str) -> None:
    text, tree = RECIPES[name].read_text(), read_yaml(RECIPES[name])
    assert tree["model"]["path"] in shipped_architectures()
    rows = re.search(
        r"^# Rows of up to ([\d,]+) tokens fit by the estimate of agentrl plan\. Not run\.$", text, re.MULTILINE
    )
    assert rows is not None
    long = Layer("rows", {"rollout": {"max_tokens": int(rows[1].replace(",", ""))}})
    [option] = make_plan([Layer("recipe", tree), long], gpus(name)).options
    assert option.faults == ()
    config = load_layers([Layer("recipe", tree)])
    make_backend(config.learner).check(config.algo, [shipped_architectures()[tree["model"]["path"]]])
    used = tree["learner"]["ranks"]
    assert used == gpus(name).count
    if option.engines is not None:
        assert tree["sampler"]["engines"] * tree["sampler"]["sglang"]["tp_size"] == used
        assert option.engines.engines == tree["sampler"]["engines"]
    assert option.settings is not None
    kept_keys = {"backend", "ranks", "recompute", "reshard_after_forward", "megatron"}
    proposed = {key: value for key, value in option.settings["learner"].items() if value != {}}
    assert proposed == {key: value for key, value in tree["learner"].items() if key in kept_keys}, (
        "the recipe sets all of it"
    )


@pytest.mark.parametrize("name", SAME)
def test_one_architecture_has_one_layout(name: str) -> None:
    recipe, same_recipe = (read_yaml(RECIPES[each]) for each in (name, SAME[name]))
    for tree in (recipe, same_recipe):
        del tree["model"], tree["render"]
    assert recipe == same_recipe
    assert gpus(name) == gpus(SAME[name])


def test_the_page_lists_every_recipe_of_a_model() -> None:
    rows = re.findall(r"^\| `models/([\w.]+)` \| (\S+) \| (\d+) × (\w+) \| `(\w+)` \| (.+?) \|$", PAGE, re.MULTILINE)
    assert sorted(row[0] for row in rows) == sorted(RECIPES)
    for name, model, count, kind, backend, engines in rows:
        tree, named = read_yaml(RECIPES[name]), gpus(name)
        assert (model, int(count), kind.lower()) == (tree["model"]["path"], named.count, named.name)
        assert backend == tree["learner"]["backend"]
        sampler = tree["sampler"]
        ours = "url" not in sampler
        assert engines == (f"{sampler['engines']} × {sampler['sglang']['tp_size']}" if ours else "`sampler.url`")
