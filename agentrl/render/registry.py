"""Chat formats by name, and the renderer of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from agentrl.config.model import RenderConfig
from agentrl.core.errors import ConfigError
from agentrl.models.image_processor import ImageProcessor, image_processor_loader
from agentrl.models.load import load_tokenizer, read_end_ids
from agentrl.render.formats.base import Format
from agentrl.render.formats.chatml import ChatMl, Qwen25
from agentrl.render.formats.deepseek import DeepSeekR1, DeepSeekV3
from agentrl.render.formats.glm import Glm4, Glm45
from agentrl.render.formats.kimi import KimiK2
from agentrl.render.formats.llama3 import Llama3, Llama31, today
from agentrl.render.formats.package import PACKAGE_FORMATS, PackageFormat
from agentrl.render.formats.qwen3 import Qwen3, Qwen3Instruct
from agentrl.render.formats.template import TemplateFormat
from agentrl.render.parsers.registry import PARSERS
from agentrl.render.probes import same_text
from agentrl.render.renderer import ChatRenderer
from agentrl.render.tool_preamble import make_preamble

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

FORMATS: Mapping[str, Callable[[RenderConfig], Format]] = {
    "chatml": lambda _: ChatMl(),
    "smollm2": lambda _: ChatMl(SMOLLM2_SYSTEM),
    "qwen2.5": lambda _: Qwen25(),
    "qwen3": lambda config: Qwen3(thinking=config.thinking, keep_thinking=config.keep_thinking),
    "qwen3-thinking": lambda config: Qwen3(keep_thinking=config.keep_thinking, opens_thinking=True),
    "qwen3-instruct": lambda _: Qwen3Instruct(),
    "deepseek-v3": lambda _: DeepSeekV3(),
    "deepseek-r1": lambda config: DeepSeekR1(keep_thinking=config.keep_thinking),
    "llama3": lambda _: Llama3(),
    "llama3.1": lambda _: Llama31(),
    "llama3.2": lambda _: Llama31("llama3.2", date=today()),
    "glm-4": lambda _: Glm4(),
    "glm-4.5": lambda config: Glm45(thinking=config.thinking, keep_thinking=config.keep_thinking),
    "kimi-k2": lambda _: KimiK2(),
}
"""Formats by ``render.format``, which may also be ``template`` or ``auto``. ``auto`` chooses the first that fits."""


def load_renderer(folder: Path, config: RenderConfig | None = None, *, trust_remote_code: bool = False) -> ChatRenderer:
    """Return the renderer of the model in ``folder``: of its tokenizer, and with the end tokens at which engines stop.

    Raises:
        ModelError: the folder has no tokenizer, it cannot be loaded, or see `make_renderer`.
        ConfigError, MissingError: see `make_renderer`.
    """
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code)
    load_images = image_processor_loader(folder, trust_remote_code=trust_remote_code)
    return make_renderer(tokenizer, config, read_end_ids(folder), load_images=load_images)


def make_renderer(
    tokenizer: PreTrainedTokenizerBase,
    config: RenderConfig | None = None,
    end_ids: Sequence[int] = (),
    *,
    load_images: Callable[[], ImageProcessor] | None = None,
) -> ChatRenderer:
    """Return the renderer of a tokenizer.

    Args:
        tokenizer: tokenizer of the policy; ``render.chat_template``, if set, replaces its chat template.
        config: the ``render`` section; its defaults if None.
        end_ids: the model's own end tokens (`agentrl.models.load.read_end_ids`).
        load_images: loads the model's image processor; None if it reads text only. With one, ``render.format=auto`` is the
            chat template, which has the places of images.

    Raises:
        ConfigError: ``render.chat_template`` cannot be read, or ``render.tool_preamble`` does not know the format of calls.
        ModelError: the tokenizer lacks the tokens of ``render.format``, has no end token, or one of ``end_ids`` is no special
            token in it.
        MissingError: ``render.format`` needs a package that is not installed.
    """
    config = config or RenderConfig()
    if config.chat_template is not None:
        tokenizer.chat_template = _read(config.chat_template)
    parser = None if config.tool_parser == "auto" else PARSERS[config.tool_parser]()
    if load_images is not None and config.format == "auto":
        config = config.model_copy(update={"format": "template"})
    format = choose_format(tokenizer, config)
    preamble = make_preamble(parser or format.parser) if config.tool_preamble else None
    return ChatRenderer(
        tokenizer,
        format,
        parser,
        end_ids=end_ids,
        escape_added_tokens=config.escape_added_tokens,
        tool_preamble=preamble,
        load_images=load_images,
    )


def choose_format(tokenizer: PreTrainedTokenizerBase, config: RenderConfig) -> Format:
    """Return the format of ``render.format``; for ``auto``, the first that writes the same as the tokenizer's chat template."""
    if config.format in FORMATS:
        return FORMATS[config.format](config)
    variables = {} if config.thinking else {"enable_thinking": False}
    if config.format in PACKAGE_FORMATS:
        return PackageFormat(config.format, tokenizer, keep_thinking=config.keep_thinking, variables=variables)
    template = TemplateFormat(tokenizer, keep_thinking=config.keep_thinking, variables=variables)
    if config.format == "template" or not tokenizer.chat_template:
        return template
    plain = config.model_copy(update={"keep_thinking": False})  # as templates do
    fits = (name for name, make in FORMATS.items() if _fits(make(plain), template, tokenizer))
    name = next(fits, None)
    return template if name is None else FORMATS[name](config)


def _fits(format: Format, template: TemplateFormat, tokenizer: PreTrainedTokenizerBase) -> bool:
    special = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return format.ends[0] in special and same_text(format, template)


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"render.chat_template={path} cannot be read: {error}") from None
