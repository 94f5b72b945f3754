import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentrl.core.errors import ModelError
from agentrl.models.load import as_dtype, load_model, load_tokenizer, read_max_positions, read_vocab_size
from agentrl.models.resolve import resolve_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        intermediate_size=16, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_local_folder_is_taken(folder: Path) -> None:
    assert resolve_model(str(folder)) == folder


def test_a_folder_without_a_model_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.path={tmp_path}.*config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelError, match=r"model\.path=.*model\.gguf: it is a file"):
        resolve_model(str(tmp_path / "model.gguf"), fetch=False)


def test_a_missing_folder_names_the_key() -> None:
    with pytest.raises(ModelError, match=r"model\.path=/no/such/folder: there is no such folder.*multihop-warm"):
        resolve_model("/no/such/folder")


def test_the_message_for_a_hub_id_names_offline_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"model\.path=nobody/nothing.*HF_HUB_OFFLINE=1.*Set model\.path"):
        resolve_model("nobody/nothing")


def test_a_model_loads_in_the_requested_dtype(folder: Path) -> None:
    model = load_model(folder, "bfloat16")
    assert model.dtype == torch.bfloat16
    assert not model.training
    with pytest.raises(ModelError, match="float33"):
        as_dtype("float33")


def test_missing_weights_are_no_random_ones(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weights are missing, such as 'model\.norm\.weight'"):
        load_model(folder)


def test_messages_about_a_missing_model_or_tokenizer_name_the_folder(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"model\.path={tmp_path}: the model cannot be loaded"):
        load_model(tmp_path)
    with pytest.raises(ModelError, match=rf"model\.path={folder} holds no tokenizer"):
        load_tokenizer(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=rf"model\.path={folder}: its tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_a_tokenizer_is_read_once_and_again_when_its_files_change(tmp_path: Path) -> None:
    shipped = resolve_model("multihop-warm")
    for file in shipped.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    first = load_tokenizer(tmp_path)
    own_chat_template, first.chat_template = first.chat_template, "of this caller alone"
    again = load_tokenizer(tmp_path)
    assert again.backend_tokenizer is first.backend_tokenizer
    assert again.chat_template == own_chat_template
    (tmp_path / "chat_template.jinja").write_text("new")
    assert load_tokenizer(tmp_path).chat_template == "new"
    with pytest.raises(ModelError, match=r"^--tokenizer="):
        load_tokenizer(tmp_path / "..", "--tokenizer")


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"max_position_embeddings": 512, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"max_position_embeddings": 512, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 512),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"model_type": "mamba"}, None),
    ],
)
def test_the_most_tokens_that_a_model_takes(tmp_path: Path, config: dict[str, object], positions: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_max_positions(tmp_path) == positions


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"vocab_size": "many"}', '{"vocab_size": 0}', "{}", '{"text_config": 3}']
)
def test_a_vocabulary_that_a_configuration_does_not_have(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_vocab_size(tmp_path)
