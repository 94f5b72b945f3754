"""Requests for generation: parsing of ``/generate`` bodies, and the state of a request in the engine."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.images import Image, load_image
from agentrl.inference.embedded.adapters import Adapter
from agentrl.inference.embedded.forward_batch import Segment
from agentrl.inference.embedded.images import PromptImages
from agentrl.inference.embedded.replies import BadRequestError

# Options of SGLang that this engine lacks, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "min_p": (0, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "repetition_penalty": (1, None),
    "min_new_tokens": (0, None),
    "n": (1, None),
    "spaces_between_special_tokens": (True, None),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "logit_bias": (None, {}),
    "custom_params": (None, {}),
    "stream_interval": (None,),
}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Validated ``sampling_params`` of SGLang."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    sampling_seed: int | None = None

    @classmethod
    def parse(cls, params: Mapping[str, Any] | None) -> SamplingOptions:
        """Validate ``sampling_params`` of a request body.

        Raises:
            BadRequestError: a value cannot be used; the message names it.
        """
        values = dict(params or {})
        for name, neutral in _NEUTRAL.items():
            if values.pop(name, neutral[0]) not in neutral:
                raise BadRequestError(f"sampling_params.{name}={params[name]!r}: not supported by the embedded engine")  # type: ignore[index]
        unknown = sorted(values.keys() - cls.__dataclass_fields__.keys())
        if unknown:
            raise BadRequestError(f"sampling_params.{unknown[0]} is unknown")
        values = {name: value for name, value in values.items() if value is not None}
        stop = values.get("stop", ())
        try:
            values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
            values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
        except TypeError as error:
            raise BadRequestError(f"sampling_params.stop and stop_token_ids must be lists: {error}") from error
        options = cls(**values)
        options._check()
        return options

    def _check(self) -> None:
        limits = {
            "max_new_tokens": isinstance(self.max_new_tokens, int) and self.max_new_tokens >= 1,
            "temperature": isinstance(self.temperature, int | float) and self.temperature >= 0,
            "top_p": isinstance(self.top_p, int | float) and 0 < self.top_p <= 1,
            "top_k": isinstance(self.top_k, int) and (self.top_k == -1 or self.top_k >= 1),
            "sampling_seed": self.sampling_seed is None or isinstance(self.sampling_seed, int),
            "stop_token_ids": all(isinstance(token, int) for token in self.stop_token_ids),
            "stop": all(isinstance(text, str) and text for text in self.stop),
        }
        for name, fits in limits.items():
            if not fits:
                raise BadRequestError(f"sampling_params.{name}={getattr(self, name)!r} cannot be used")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature < 1e-6 or self.top_k == 1

    @property
    def truncates(self) -> bool:
        """Whether it is not sampled from the whole vocabulary."""
        return self.greedy or self.top_p < 1 or self.top_k > 0


SUPPORT_MODES = ("selected", "support")
"""SGLang's ``sampling_logprobs_mode``: log-probabilities of the sampled tokens, or of all ids that they were sampled from."""


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The ids that top-k and top-p left for a token, and their log-probabilities, renormalised."""

    token_ids: list[int]
    logprobs: list[float]
    sampled_logprob: float
    """Log-probability of the id that was sampled."""


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine: its input, and the state of its generation."""

    input: GenerateInput
    prompt: NDArray[np.int32]
    done: asyncio.Future[None]
    limit: int
    """Most tokens it may sample; 0 if the prompt is scored."""
    stop_ids: frozenset[int]
    may_stop: NDArray[np.bool_] | None
    """``[vocabulary]`` whether a token can complete one of the stop strings."""
    seed: int
    """uint64; together with a token's position in prompt and output it determines the random number, see `uniforms`."""
    adapter: Adapter | None = None
    """The LoRA adapter that computes it; None: the model's weights alone."""
    images: PromptImages | None = None
    """Images of the prompt; None: it has none."""
    experts: NDArray[np.int32] | None = None
    """``[n, layers, K]`` of the tokens from ``experts_from`` on that were computed, when it ends."""
    slot: int = -1
    scores: list[float] = field(default_factory=list)
    """Log-probabilities of the prompt's tokens after ``score_from``."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    supports: list[KeptTokens] = field(default_factory=list)
    """Sampling support of each token of the output, with ``return_sampling_mask``."""
    versions: list[tuple[int, str]] = field(default_factory=list)
    """``(start, weight version)``: the version that samples from output token ``start`` on."""
    cached: int = -1
    """Tokens found in the prefix cache when the request first got a slot; -1 before."""
    finish: dict[str, Any] | None = None
    """``finish_reason`` of the reply; None while the request runs or waits."""
    stop_text: str | None = None
    """The stop string that was found in the output."""

    @property
    def options(self) -> SamplingOptions:
        """How it is sampled."""
        return self.input.options

    @property
    def score_from(self) -> int | None:
        """With a number, the log-probabilities of the prompt's tokens after this one are computed, and nothing is sampled."""
        return self.input.score_from

    @property
    def support(self) -> str | None:
        """How the log-probabilities of what tokens were sampled from are returned; None: not at all."""
        return self.input.support

    def tokens(self) -> NDArray[np.int32]:
        """Return the token ids of prompt and output."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt

    def keys(self) -> NDArray[np.int32]:
        """Return what prompt and output have in the prefix cache: their token ids, with images distinguished by content."""
        return self.tokens() if self.images is None else self.images.keys(self.output)

    def segment(self, start: int, tokens: NDArray[np.int32], kept: int = 1) -> Segment:
        """Return new tokens of the request, which begin at ``start`` of prompt and output."""
        if self.images is None:
            return Segment(self.slot, start, tokens, kept)
        end = start + len(tokens)
        rotary, images = self.images.rotary(start, end), self.images.segment_images(start, end)
        return Segment(self.slot, start, tokens, kept, rotary, images)

    def end(self, finish: dict[str, Any]) -> None:
        """Set the finish reason and resolve ``done``."""
        self.finish = finish
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True, slots=True)
class GenerateInput:
    """One prompt of a ``/generate`` body, with its options."""

    token_ids: list[int]
    options: SamplingOptions
    rid: str
    logprobs: bool
    """``return_logprob``"""
    score_from: int | None = None
    """``logprob_start_len`` of a prompt that is scored."""
    experts_from: int | None = None
    """``routed_experts_start_len``, with ``return_routed_experts``: the first token whose experts are returned."""
    adapter: str | None = None
    """``lora_path``: name of a loaded adapter."""
    support: str | None = None
    """``sampling_logprobs_mode``, with ``return_sampling_mask``; None: without."""
    extra_key: str | None = None
    """Only prefixes of requests with the same key are reused."""
    images: tuple[Image, ...] = ()
    """``image_data``"""
    image_spans: tuple[tuple[int, int], ...] | None = None
    """First token and number of tokens of each image; None: all image tokens are those of images. SGLang has no such field."""
    returns_prompt: bool = False
    """``return_prompt_token_ids``"""


def parse_generate(body: Mapping[str, Any]) -> tuple[list[GenerateInput], bool]:
    """Return the prompts of a ``/generate`` body, and whether it was a batch.

    Raises:
        BadRequestError: the body cannot be served.
    """
    ids = body.get("input_ids")
    if not isinstance(ids, list) or not ids:
        raise BadRequestError("input_ids must be a list of token ids, or of such lists; text is not accepted")
    if body.get("stream"):
        raise BadRequestError("stream=true: not supported by the embedded engine")
    batch = isinstance(ids[0], list)
    prompts = ids if batch else [ids]
    params = _value_per_prompt(body, "sampling_params", len(prompts), batch)
    rids = _value_per_prompt(body, "rid", len(prompts), batch)
    if batch and isinstance(body.get("rid"), str):
        rids = [f"{body['rid']}_{index}" for index in range(len(prompts))]
    logprobs = _value_per_prompt(body, "return_logprob", len(prompts), batch)
    starts = _value_per_prompt(body, "logprob_start_len", len(prompts), batch)
    prompt_fields = zip(prompts, params, rids, logprobs, starts, strict=True)
    experts_from = int(body.get("routed_experts_start_len") or 0) if body.get("return_routed_experts") else None
    inputs = [_input(prompt, param, rid, logprob, start) for prompt, param, rid, logprob, start in prompt_fields]
    adapter = body.get("lora_path")
    if adapter is not None and not isinstance(adapter, str):
        raise BadRequestError(f"lora_path={adapter!r}: the embedded engine takes one name for all prompts")
    support = _support_mode(body)
    if support is not None and any(not generate_input.options.truncates for generate_input in inputs):
        raise BadRequestError("return_sampling_mask requires top_p below 1, top_k from 1 on, or greedy sampling")
    key = body.get("extra_key")
    if key is not None and not isinstance(key, str):
        raise BadRequestError(f"extra_key={key!r}: the embedded engine takes one string for all prompts")
    images = _images_per_prompt(body.get("image_data"), len(prompts), batch)
    spans = body.get("image_spans")
    if spans is not None and batch:
        raise BadRequestError("image_spans: the embedded engine takes them for one prompt")
    image_spans = None if spans is None else _spans(spans)
    returns_prompt = bool(body.get("return_prompt_token_ids"))
    return [
        replace(
            generate_input,
            experts_from=experts_from,
            adapter=adapter,
            support=support,
            extra_key=key,
            images=prompt_images,
            image_spans=image_spans,
            returns_prompt=returns_prompt,
        )
        for generate_input, prompt_images in zip(inputs, images, strict=True)
    ], batch


def _images_per_prompt(data: object, count: int, batch: bool) -> list[tuple[Image, ...]]:
    """Return the images of each prompt: a string or a list of strings for one, a list of these for several."""
    if data is None:
        return [()] * count
    per_prompt = data if batch else [data]
    if not isinstance(per_prompt, list) or len(per_prompt) != count:
        raise BadRequestError(f"image_data must have an entry for each of the {count} prompts")
    entries = [[] if entry is None else entry if isinstance(entry, list) else [entry] for entry in per_prompt]
    return [tuple(_image(text) for text in prompt_entries) for prompt_entries in entries]


def _image(text: object) -> Image:
    if not isinstance(text, str):
        raise BadRequestError(f"image_data holds {text!r:.100}: the embedded engine takes data: URLs and base64")
    try:
        return load_image(text if text.startswith("data:") else base64.b64decode(text, validate=True))
    except ValueError as error:
        raise BadRequestError(f"image_data: {error}") from error


def _spans(spans: object) -> tuple[tuple[int, int], ...]:
    if not isinstance(spans, list) or not all(
        isinstance(span, list) and len(span) == 2 and all(isinstance(number, int) for number in span) for span in spans
    ):
        raise BadRequestError(f"image_spans={spans!r:.100} must be a list of [first token, number of tokens]")
    return tuple((start, length) for start, length in spans)


def _support_mode(body: Mapping[str, object]) -> str | None:
    """Return the ``sampling_logprobs_mode`` of a body with ``return_sampling_mask``."""
    mode, returns_mask = body.get("sampling_logprobs_mode"), body.get("return_sampling_mask")
    if returns_mask not in (None, True, False):
        raise BadRequestError(
            f"return_sampling_mask={returns_mask!r}: the embedded engine takes true or false for all prompts"
        )
    if not returns_mask:
        if mode is not None:
            raise BadRequestError("sampling_logprobs_mode can only be set when return_sampling_mask=true")
        return None
    if mode not in (None, *SUPPORT_MODES):
        raise BadRequestError(f"sampling_logprobs_mode={mode!r} is none of {', '.join(SUPPORT_MODES)}")
    return SUPPORT_MODES[0] if mode is None else str(mode)


def _input(prompt: Any, params: Any, rid: Any, logprobs: Any, start: Any) -> GenerateInput:
    """Return one prompt: to sample after, or to score, which ``logprob_start_len`` and ``max_new_tokens=0`` request."""
    name, scored = rid or uuid.uuid4().hex, start not in (-1, None)
    if not scored:
        return GenerateInput(prompt, SamplingOptions.parse(params), name, bool(logprobs))
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise BadRequestError(f"logprob_start_len={start!r} is not the index of one of the input_ids")
    options = dict(params) if isinstance(params, Mapping) else {}
    if not logprobs or options.pop("max_new_tokens", None) != 0:
        raise BadRequestError(
            f"logprob_start_len={start}: the embedded engine scores a prompt only with return_logprob=true and "
            "sampling_params.max_new_tokens=0"
        )
    return GenerateInput(prompt, SamplingOptions.parse(options), name, True, start)


def _value_per_prompt(body: Mapping[str, Any], name: str, count: int, batch: bool) -> list[Any]:
    value = body.get(name)
    if not (batch and isinstance(value, list)):
        return [value] * count
    if len(value) != count:
        raise BadRequestError(f"{name} has {len(value)} entries for {count} prompts")
    return value
