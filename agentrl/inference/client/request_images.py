"""Images of requests: what ``/generate`` is sent, and the comparison of the engine's prompt with ours.

SGLang (read in 0.5.23) replaces the one token that stands for an image in ``input_ids`` by as many as its own processor
computes features. Tokens in full would be expanded again. So an image's tokens are sent as one, and the engine's expansion
comes back with the reply.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import cast

from agentrl.core.errors import ConfigError
from agentrl.core.images import Image, ImageSpan, PlacedImage, load_image

_RETURN_PROMPT = "return_prompt_token_ids"
_CACHED_IMAGES = 256


def with_images(
    body: Mapping[str, object], images: Sequence[PlacedImage], image_token_id: int | None, name: str
) -> dict[str, object]:
    """Return the body of a request with the images of its prompt.

    Args:
        body: for ``/generate``, with the tokens of the images in full.
        images: of the prompt, in the order of their tokens.
        image_token_id: the token that stands for each of an image's features; None: the policy takes no images.
        name: of the request in messages.

    Raises:
        ConfigError: the policy takes no images.
    """
    if not images:
        return dict(body)
    if image_token_id is None:
        raise ConfigError(
            f"request {name} has {len(images)} images, and the policy's model takes none: set model.path to a vision-language "
            "model, or remove the images from tasks and tool results"
        )
    token_ids = cast(list[int], body["input_ids"])
    spans = [placed.span for placed in images]
    fields: dict[str, object] = {
        "image_data": [_opaque(placed.image).data_url for placed in images],
        _RETURN_PROMPT: True,
    }
    inside = sum(token_ids[span.start : span.end].count(image_token_id) for span in spans)
    if token_ids.count(image_token_id) != inside:
        # The policy has sampled one. Only an engine that receives the positions, such as the embedded one, can distinguish them.
        fields["image_spans"] = [[span.start, span.length] for span in spans]
        return {**body, **fields}
    return {**body, **fields, "input_ids": _one_token_each(token_ids, spans, image_token_id)}


def _one_token_each(token_ids: Sequence[int], spans: Sequence[ImageSpan], token: int) -> list[int]:
    """Return the ids with one token in place of each image's, if they are consecutive; else the ids as they are.

    Images in tiles, such as SmolVLM's, have several runs of tokens: no single token says how many.
    """
    sent: list[int] = []
    end = 0
    for span in spans:
        inner = token_ids[span.start : span.end]
        if sum(index == token for index, _ in groupby(inner)) != 1:
            return list(token_ids)
        sent += token_ids[end : span.start]
        sent += [index for index, run in groupby(inner) for index in ([token] if index == token else run)]
        end = span.end
    return [*sent, *token_ids[end:]]


@lru_cache(maxsize=_CACHED_IMAGES)
def _opaque(image: Image) -> Image:
    """Return an image that decoders of engines read as `Image.to_pil` does: PNG without transparency, or as it is.

    Decoders of JPEG differ by a bit or two, and SGLang drops transparency instead of painting a background.
    """
    from PIL import Image as pil

    if image.media_type == "image/png":
        with pil.open(io.BytesIO(image.data)) as header:
            if header.mode in ("RGB", "L") and "transparency" not in header.info:
                return image
    return load_image(image.to_pil())


def check_expansion(expected: Sequence[int], received: Sequence[int] | None, count: int | None, name: str) -> None:
    """Compare an engine's prompt with ours.

    Args:
        expected: ids of the prompt, with the tokens of its images in full.
        received: ``prompt_token_ids`` of the reply; None: the engine returns none.
        count: ``prompt_tokens`` of the reply.
        name: of the request in messages.

    Raises:
        ConfigError: they differ. The run must stop: it would train on other tokens than the engine has seen.
    """
    if received is None and count in (None, len(expected)):
        return
    if received is not None and list(received) == list(expected):
        return
    length = count if received is None else len(received)
    at = next((at for at, pair in enumerate(zip(expected, received or (), strict=False)) if pair[0] != pair[1]), None)
    where = "" if at is None else f", and they differ from token {at} on"
    raise ConfigError(
        f"the engine expands the images of request {name} to a prompt of {length} tokens, agentrl to {len(expected)}{where}. "
        "Both must have the same image processor: start the engine with the folder of model.path and without "
        "--mm-process-config and SGLANG_IMAGE_MAX_PIXELS, leave SGLANG_MM_AVOID_RETOKENIZE=1 as it is, and use the engine's "
        "version of transformers"
    )
