"""Vision-language model classes that SGLang registers at its start on a CPU."""

from sglang.srt.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
from sglang.srt.models.qwen3_vl import Qwen3VLForConditionalGeneration

EntryClass = [Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration]
