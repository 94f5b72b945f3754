"""One turn sampled by several requests, because the weights changed on the way: joining the parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason


@dataclass(frozen=True, slots=True)
class Part:
    """What one request sampled."""

    token_ids: list[int]
    logprobs: list[float]
    finish: FinishReason
    versions: tuple[tuple[int, int], ...]
    """``(start, version)`` within this part."""
    cached_tokens: int
    text: str
    """Text of all tokens, special ones included; empty where the engine has no tokenizer."""
    token_texts: list[str]
    """Text of each token by itself; empty where it was not asked for."""
    exact: bool
    """The versions are the engine's own, token by token, and not one for the whole reply."""


def read_part(reply: Mapping[str, Any]) -> Part:
    """Return what a reply of ``/generate`` holds.

    Raises:
        SamplerError: it lacks ids or log-probabilities, or the engine failed.
    """
    try:
        meta = reply["meta_info"]
        entries = meta["output_token_logprobs"] or []
        finish = meta["finish_reason"]
        ids = [entry[1] for entry in entries]
        if ids != list(reply.get("output_ids", ids)):
            raise SamplerError("the engine's output_ids are not those of its output_token_logprobs")
        if "weight_versions" in meta:
            # SGLang names one for a request that was aborted before its first token, too.
            spans = [span for span in meta["weight_versions"] if span["start"] < len(ids)]
            versions = tuple((int(span["start"]), version_number(span["version"])) for span in spans)
        else:
            versions = ((0, version_number(meta.get("weight_version", "default"))),) if ids else ()
        return Part(
            token_ids=ids,
            logprobs=[float(entry[0]) for entry in entries],
            finish=_finish(finish),
            versions=versions,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            text=reply.get("text") or "",
            token_texts=[entry[2] or "" for entry in entries],
            exact="weight_versions" in meta,
        )
    except (KeyError, TypeError, IndexError) as error:
        raise SamplerError(f"the engine's reply has no {error}: {str(dict(reply))[:200]}") from error


def version_number(name: object) -> int:
    """Return a weight version as a number; SGLang calls the weights it started with ``default``: 0.

    Raises:
        SamplerError: it is no number, so somebody else set it.
    """
    text = str(name)
    if text == "default":
        return 0
    if not text.lstrip("-").isdigit():
        raise SamplerError(f"the engine's weight_version is {text!r}: agentrl sets whole numbers, who changed it?")
    return int(text)


def join(parts: Sequence[Part], stops: Sequence[str]) -> Part:
    """Return the parts as one; a stop string that begins in one and ends in the next ends the turn there.

    Engines look for stop strings in what one request samples, so such a string passes them unseen. Tokens after the
    one that completes it are dropped, as if they had not been sampled.
    """
    first = parts[0]
    for part in parts[1:]:
        first = _append(first, part, stops)
        if first.finish is FinishReason.STOP:
            return first
    return first


def _append(left: Part, right: Part, stops: Sequence[str]) -> Part:
    count, finish = len(right.token_ids), right.finish
    spanning = _spanning(left.text, right.token_texts, stops) if stops else None
    if spanning is not None:
        count, finish = spanning, FinishReason.STOP
    offset = len(left.token_ids)
    versions = list(left.versions)
    for start, version in right.versions:
        if start < count and (not versions or versions[-1][1] != version):
            versions.append((offset + start, version))
    return Part(
        token_ids=left.token_ids + right.token_ids[:count],
        logprobs=left.logprobs + right.logprobs[:count],
        finish=finish,
        versions=tuple(versions),
        cached_tokens=left.cached_tokens,
        text=left.text + right.text,
        token_texts=left.token_texts + right.token_texts[:count],
        exact=left.exact and right.exact,
    )


def _spanning(left: str, right: Sequence[str], stops: Sequence[str]) -> int | None:
    """Return how many tokens of ``right`` complete the first stop string that begins in ``left``, or None."""
    longest = max(len(stop) for stop in stops)
    tail = left[-(longest - 1) :] if longest > 1 else ""
    text = tail
    for count, token in enumerate(right, 1):
        text += token
        for stop in stops:
            at = text.find(stop)
            if 0 <= at < len(tail):
                return count
        if len(text) >= len(tail) + longest:
            return None
    return None


def _finish(finish: object) -> FinishReason:
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    try:
        return FinishReason(str(kind))
    except ValueError:
        raise SamplerError(f"the engine ended a generation with finish_reason {finish!r}") from None
