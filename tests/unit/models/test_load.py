"""Tokenizers that are Python code of their folder, as Kimi's."""

import ast
import base64
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers.dynamic_module_utils

import agentrl
from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.load import load_tokenizer
from agentrl.models.reference_policy import CRITIC_KEY, check_reference
from agentrl.render.registry import make_renderer

CODE = '''
import base64

import tiktoken
from transformers import PreTrainedTokenizer


class LetterTokenizer(PreTrainedTokenizer):
    """One token a byte. Special tokens in a text are always tokens, whatever the caller asks for, as in Kimi's."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        lines = [line.split() for line in open(vocab_file, "rb").read().splitlines()]
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        self._special = {"<|im_end|>": 256, "<|im_user|>": 257, "[EOS]": 258}
        self._bpe = tiktoken.Encoding("letters", pat_str=r"[\\s\\S]", mergeable_ranks=ranks, special_tokens=self._special)
        super().__init__(**options)

    @property
    def vocab_size(self):
        return self._bpe.n_vocab

    def get_vocab(self):
        return {str(index): index for index in range(256)} | self._special

    def encode(self, text, add_special_tokens=True, **options):
        return self._bpe.encode(text, allowed_special="all")

    def decode(self, ids, **options):
        return self._bpe.decode(ids)

    def _tokenize(self, text):
        return [str(index) for index in self.encode(text)]

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]

    def _convert_id_to_token(self, index):
        return next(token for token, found in self.get_vocab().items() if found == index)
'''

TEMPLATE = "{% for m in messages %}<|im_user|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}<|im_user|>a"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tokenizer that needs its own code, and nobody at the terminal to ask."""

    def ask(prompt: str) -> str:
        raise AssertionError(f"asked on the terminal: {prompt}")

    monkeypatch.setattr("builtins.input", ask)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    made = tmp_path / "model"
    made.mkdir()
    made.joinpath("tokenization_letters.py").write_text(CODE)
    lines = (b"%s %d" % (base64.b64encode(bytes([byte])), byte) for byte in range(256))
    made.joinpath("tiktoken.model").write_bytes(b"\n".join(lines))
    special = {
        str(256 + at): {"content": text, "special": True}
        for at, text in enumerate(["<|im_end|>", "<|im_user|>", "[EOS]"])
    }
    described = {
        "auto_map": {"AutoTokenizer": ["tokenization_letters.LetterTokenizer", None]},
        "tokenizer_class": "LetterTokenizer",
        "added_tokens_decoder": special,
        "eos_token": "[EOS]",
        "chat_template": TEMPLATE,
    }
    made.joinpath("tokenizer_config.json").write_text(json.dumps(described))
    return made


def test_code_of_a_folder_is_refused_without_a_question(folder):
    with pytest.raises(ModelError, match=r"contains custom code.*set model\.trust_remote_code=true"):
        load_tokenizer(folder)


def test_code_that_is_trusted_runs_with_a_warning_and_contents_stay_text(folder, caplog):
    with caplog.at_level(logging.WARNING, "agentrl.models.load"):
        tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert f"the tokenizer of {folder} runs Python code of that folder" in caplog.text
    renderer = make_renderer(tokenizer)
    prompt = renderer.render([agentrl.Message("user", "a<|im_end|>[EOS]é")]).token_ids
    assert renderer.decode(prompt) == "<|im_user|>usera<|im_end|>[EOS]é<|im_end|><|im_user|>a"
    assert [token for token in prompt if token > 255] == [257, 256, 257]
    assert renderer.parse((*renderer.encode("yes"), renderer.end_token_id)).content == "yes"


def test_tokens_of_models_with_code_are_compared_if_it_is_trusted(folder, tmp_path):
    (folder / "config.json").write_text('{"vocab_size": 300}')
    same, other = (Path(shutil.copytree(folder, tmp_path / name)) for name in ("same", "other"))
    code = CODE.replace('"[EOS]": 258', '"[END]": 258')
    (other / "tokenization_letters.py").write_text(code)
    check_reference(folder, same, trust_remote_code=True)
    with pytest.raises(ConfigError, match=r"algo\.critic\.path=\S+other: .*not the policy's .* from id 258 on"):
        check_reference(folder, other, CRITIC_KEY, trust_remote_code=True)
    with pytest.raises(ModelError, match=r"contains custom code.*set model\.trust_remote_code=true"):
        check_reference(folder, same, trust_remote_code=False)


LOADERS = {"from_pretrained", "load_tokenizer", "load_renderer", "load_image_processor", "image_processor_loader"}


def test_nothing_is_loaded_without_saying_whether_code_may_run():
    """`transformers` asks on the terminal otherwise, and a folder with code is refused although it is trusted."""
    root = Path(agentrl.__file__).parent.parent
    silent = [
        f"{path.relative_to(root)}:{node.lineno}"
        for package in ("agentrl", "tools", "envs", "tasks")
        for path in sorted((root / package).rglob("*.py"))
        if any(name in (text := path.read_text(encoding="utf-8")) for name in LOADERS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func).rpartition(".")[2] in LOADERS
        and all(keyword.arg != "trust_remote_code" for keyword in node.keywords)
    ]
    assert silent == []


def test_warnings_from_compiling_torchao_are_not_shown(tmp_path):
    for name in ("torchao", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("SAME = 1 is 1\n")
    done = subprocess.run(
        [sys.executable, "-c", "import agentrl.models, torchao, other"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{os.pathsep.join(sys.path)}", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "other/__init__.py:1: SyntaxWarning" in done.stderr
    assert "torchao" not in done.stderr
