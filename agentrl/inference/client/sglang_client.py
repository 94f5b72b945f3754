"""Client of an engine that speaks SGLang's protocol: sampling and control."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from typing_extensions import override

from agentrl.config.sampler import REFUSED_OPTIONS
from agentrl.core.errors import ConfigError, EngineError, EngineLostError, SamplerError
from agentrl.inference.base import MemoryTag
from agentrl.inference.client.control import ControlEndpoint, ControlRefused
from agentrl.inference.client.engine_state import EngineMirror, EngineState, RequestsInProgress
from agentrl.inference.client.generation import KEEPING, GenerationClient, version_number
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.inference.client.precision import quantized_weights
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.client.weight_updates import SGLangWeightGroups, SGLangWeightUpdates

_TAGS: tuple[MemoryTag, ...] = ("weights", "kv_cache")


class SGLangMemory:
    """Memory of one engine; see `agentrl.inference.base.EngineMemory`.

    SGLang crashes if memory is released or resumed twice, so this keeps track of what is released.
    """

    def __init__(
        self,
        control: ControlEndpoint,
        updates: SGLangWeightUpdates,
        cut: Callable[[str], Awaitable[None]],
        *,
        restores_weights: bool = False,
    ) -> None:
        """Control the engine behind ``control``, which holds all of its memory.

        Args:
            control: the engine.
            updates: of its weights.
            cut: aborts generations in progress.
            restores_weights: resumed weights are those that were released; otherwise they are undefined until an update.
        """
        self._cut = cut
        self._restores_weights = restores_weights
        self._control = control
        self._updates = updates
        self._released: set[MemoryTag] = set()
        """Parts that are released, or may be."""
        self._resumed: asyncio.Event | None = None
        """Cleared while any memory is released; None: none was so far."""

    @property
    def ready(self) -> bool:
        """Whether the engine holds all of its memory."""
        return not self._released

    async def wait_ready(self) -> None:
        """Wait until the engine holds all of its memory."""
        if self._resumed is not None:
            await self._resumed.wait()

    async def release(self, cut: Literal["abort", "restart"] | None = None) -> None:
        """Release what the engine still holds, once it runs nothing; see `agentrl.inference.base.EngineMemory`.

        Raises:
            EngineError: it is paused or receives weights, stays busy for minutes, or refuses.
        """
        tags = [tag for tag in _TAGS if tag not in self._released]
        if not tags:
            return
        previously_released = set(self._released)
        self._released |= set(tags)
        self._resumed = self._resumed or asyncio.Event()
        self._resumed.clear()
        sent = False
        try:
            await self._updates.publish()
            if cut is not None:
                await self._cut(cut)
            await self._updates.wait_idle()
            sent = True
            await self._control.call("/release_memory_occupation", {"tags": tags}, once=True)
        except BaseException as error:
            if not sent or isinstance(error, ControlRefused):
                self._released = previously_released
                self._set_if_resumed()
            raise
        finally:
            if "weights" in self._released:
                self._updates.set_released(True, lost=not self._restores_weights)
            await self._updates.publish()

    async def resume(self, tag: MemoryTag) -> None:
        """Allocate released memory again."""
        if tag not in self._released:
            return
        await self._control.call("/resume_memory_occupation", {"tags": [tag]}, once=True)
        self._released.remove(tag)
        if tag == "weights":
            self._updates.set_released(False)
        self._set_if_resumed()
        await self._updates.publish()

    def _set_if_resumed(self) -> None:
        if not self._released and self._resumed is not None:
            self._resumed.set()


_CUT_POLL_S = 0.02
_CUT_S = 1.0
"""How long a pause waits for the replies to the requests that it has cut."""
_DTYPES = {name: name for name in ("bfloat16", "float16", "float32")} | {"half": "float16", "float": "float32"}
"""Dtypes by SGLang's names."""


class SGLangClient(GenerationClient):
    """A `Sampler` and an `EngineControl` for one engine.

    While the engine is paused, receives weights or lacks memory through this client, generations wait.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 300.0,
        vocabulary: Vocabulary | None = None,
        routed: GenerationClient | None = None,
        number: int = 0,
        prefix_cache: str = "drop",
        mirror: EngineMirror | None = None,
        restores_weights: bool = False,
    ) -> None:
        """Remember the engine's address.

        Args:
            url: of the engine.
            timeout_s: how long a generation may take.
            vocabulary: of the policy, with which replies are checked.
            routed: client of a router in front of the engine, if generations go through one: any of them may run here.
            number: index of the engine in the run.
            prefix_cache: ``weights.prefix_cache``.
            mirror: informs other processes that sample with the engine.
            restores_weights: see `EngineSpec.restores_weights`.
        """
        http = EngineHttp(url, timeout_s)
        super().__init__(http, vocabulary, knows_ages=prefix_cache == "keep")
        self._by_version = prefix_cache == "by_version"
        self.url = url
        self.number = number
        self._generations: GenerationClient = routed or self
        self._mirror = mirror
        self._resumed: asyncio.Event | None = None
        """Cleared while the engine is paused; None: it was not so far."""
        self.control = control = ControlEndpoint(http)
        self.updates = SGLangWeightUpdates(
            control,
            paused=self._is_paused,
            keeps_requests=lambda: self._is_paused() and self._generations.keeps_requests,
            publish=self._publish,
            drops_cache=prefix_cache == "drop",
        )
        self.memory = SGLangMemory(control, self.updates, self._cut, restores_weights=restores_weights)
        self.groups = SGLangWeightGroups(control)

    async def aclose(self) -> None:
        """Close all connections."""
        await asyncio.to_thread(self.updates.payloads.close)
        await self._http.aclose()

    # Sampling

    @property
    def ready(self) -> bool:
        """Whether generations may start: it is not paused, receives no weights and has its memory."""
        return not self._is_paused() and self.updates.ready and self.memory.ready

    async def wait_ready(self) -> None:
        """Wait until `ready`; raises `SamplerError` if the engine holds only a part of an update."""
        while not self.ready:
            await self._resume_event().wait()
            await self.memory.wait_ready()
            await self.updates.wait_ready()

    def adapter(self, policy: str) -> str | None:
        """Return the name of the LoRA adapter that generations of a policy use."""
        return self.updates.adapters.of(policy)

    @override
    def _engine_state(self) -> EngineState:
        waits = self._is_paused() or self.updates.in_progress or not self.memory.ready
        unfit = "" if waits else self.updates.unfit
        return replace(super()._engine_state(), unfit=unfit, adapters=dict(self.updates.adapters.current))

    async def _publish(self, *, pause: str | None = None, updated: bool = False) -> RequestsInProgress:
        """Inform this process's generations and other processes of what has happened to the engine."""
        if pause is not None:
            self._generations.note_pause(pause)
        if updated:
            self._generations.note_update()
        if self._mirror is None:
            return RequestsInProgress()
        return await self._mirror.publish(self._generations, pause=pause, updated=updated)

    async def _unanswered(self) -> int:
        """Return how many requests of all processes have no reply."""
        return self._generations.unanswered + (await self._publish()).unanswered

    @override
    def _weights_owner(self) -> str:
        return self.updates.sent_owner

    def _cache_key(self) -> str | None:
        """Return the policy version, if requests reuse only what their version has computed."""
        return f"v{self.updates.version}" if self._by_version else None

    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until its `generate` returns; unknown requests are ignored."""
        await self.abort_at(request_id, self.stop)

    async def stop(self, rid: str) -> None:
        """Have the engine end requests whose id begins with ``rid``; unknown ids are accepted.

        Raises:
            SamplerError: no reply.
        """
        try:
            async with self._http.request("POST", "/abort_request", {"rid": rid}):
                pass
        except (ErrorReply, *CONNECTION_ERRORS) as error:
            raise SamplerError(f"the engine at {self.url} does not abort {rid}: {error}") from error

    # Control

    async def healthy(self) -> bool:
        """Return whether the engine and its scheduler respond."""
        try:
            # Not /health, for which SGLang samples a token: that takes a second, and crashes an engine without memory.
            async with self._http.request("GET", "/server_info", once=True):
                pass
        except (ErrorReply, *CONNECTION_ERRORS):
            return False
        return True

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; see `agentrl.inference.base.EngineControl`."""
        self._resume_event().clear()
        await self._publish(pause=mode)
        try:
            if mode not in KEEPING:
                await self._end_requests()
            await self.control.call("/pause_generation", {"mode": "abort" if mode == "restart" else mode})
        except EngineError:
            self._resume_event().set()
            await self._publish()
            raise

    async def resume(self) -> None:
        """Continue sampling."""
        await self.control.call("/continue_generation", {})
        self._resume_event().set()
        await self._publish()

    async def _cut(self, mode: str) -> None:
        """Abort the generations in progress, those too whose request has not reached the engine yet."""
        while await self._unanswered():
            await self.pause(mode)
            await self.resume()
            await asyncio.sleep(_CUT_POLL_S)

    async def _end_requests(self) -> None:
        """Abort the requests in progress and wait for their replies.

        A pause would abort them too, but SGLang (0.5.17, 0.5.23) looks only once a second whether they have ended.
        """
        end = time.monotonic() + _CUT_S
        while await self._unanswered() and time.monotonic() < end:
            await self.control.call("/abort_request", {"rid": "", "abort_all": True})
            await asyncio.sleep(_CUT_POLL_S)

    async def flush(self) -> None:
        """Drop the prefix cache once the engine runs nothing: a request that it has just answered may still count as running.

        Raises:
            EngineError: it is paused or receives weights, or does not become idle.
        """
        await self.updates.wait_idle()

    async def version(self) -> int:
        """Return the policy version that samples now."""
        info = await self.control.call("/model_info", None)
        try:
            return version_number(info["weight_version"], self.updates.sent_owner, self.url)
        except EngineLostError as error:
            raise EngineError(str(error)) from error
        except (KeyError, TypeError, SamplerError) as error:
            raise EngineError(f"the engine at {self.url} reports no version: {error}") from error

    async def max_tokens(self) -> int:
        """Return the number of tokens that prompt and output may have together, whatever the length of the prompt.

        SGLang takes prompts shorter than its ``max_req_input_len``, which is a few tokens less than its context or its KV cache.

        Raises:
            EngineError: the engine does not report it.
        """
        info = await self.control.call("/server_info", None)
        max_input_tokens = info.get("max_req_input_len") if isinstance(info, dict) else None
        if not isinstance(max_input_tokens, int):
            raise EngineError(
                f"the engine at {self.url} reports max_req_input_len={max_input_tokens!r} at /server_info, not a number"
            )
        return max_input_tokens

    async def dtype(self) -> str | None:
        """Return the dtype of the weights; None if the engine does not report it, as SGLang with ``--dtype auto``.

        It is ``float8_e4m3fn`` if matrices are float8 in blocks, and others are not.

        Raises:
            ConfigError: its weights are quantised in a way in which SGLang takes no new ones; see `quantized_weights`. Or it was
                started with one of `REFUSED_OPTIONS`.
        """
        info = await self.control.call("/server_info", None)
        info = info if isinstance(info, dict) else {}
        form = quantized_weights(info, f"the engine at {self.url}")
        for name, (accepted, reason) in REFUSED_OPTIONS.items():
            if (value := info.get(name) or accepted) != accepted:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"the engine at {self.url} has {name}={value}: {reason}; start it without {option}")
        return form or _DTYPES.get(str(info.get("dtype")))

    async def checksums(self) -> dict[str, str]:
        """Return the checksums of ``/weights_checker``, 64 bits for each weight.

        Raises:
            EngineError: the engine has no such endpoint, holds shards, or has released its weights.
        """
        self.updates.check_resumed()
        try:
            reply = await self.control.call("/weights_checker", {"action": "checksum"})
        except ControlRefused as error:
            if error.status == 404:
                reply = None
            else:
                raise
        ranks = reply.get("ranks") or [] if isinstance(reply, dict) else []
        if len(ranks) != 1 or not isinstance(ranks[0], dict) or not isinstance(ranks[0].get("checksums"), dict):
            raise EngineError(
                f"the engine at {self.url} gives no checksums that can be compared (it has {len(ranks)} parts with "
                "checksums, 1 is wanted): set weights.check=version"
            )
        return {str(name): str(value) for name, value in ranks[0]["checksums"].items()}

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return the kind of `checksums`."""
        info = await self.control.call("/server_info", None)
        device = info.get("device") if isinstance(info, dict) else None
        return "sha256" if device in (None, "cpu") else "words"

    def _is_paused(self) -> bool:
        return self._resumed is not None and not self._resumed.is_set()

    def _resume_event(self) -> asyncio.Event:
        if self._resumed is None:
            self._resumed = asyncio.Event()
            self._resumed.set()
        return self._resumed
