"""An engine without a model: random tokens after a delay, in this process or as a server with SGLang's replies.

Benchmarks of the runner use it, which measure its own CPU time. ``python -m benchmarks.scripted_engine`` is the server.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from typing import Any

import orjson
from aiohttp import web

from agentrl.core.child_process import LOOPBACK, exit_with_parent, raise_file_limit
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams

_OUTPUTS = 16
"""Different outputs of one length."""
_LONGEST_PROMPT = 2**20
"""Tokens of the longest prompt, as the engine reports it."""
_LARGEST_BODY = 2**32
"""Bytes of a request, which may have a bucket of weights."""


class ScriptedSampler:
    """A `Sampler` that returns random turns of the requested length.

    Args:
        vocabulary: token ids.
        delay_s: mean seconds of a turn.
        spread: seconds differ from the mean by up to this share of it; 0: requests that begin together end together, as those of
            an engine do that decodes as many tokens for each.
    """

    def __init__(self, vocabulary: int, delay_s: float, spread: float = 0.5) -> None:
        self._rng = random.Random(0)
        self._vocabulary = vocabulary
        self._delay_s = delay_s
        self._spread = spread
        self._outputs: dict[int, list[tuple[tuple[int, ...], tuple[float, ...]]]] = {}
        """Token ids and log-probabilities by length."""

    async def wait(self, tokens: int) -> int:
        """Wait for a turn of ``tokens`` tokens, and return its number in `outputs`."""
        await asyncio.sleep(self._delay_s * self._rng.uniform(1 - self._spread, 1 + self._spread))
        return self._rng.randrange(_OUTPUTS)

    def outputs(self, tokens: int) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
        """Return the turns of this length."""
        if tokens not in self._outputs:
            self._outputs[tokens] = [
                (
                    tuple(self._rng.randrange(self._vocabulary) for _ in range(tokens)),
                    tuple(-self._rng.expovariate(1.0) for _ in range(tokens)),
                )
                for _ in range(_OUTPUTS)
            ]
        return self._outputs[tokens]

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Return a turn of ``params.max_new_tokens``."""
        number = await self.wait(params.max_new_tokens)
        ids, logprobs = self.outputs(params.max_new_tokens)[number]
        return Generation(ids, logprobs, FinishReason.LENGTH, ((0, 0),), 0, request_id)

    async def abort(self, request_id: str) -> None:
        """Do nothing: the caller has been cancelled."""

    async def close_session(self, session_id: str) -> None:
        """Do nothing."""


class _Server:
    """Serves a `ScriptedSampler` as SGLang would."""

    def __init__(self, sampler: ScriptedSampler) -> None:
        self._sampler = sampler
        self._version = "default"
        """Of the weights that were sent last."""
        self._written: dict[tuple[int, int], bytes] = {}
        """Ids and log-probabilities as JSON by length and number."""

    def _output(self, tokens: int, number: int) -> bytes:
        if (tokens, number) not in self._written:
            ids, logprobs = self._sampler.outputs(tokens)[number]
            entries = [[value, index, None] for value, index in zip(logprobs, ids, strict=True)]
            self._written[tokens, number] = b'{"output_ids":%b,"meta_info":{"output_token_logprobs":%b,' % (
                orjson.dumps(ids),
                orjson.dumps(entries),
            )
        return self._written[tokens, number]

    async def generate(self, request: web.Request) -> web.Response:
        """Return a turn of the requested length."""
        body: dict[str, Any] = orjson.loads(await request.read())
        tokens = body["sampling_params"]["max_new_tokens"]
        number = await self._sampler.wait(tokens)
        meta = {
            "id": body["rid"],
            "finish_reason": {"type": "length", "length": tokens},
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": tokens,
            "cached_tokens": 0,
            "weight_version": self._version,
            "input_token_logprobs": [],
            "total_retractions": 0,
            "e2e_latency": 1.0,
        }
        return _json(self._output(tokens, number) + orjson.dumps(meta)[1:] + b"}")

    async def answer_other(self, request: web.Request) -> web.Response:
        """Answer all other endpoints. Weights are dropped; their version is that of the turns that follow."""
        body = await request.read()
        self._version = orjson.loads(body or b"{}").get("weight_version", self._version)
        state = {"max_req_input_len": _LONGEST_PROMPT, "tp_size": 1, "weight_version": self._version}
        return _json(orjson.dumps({"success": True, **state}))


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def make_app(sampler: ScriptedSampler) -> web.Application:
    """Return the server of a sampler."""
    server = _Server(sampler)
    app = web.Application(client_max_size=_LARGEST_BODY)
    app.router.add_post("/generate", server.generate)
    app.router.add_route("*", "/{path:.*}", server.answer_other)
    return app


def main() -> None:
    """Serve until this process is ended."""
    exit_with_parent()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True, help="port on the loopback")
    parser.add_argument("--vocabulary", type=int, required=True, help="token ids")
    parser.add_argument("--delay-s", type=float, required=True, help="mean seconds until a reply")
    parser.add_argument("--spread", type=float, default=0.5, help="share of the mean by which seconds differ from it")
    arguments = parser.parse_args()
    raise_file_limit()
    app = make_app(ScriptedSampler(arguments.vocabulary, arguments.delay_s, arguments.spread))
    web.run_app(app, host=LOOPBACK, port=arguments.port, access_log=None, print=None, backlog=16384)


if __name__ == "__main__":
    main()
