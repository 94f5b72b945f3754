import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agentrl.core.errors import ModelError
from agentrl.models.resolve import resolve_model
from agentrl.models.token_text import token_decoder

TEXT = " The snow☃man said 🙂 <|im_end|>\n  twice, naïvely\x00."


def joined(texts):
    return b"".join(text.encode() if isinstance(text, str) else text for text in texts)


@pytest.fixture
def byte_fallback(tmp_path):
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {
        "▁": 256,
        "a": 257,
        "b": 258,
        "▁a": 259,
        "<s>": 260,
    }
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    replace, strip = decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), strip])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_bytes_of_byte_level_tokens():
    folder = resolve_model("multihop-warm")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids
    texts = token_decoder(folder)(ids)
    assert joined(texts) == TEXT.encode()
    assert any(isinstance(text, bytes) for text in texts)


def test_spaces_and_bytes_of_sentencepiece_tokens(byte_fallback):
    texts = token_decoder(byte_fallback)([259, 258, 259, *"☃".encode(), 260, 999])
    assert texts[:3] == [" a", "b", " a"]
    assert joined(texts[3:6]).decode() == "☃"
    assert all(isinstance(text, bytes) for text in texts[3:6])
    assert texts[6:] == ["<s>", "<id 999>"]


def test_folders_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
        token_decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        token_decoder(tmp_path)
