"""The shipped policies: small, with a tokenizer that the committed recipe makes again."""

from pathlib import Path

import pytest
from agentrl_tasks.multihop.make_policy import make_policy
from agentrl_tasks.multihop.tokenizer import TAGS, VOCABULARY

from agentrl.core.registry import make_env, make_tasks, model_folder
from agentrl.models.load import load_model, load_tokenizer
from agentrl.render.registry import make_renderer

NAMES = ("multihop-warm", "multihop-discover")


def folder(name: str) -> Path:
    actual_model_folder = model_folder(name)
    assert actual_model_folder is not None
    return actual_model_folder


@pytest.mark.parametrize("name", NAMES)
def test_shipped_models_are_small_and_load(name: str) -> None:
    model = load_model(folder(name))
    assert sum(p.numel() for p in model.parameters()) <= 3_500_000
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == VOCABULARY == len(load_tokenizer(folder(name)))


def test_all_shipped_files_stay_below_8_mb() -> None:
    files = [file for name in NAMES for file in folder(name).iterdir()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000


def test_recipe_makes_the_shipped_tokenizer_and_architecture(tmp_path: Path) -> None:
    make_policy(tmp_path)
    for name in NAMES:
        assert (tmp_path / "tokenizer.json").read_bytes() == (folder(name) / "tokenizer.json").read_bytes()
        new, shipped = load_model(tmp_path), load_model(folder(name))
        assert {k: v.shape for k, v in new.state_dict().items()} == {
            k: v.shape for k, v in shipped.state_dict().items()
        }


def test_every_word_of_the_prompt_and_every_tag_is_one_token() -> None:
    renderer = make_renderer(load_tokenizer(folder("multihop-warm")))
    task = make_tasks("multihop").split("eval")[2]
    observation, _ = make_env("search_r1").reset(options={"task": task})
    ids = renderer.render(observation).token_ids
    assert renderer.decode(ids).count("<|im_start|>") == 2
    tokens = [renderer.decode([i]).strip() for i in ids]
    for word in observation[-1].content.split("Question:")[0].replace(".", " ").replace(",", " ").split():
        assert word in tokens, word
    for tag in TAGS:
        assert len(renderer.encode(tag)) == 1


def test_turns_and_observations_meet_at_token_borders() -> None:
    renderer = make_renderer(load_tokenizer(folder("multihop-warm")))
    turn = "<think> mayor </think><search> Tamo Rilek </search>"
    read = '\n\n<information>Doc 1(Title: "Tamo Rilek") Tamo Rilek was born in Loraveston.</information>\n\n'
    goes_on = "<think> answer </think><answer> Loraveston </answer>"
    apart = renderer.encode(turn) + renderer.encode(read) + renderer.encode(goes_on)
    assert apart == renderer.encode(turn + read + goes_on)
    assert renderer.decode(apart) == turn + read + goes_on


def test_names_take_about_four_tokens_and_documents_are_short() -> None:
    renderer = make_renderer(load_tokenizer(folder("multihop-warm")))
    documents = make_tasks("multihop").held_out_world.documents
    names = [len(renderer.encode(f" {d.title}")) for d in documents]
    lengths = [len(renderer.encode(f'Doc 1(Title: "{d.title}") {d.text}\n')) for d in documents]
    assert sum(names) / len(names) < 4.5
    assert sum(lengths) / len(lengths) < 40
