"""What a run needs of its chat template and does not get is refused before anything starts."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from agentrl import Env, Task, register_env, tool
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.core.registry import model_folder
from agentrl.core.types import Message
from agentrl.train.template_check import check_chat_template
from tests.unit.render.oracles import template

SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    "Face<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""It writes what SmolLM2-Instruct's writes."""


@tool(timeout_s=1)
async def look_up(word: str) -> str:
    """Look a word up."""
    return word


class _Plain(Env):
    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        return [Task(f"t{number}", (Message("user", "?"),)) for number in range(3)]


@register_env("needs_no_tools")
class NoTools(_Plain):
    """Says nothing but its tasks."""


@register_env("needs_tools")
class Tools(_Plain):
    """Its tools are run, and answered with tool messages."""

    tools = (look_up,)


def check(folder: Path, env: str, text: str, *overrides: str) -> str:
    file = folder / "own.jinja"
    file.write_text(text, encoding="utf-8")
    config = load_config(
        None,
        [
            f"env.name={env}",
            "model.path=multihop-warm",
            f"render.chat_template={file}",
            "rollout.max_tokens=8192",
            *overrides,
        ],
    )
    model = model_folder("multihop-warm")
    assert model is not None
    return check_chat_template(config, model, _Plain.tasks("train", 0))


@pytest.mark.parametrize(("name", "does"), [("phi3", "leaves out"), ("cohere2", "leaves out"), ("gemma", "refuses")])
def test_tools_whose_results_the_template_does_not_have(tmp_path: Path, name: str, does: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"env\.name=needs_tools has tools.*{does} tool results; set render\.chat_template"
    ):
        check(tmp_path, "needs_tools", template(name))
    assert "no tool results" in check(tmp_path, "needs_no_tools", template(name))
    assert "no tool results" in check(tmp_path, "needs_tools", template(name), "rollout.max_turns=1")


def test_tools_that_the_policy_never_reads_are_said(tmp_path: Path) -> None:
    """SmolLM2's template has no place for tools. With a preamble they are in the system message."""
    said = check(tmp_path, "needs_tools", SMOLLM2)
    assert "never reads look_up of env.name=needs_tools: set render.tool_preamble=true" in said
    for quiet in (
        check(tmp_path, "needs_no_tools", SMOLLM2),
        check(tmp_path, "needs_tools", SMOLLM2, "render.tool_preamble=true"),
        check(tmp_path, "needs_tools", template("qwen3")),
    ):
        assert "never reads" not in quiet


def test_a_preamble_is_of_the_calls_that_are_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"render\.tool_preamble=true .*render\.tool_parser=hermes and tags"):
        check(tmp_path, "needs_tools", SMOLLM2, "render.tool_preamble=true", "render.tool_parser=kimi")


@pytest.mark.parametrize("starts_with_bos", [True, False])
def test_raw_prompts_get_no_bos_and_that_is_said(tmp_path: Path, starts_with_bos: bool) -> None:
    model = model_folder("multihop-warm")
    assert model is not None
    tokenizer = AutoTokenizer.from_pretrained(model)
    if starts_with_bos:
        tokenizer.bos_token = "<|im_start|>"
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
        )
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    config = load_config(None, [f"data.path={tmp_path / 'rows.jsonl'}", "data.apply_chat_template=false"])
    said = check_chat_template(config, tmp_path, [])
    assert ("they get no <|im_start|>, with which the tokenizer starts texts" in said) == starts_with_bos


def test_tasks_that_no_conversation_can_begin_with(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no task can begin: .*refuses messages of roles user: never"):
        check(tmp_path, "needs_no_tools", "{{ raise_exception('never') }}")
    with pytest.raises(ConfigError, match=r"no task can begin: .*leaves out the content of message 1 \(user\)"):
        check(tmp_path, "needs_no_tools", "nothing of it")


def test_prompts_that_leave_no_room_to_answer(tmp_path: Path) -> None:
    template_text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(
        ConfigError, match=r"all 3 prompts that were tried leave no room to answer within rollout\.max_tokens=1;"
    ):
        check(tmp_path, "needs_no_tools", template_text, "rollout.max_tokens=1")
    assert "leave no room" not in check(tmp_path, "needs_no_tools", template_text)


@register_env("some_long_prompts")
class SomeLong(_Plain):
    """Every other prompt is long."""

    def reset(
        self, *, seed: int | None = None, options: dict[str, object] | None = None
    ) -> tuple[tuple[Message, ...], dict[str, object]]:
        _, info = super().reset(seed=seed, options=options)
        number = int(options["task"].id[1:])  # type: ignore[index, attr-defined]
        return (Message("user", "? " * (200 if number % 2 else 1)),), info


def test_some_prompts_that_leave_no_room_are_counted(tmp_path: Path) -> None:
    template_text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    actual = check(tmp_path, "some_long_prompts", template_text, "rollout.max_tokens=50")
    assert (
        "1 of 3 prompts that were tried leave no room to answer within rollout.max_tokens=50, and are dropped" in actual
    )
