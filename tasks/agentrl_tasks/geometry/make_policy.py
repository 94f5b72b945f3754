"""Write the untrained policy (tokenizer, processor and random weights) that ``--config geometry/sft_warm`` starts from.

``python -m agentrl_tasks.geometry.make_policy OUT``
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from agentrl.core.atomic_files import give_default_mode
from agentrl_tasks.small_policy import marker_bpe, run_command, wrap_tokenizer

from .scene import COLORS, SHAPES

VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
VIEW_PX, PATCH_PX, MERGE = 32, 4, 2
"""Side of a picture and of a patch, and patches of a token on each side: a picture is 16 tokens."""
_HIDDEN = 128
SENTENCES = (
    "system\nTools: zoom(box)",
    "user\n",
    "assistant\n",
    "tool\n",
    '<tool_call>\n{"name": "zoom", "arguments": {"box": [',
    "]}}\n</tool_call>",
    ", ",
    "250",
    "500",
    "750",
    "1000",
    "How many ",
    "s are there?",
    " figures are there?",
    "The ",
    " bar is how many cells long?",
    " rectangle covers how many cells?",
    "Which figure is larger, the ",
    " one or the ",
    " one? Or are they equal?",
    "equal",
    "In which cell is the ",
    " figure? Columns are A to D from the left, rows 1 to 4 from the top.",
    "Which color has the ",
    "Which digit is in the ",
    " figure?",
    "Which number do the digits in the ",
    " and in the ",
    " figure make, in this order?",
    "What is in the picture?",
    " by ",
    *COLORS,
    *SHAPES,
    *(f" {color}" for color in COLORS),
    *(f" {shape}" for shape in SHAPES),
)
"""One token each: what tasks and calls say around their numbers."""
CHAT_TEMPLATE = (
    "{%- macro write(content) %}"
    "{%- if content is string %}{{- content }}"
    "{%- else %}"
    "{%- for part in content %}"
    "{{- part.text if part.type == 'text' else '" + VISION_START + IMAGE_PAD + VISION_END + "' }}"
    "{%- endfor %}"
    "{%- endif %}"
    "{%- endmacro %}"
    "{%- if tools %}"
    "{{- '<|im_start|>system\\nTools:' }}"
    "{%- for tool in tools %}"
    "{{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + write(message.content or '') }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- ('\\n' if message.content or not loop.first else '') + '<tool_call>\\n{\"name\": \"' + call.function.name }}"
    "{{- '\", \"arguments\": ' + call.function.arguments | tojson + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML with pictures in any role, as Qwen's vision-language models write them."""


def save_policy(folder: Path, seed: int = 0) -> None:
    """Write the policy into ``folder``, a Hugging Face model with its processor."""
    import torch
    from transformers import AutoModelForImageTextToText

    tokenizer = _save_tokenizer(folder)
    model: Any = AutoModelForImageTextToText
    torch.manual_seed(seed)
    model.from_config(_model_config(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    give_default_mode(*folder.glob("*.safetensors"))
    _save_processor(folder)


def _save_tokenizer(folder: Path) -> Any:
    bpe = marker_bpe(SENTENCES)
    pads = [VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD]
    bpe.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in pads])
    return wrap_tokenizer(folder, bpe, CHAT_TEMPLATE)


def _model_config(tokenizer: Any) -> Any:
    from transformers import Qwen3VLConfig

    token_id = tokenizer.convert_tokens_to_ids
    return Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": _HIDDEN,
            "intermediate_size": 320,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [6, 5, 5],
                "mrope_interleaved": True,
            },
            "initializer_range": 0.03,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": PATCH_PX,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": (VIEW_PX // PATCH_PX) ** 2,
            "deepstack_visual_indexes": [1],
            "out_hidden_size": _HIDDEN,
            "initializer_range": 0.03,
        },
        image_token_id=token_id(IMAGE_PAD),
        video_token_id=token_id(VIDEO_PAD),
        vision_start_token_id=token_id(VISION_START),
        vision_end_token_id=token_id(VISION_END),
        tie_word_embeddings=True,
    )


def _save_processor(folder: Path) -> None:
    """Write the processor's configuration: pictures of 8 to 256 pixels a side keep their size."""
    config = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": PATCH_PX,
        "merge_size": MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": (PATCH_PX * MERGE) ** 2, "longest_edge": 4 * VIEW_PX**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, save_policy)


if __name__ == "__main__":
    main()
