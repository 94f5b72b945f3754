"""Folders of tiny vision-language models: a byte-level tokenizer, a processor, a template in the family's form, a configuration.

`write_processor_folder` writes what renderers need; with ``weights`` also a model with random weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PARTS = (
    "{%- macro write(content) -%}{%- if content is string -%}{{ content }}{%- else -%}{%- for part in content -%}"
    "{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
_CALLS = (
    "{%- for call in m.tool_calls or [] -%}{{ '\\n' if not loop.first or m.content }}<tool_call>\n"
    '{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{%- endfor -%}"
)
_CHATML = (
    "{%- if tools -%}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif -%}"
    "{%- for m in messages -%}{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}"
    "{{- '<tool_response>\\n' if m.role == 'tool' -}}{{- write(m.content) -}}"
    "{{- '\\n</tool_response>' if m.role == 'tool' -}}" + _CALLS + "{{- '<|im_end|>\\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_GLM = (
    "[gMASK]<sop>{%- if tools -%}<|system|>\n{{ tools | tojson }}{%- endif -%}"
    "{%- for m in messages -%}{{- '<|observation|>\\n<tool_response>\\n' if m.role == 'tool' else '<|' + m.role + '|>\\n' -}}"
    "{{- write(m.content) -}}{{- '\\n</tool_response>' if m.role == 'tool' -}}" + _CALLS + "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' -}}{%- endif -%}"
)
_IDEFICS = (
    "<|im_start|>{%- for m in messages -%}{{- m.role | capitalize + ':' -}}"
    "{{- ' ' if m.content is string or m.content[0].type != 'image' -}}{{- write(m.content) -}}"
    "{{- '<end_of_utterance>\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}"
)


class Family(NamedTuple):
    """What differs between families."""

    processor_class: str
    image: str
    """What the template writes for an image."""
    template: str
    special: tuple[str, ...]
    end: str
    image_processor: dict[str, Any]
    processor: dict[str, Any]
    model: dict[str, Any]
    """Fields of ``config.json`` next to the ids of tokens."""
    ids: dict[str, str]
    """Tokens of ``config.json`` by field."""


_TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_QWEN_VISION = ("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_IDS = {
    "image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>",
}  # fmt: skip
_QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def _patches(kind: str, patch: int) -> dict[str, Any]:
    unit = (2 * patch) ** 2
    sizes = {"shortest_edge": 2 * unit, "longest_edge": 24 * unit}
    return {"image_processor_type": kind, "patch_size": patch, "merge_size": 2, "temporal_patch_size": 2, "size": sizes}


FAMILIES = {
    "qwen2.5-vl": Family(
        "Qwen2_5_VLProcessor",
        _QWEN_IMAGE,
        _CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_QWEN_VISION),
        "<|im_end|>",
        _patches("Qwen2VLImageProcessor", 4),
        {},
        {
            "model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "text_config": {
                "model_type": "qwen2_5_vl_text", **_TEXT, "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
            },
            "vision_config": {
                "model_type": "qwen2_5_vl", "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 16,
                "fullatt_block_indexes": [1],
            },
        },
        _QWEN_IDS,
    ),
    "qwen3-vl": Family(
        "Qwen3VLProcessor",
        _QWEN_IMAGE,
        _CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_QWEN_VISION),
        "<|im_end|>",
        {**_patches("Qwen2VLImageProcessorFast", 8), "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        {},
        {
            "model_type": "qwen3_vl", "architectures": ["Qwen3VLForConditionalGeneration"],
            "text_config": {
                "model_type": "qwen3_vl_text", **_TEXT, "num_key_value_heads": 2, "head_dim": 8,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl", "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2,
                "out_hidden_size": 32,
                "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0],
            },
        },
        _QWEN_IDS,
    ),
    "glm-4.5v": Family(
        "Glm4vProcessor",
        "<|begin_of_image|><|image|><|end_of_image|>",
        _GLM,
        (
            "<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>",
            "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>", "<|image|>", "<|video|>",
        ),
        "<|user|>",
        {**_patches("Glm4vImageProcessor", 4), "size": {"shortest_edge": 4 * 64, "longest_edge": 2 * 24 * 64}},
        {},
        {
            "model_type": "glm4v_moe", "architectures": ["Glm4vMoeForConditionalGeneration"],
            "text_config": {
                "model_type": "glm4v_moe_text", **_TEXT, "num_key_value_heads": 2, "moe_intermediate_size": 32,
                "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                "first_k_dense_replace": 1,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0,
                },
            },
            "vision_config": {
                "model_type": "glm4v_moe_vision", "hidden_size": 32, "intermediate_size": 64, "depth": 2, "num_heads": 2,
                "out_hidden_size": 32, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2, "image_size": 32,
            },
        },
        {
            "image_token_id": "<|image|>", "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>", "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>", "video_end_token_id": "<|end_of_video|>",
        },
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        "<image>",
        _IDEFICS,
        (
            "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<end_of_utterance>",
            "<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
        ),
        "<end_of_utterance>",
        {
            "image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": True,
            "size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_pad": True,
        },
        {"image_seq_len": 16},
        {
            "model_type": "smolvlm", "architectures": ["SmolVLMForConditionalGeneration"], "scale_factor": 2,
            "text_config": {"model_type": "llama", **_TEXT, "num_key_value_heads": 2},
            "vision_config": {
                "model_type": "smolvlm_vision", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 2, "image_size": 32, "patch_size": 4,
            },
        },
        {"image_token_id": "<image>"},
    ),
}  # fmt: skip
"""Families by name."""
_ADDED = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")


def write_processor_folder(
    folder: Path, family: str, *, template: str = "", weights: float | None = None, patch: int | None = None
) -> Path:
    """Write the folder of a tiny model of a family, and return it.

    Args:
        folder: created if it is missing.
        family: a name of `FAMILIES`.
        template: in place of the family's.
        weights: standard deviation of random matrices (float32) that are written too; from 0.1 on images change the
            log-probabilities of text. None: no weights are written.
        patch: sides of a patch in pixels, in place of the family's here; SGLang computes Qwen2.5-VL with 14 alone.
    """
    form = FAMILIES[family] if patch is None else _with_patches(FAMILIES[family], patch)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _byte_tokenizer(form)
    tokenizer.chat_template = template or _PARTS.replace("IMAGE", form.image) + form.template
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**form.image_processor, "processor_class": form.processor_class})
    )
    (folder / "processor_config.json").write_text(
        json.dumps({**form.processor, "processor_class": form.processor_class})
    )
    special = {name: tokenizer.convert_tokens_to_ids(token) for name, token in form.ids.items()}
    end, pad = tokenizer.convert_tokens_to_ids([form.end, "<|endoftext|>"])
    ids = {"bos_token_id": pad, "eos_token_id": end, "pad_token_id": pad}
    text = {**form.model["text_config"], "vocab_size": len(tokenizer), "max_position_embeddings": 4096, **ids}
    config = {**form.model, **special, **ids, "text_config": text, "dtype": "float32", "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    if weights is not None:
        write_weights(folder, weights)
    return folder


def _with_patches(form: Family, patch: int) -> Family:
    """Return a family of the Qwen-VL kind with patches of another size."""
    processor = _patches(form.image_processor["image_processor_type"], patch)
    vision = form.model["vision_config"] | {"patch_size": patch}
    vision |= {"window_size": 4 * patch} if "window_size" in vision else {}
    return form._replace(image_processor=form.image_processor | processor, model=form.model | {"vision_config": vision})


def write_weights(folder: Path, deviation: float) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    torch.manual_seed(0)
    auto: Any = AutoModelForImageTextToText
    model = auto.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, deviation)
    model.save_pretrained(folder)


def _byte_tokenizer(form: Family) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes, a few merges of newlines, and the family's tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ġ", "t"), ("Ġt", "h"), ("i", "n")]
    vocabulary = {letter: index for index, letter in enumerate([*letters, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in form.special])
    backend.add_tokens([AddedToken(text, normalized=False) for text in _ADDED])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=form.end, pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
