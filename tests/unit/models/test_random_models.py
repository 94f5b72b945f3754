"""Random models: the size they say they have, and a tokenizer for every id."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from agentrl.core.errors import ConfigError
from agentrl.models.load import load_model, load_tokenizer
from agentrl.models.random_models import SHAPES, Shape, find_model_shape, model_config, write_random_model
from agentrl.models.resolve import resolve_model

UNTIED = Shape(32, 48, 1, 4, 2, 16, 1600, False)


@pytest.mark.parametrize("shape", [SHAPES["tiny"], SHAPES["tiny-moe"], UNTIED])
def test_the_model_is_of_its_shape(tmp_path: Path, shape: Shape) -> None:
    write_random_model(tmp_path / "m", shape, weights=True)
    model = load_model(tmp_path / "m")
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.parameters
    assert model.get_input_embeddings().weight.std() > 0.01


@pytest.mark.parametrize("size", SHAPES)
def test_a_written_configuration_is_that_of_the_model(tmp_path: Path, size: str) -> None:
    write_random_model(tmp_path / "m", SHAPES[size])
    written: Any = AutoConfig.from_pretrained(tmp_path / "m")
    assert written.to_dict() | {"_name_or_path": ""} == model_config(SHAPES[size]).to_dict()


def test_sizes_are_what_their_names_say() -> None:
    assert SHAPES["0.6b"].parameters == 596_049_920
    assert SHAPES["8b"].parameters == 8_190_735_360
    full_shape = replace(SHAPES["30b-a3b-12"], num_hidden_layers=48)
    assert (full_shape.parameters, full_shape.active_parameters) == (30_532_122_624, 3_353_032_704)
    with pytest.raises(ConfigError, match=r"size '9b': there are tiny, 0\.6b, 4b, 8b"):
        find_model_shape("9b")


def test_every_id_has_a_text_and_no_text_has_the_new_ids(tmp_path: Path) -> None:
    source = resolve_model("multihop-warm")
    write_random_model(tmp_path / "m", SHAPES["tiny"], tokenizer=source)
    old: Any = load_tokenizer(source)
    made: Any = load_tokenizer(tmp_path / "m")
    assert made.chat_template == old.chat_template
    for text in ("What is 7?", "Ġfill1800 fill1800"):
        assert made.encode(text) == old.encode(text)
    assert made.decode([1800, 1801]) == " fill1800 fill1801"
    assert made.decode(made.encode("Is it 7?<answer>")) == "Is it 7?<answer>"
    assert max(made.encode("<answer>")) < SHAPES["tiny"].vocab_size
    assert len(made) == SHAPES["tiny"].vocab_size


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    small = Shape(32, 48, 1, 4, 2, 16, 1000, True)
    with pytest.raises(ConfigError, match=r"model\.path=.*1536 tokens, the random model only 1000"):
        write_random_model(tmp_path / "m", small, tokenizer=resolve_model("multihop-warm"))
