"""The names in the configuration are those that there are."""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import LlamaConfig

from agentrl.config.model import FormatName, ParserName, RenderConfig
from agentrl.core.errors import ModelError
from agentrl.core.registry import model_folder
from agentrl.inference.embedded.model import Model
from agentrl.models.load import load_tokenizer, read_end_ids
from agentrl.render.formats.package import PACKAGE_FORMATS
from agentrl.render.parsers.registry import PARSERS, SIGNS
from agentrl.render.registry import FORMATS, load_renderer, make_renderer


def test_every_format_that_can_be_named_is_there():
    assert sorted(get_args(FormatName)) == sorted(["auto", "template", *FORMATS, *PACKAGE_FORMATS])


def test_every_parser_that_can_be_named_is_there():
    assert sorted(get_args(ParserName)) == sorted(["auto", *PARSERS])
    assert {name for _, name in SIGNS} <= set(PARSERS)


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_has_its_name_and_a_parser_that_can_be_named(name):
    format = FORMATS[name](RenderConfig())
    assert format.name == ("chatml" if name == "smollm2" else name), "SmolLM2's is ChatML with a system message"
    assert type(format.parser) in PARSERS.values()


_WARM = model_folder("multihop-warm")
assert _WARM is not None
WARM: Path = _WARM
CONFIG = json.loads((WARM / "config.json").read_text())


def copy_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None) -> Path:
    """Return a copy of a policy without weights, with other configurations."""
    for path in WARM.iterdir():
        if path.suffix in (".json", ".jinja"):
            shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def special(count: int) -> list[int]:
    """Return special tokens that do not end turns of the chat format."""
    tokenizer = load_tokenizer(WARM)
    ends = make_renderer(tokenizer).end_token_ids
    return [index for index, token in tokenizer.added_tokens_decoder.items() if token.special and index not in ends][
        :count
    ]


@pytest.mark.parametrize(
    ("config", "generation", "count"),
    [
        ({}, {"eos_token_id": 0}, 1),
        ({}, {"eos_token_id": [0, 1]}, 2),
        ({"eos_token_id": 0}, None, 1),
        ({"eos_token_id": 0}, {"eos_token_id": None}, 1),
        ({"eos_token_id": 0}, {"eos_token_id": 1}, 2),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [0]}}, {}, 1),
    ],
    ids=range(6),
)
def test_the_renderer_knows_every_token_at_which_engines_end_a_turn(tmp_path, config, generation, count):
    """Those of ``config.json`` and of ``generation_config.json``, as numbers or lists. They are no part of the turn's text."""
    numbers = special(2)

    def named(values):
        ids = values.get("eos_token_id")
        replaced = [numbers[index] for index in ids] if isinstance(ids, list) else None if ids is None else numbers[ids]
        inner = {key: named(value) for key, value in values.items() if isinstance(value, dict)}
        return {**values, **inner, **({"eos_token_id": replaced} if "eos_token_id" in values else {})}

    folder = copy_of(tmp_path, {**CONFIG, **named(config)}, None if generation is None else named(generation))
    renderer, without = load_renderer(folder), make_renderer(load_tokenizer(folder))
    assert renderer.end_token_id == without.end_token_id
    assert {*renderer.end_token_ids} == {*without.end_token_ids, *numbers[:count]} | set(read_end_ids(folder))
    for end in renderer.end_token_ids:
        assert renderer.parse((*renderer.encode("Paris"), end)).content == "Paris"


def test_the_embedded_engine_ends_turns_at_the_same_tokens(tmp_path):
    end = special(1)[0]
    folder = copy_of(tmp_path, CONFIG, {"eos_token_id": [end]})
    shutil.copy(WARM / "model.safetensors", folder)
    engine = Model(folder, torch.float32, slots=2, context=64)
    assert end in engine.end_ids
    assert engine.end_ids <= set(load_renderer(folder).end_token_ids)


def test_a_configuration_without_an_end_has_that_of_its_class(tmp_path):
    llama = {"model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    assert read_end_ids(tmp_path) == (LlamaConfig().eos_token_id,)
    (tmp_path / "config.json").write_text(json.dumps(llama | {"eos_token_id": None}))
    assert read_end_ids(tmp_path) == ()


@pytest.mark.parametrize("end", ["</s>", 1.5, [2, "x"]])
def test_an_end_that_is_no_token_id_is_refused(tmp_path, end):
    folder = copy_of(tmp_path, CONFIG, {"eos_token_id": end})
    with pytest.raises(ModelError, match=r"generation_config\.json: eos_token_id=.* is not a token id"):
        load_renderer(folder)


def test_an_end_that_is_ordinary_text_is_refused(tmp_path):
    """A generation configuration of another model: engines would end every turn at this text."""
    [index] = make_renderer(load_tokenizer(WARM)).encode("a")
    folder = copy_of(tmp_path, CONFIG, {"eos_token_id": index})
    with pytest.raises(ModelError, match=rf"eos_token_id in .* has {index}, which is 'a'"):
        load_renderer(folder)
