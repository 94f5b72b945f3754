"""New weights for an engine, and the gate that keeps generations from sampling with half of them."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from agentrl.core.errors import EngineError, SamplerError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.inference.client.http import Refused, Transport
from agentrl.obs.waiting import waiting

if TYPE_CHECKING:
    import torch

_TOUCHED = ("Failed to update weights", "cache was not flushed")
"""What SGLang says after it has changed weights."""
_MIXTURE = "got only a part of an update of its weights"
_EMPTY = "has given its weights back, and got no whole update since"
_SETTLE_S = 300.0
_SETTLE_POLL_S = 0.05


class RefusedControl(EngineError):
    """The engine answered a control request with an error."""

    def __init__(self, url: str, path: str, words: object, status: int) -> None:
        """Say who refused what, in its words."""
        super().__init__(f"the engine at {url} refuses {path}: {words}")
        self.status = status


class Control:
    """Control requests to one engine."""

    def __init__(self, transport: Transport, url: str) -> None:
        """Send through ``transport``."""
        self._transport = transport
        self.url = url

    async def call(self, path: str, body: dict[str, Any] | None, *, once: bool = False) -> Any:
        """Send a control request and return its reply; ``body`` None means GET, ``once`` that it is never sent again.

        Raises:
            RefusedControl: with the engine's words.
            EngineError: it does not answer.
        """
        try:
            with waiting("engine", self.url, path):
                if body is None:
                    reply = await self._transport.get(path)
                elif once:
                    reply = await self._transport.post(path, body, retries=0)
                else:
                    reply = await self._transport.post(path, body)
        except Refused as error:
            raise RefusedControl(self.url, path, error.words, error.status) from error
        except httpx.HTTPError as error:
            raise EngineError(
                f"the engine at {self.url} does not answer {path}: {type(error).__name__} {error}"
            ) from error
        if isinstance(reply, dict) and reply.get("success") is False:
            raise RefusedControl(self.url, path, reply.get("message"), 200)
        return reply


class WeightUpdates:
    """Weights for one engine, bucket by bucket, of SGLang with and without begin and end of an update.

    SGLang changes its weights with every bucket, and samples between two. So generations wait from the first bucket to
    the last, and are refused after an update that broke off, until a whole one has come. The embedded engine keeps
    buckets aside until the last one, and says so: it stays on the old weights.
    """

    def __init__(self, control: Control, paused: Callable[[], bool], holds: Callable[[], bool]) -> None:
        """Steer the engine behind ``control``; ``paused`` tells whether it is held at the moment, and ``holds`` whether
        it keeps requests meanwhile.
        """
        self._control = control
        self._paused = paused
        self._holds = holds
        self._under_way = False
        self._brackets = True
        """The engine has /begin_weight_update, as far as is known."""
        self._changed = False
        """The update under way may have changed weights."""
        self._unfit: str | None = None
        """Why its weights may not be sampled with."""
        self._absent = False
        """It has given its weights' memory back."""
        self._done: asyncio.Event | None = None
        """Cleared while an update is under way; None: never was."""

    @property
    def closed(self) -> bool:
        """Whether `opened` would wait or raise."""
        return self._unfit is not None or self._under_way

    async def opened(self) -> None:
        """Wait while an update is under way.

        Raises:
            SamplerError: the engine may hold a mixture of weights.
        """
        if self._done is not None:
            await self._done.wait()
        if self._unfit is not None:
            raise SamplerError(
                f"the engine at {self._control.url} {self._unfit}: it samples nothing until a whole one has come"
            )

    async def idle(self) -> None:
        """Wait until the engine runs nothing, and have it drop its prefix cache.

        Raises:
            EngineError: it is paused or gets weights, or does not become idle.
        """
        if self._paused() or self._under_way:
            raise EngineError(f"the engine at {self._control.url} is paused or gets weights: that must end first")
        await self._settled()

    def weights_left(self) -> None:
        """Say that the engine has given its weights' memory back."""
        self._absent, self._unfit = True, _EMPTY

    def weights_back(self) -> None:
        """Say that the engine has memory for weights again."""
        self._absent = False

    def present(self) -> None:
        """Check that the engine has memory for weights.

        Raises:
            EngineError: it has given it back.
        """
        if self._absent:
            raise EngineError(
                f"the engine at {self._control.url} has given its weights' memory back: take_back_memory('weights') first"
            )

    async def from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights."""
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": True}
        # Without it SGLang reads as it did at its start, and one that made its weights up then would refuse to read any.
        body["load_format"] = "auto"
        self.present()
        self._close()
        try:
            await self._settled()
            await self._check_held()
            await self._read(body)
        finally:
            self._finish()

    async def _read(self, body: dict[str, Any]) -> None:
        try:
            await self._control.call("/update_weights_from_disk", body)
            self._unfit = None
        except EngineError as error:
            # SGLang's other refusals come before it touches a weight.
            if not isinstance(error, RefusedControl) or any(words in str(error) for words in _TOUCHED):
                await self._doubt()
            raise

    async def from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        """Take one bucket of weights in the request."""
        body: dict[str, Any] = {"serialized_named_tensors": [pickle_tensors(named)]}
        await self._bucket("/update_weights_from_tensor", body, version, last=last)

    async def from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Take one bucket of weights that lie on the engine's GPUs, one handle a rank."""
        body: dict[str, Any] = {"serialized_named_tensors": list(handles)}
        await self._bucket("/update_weights_from_tensor", body, version, last=last)

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        """Take one bucket that is broadcast."""
        body: dict[str, Any] = {
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
        }
        # Sent a second time, it would wait for a second broadcast.
        await self._bucket("/update_weights_from_distributed", body, version, last=last, once=True)

    async def begin(self) -> None:
        """Open an update: no generation starts until `cancel` or the last bucket."""
        if self._under_way:
            return
        self.present()
        self._close()
        try:
            await self._settled()
            await self._check_held()
            await self._begin()
        except BaseException:
            self._finish()
            raise

    async def cancel(self) -> None:
        """Close an update that broke off; see `EngineControl.cancel_update`."""
        if not self._under_way:
            return
        try:
            if self._changed:
                await self._doubt()
            if self._brackets:
                await self._control.call("/end_weight_update", {})
        finally:
            self._finish()

    async def _bucket(self, path: str, body: dict[str, Any], version: int, *, last: bool, once: bool = False) -> None:
        await self.begin()
        body["flush_cache"] = last
        if last:
            body["weight_version"] = str(version)
        before, self._changed = self._changed, True
        try:
            await self._control.call(path, body, once=once)
            if last and self._brackets:
                await self._control.call("/end_weight_update", {})
        except EngineError as error:
            if isinstance(error, RefusedControl) and "Failed to receive" in str(error):
                self._changed = before
            with contextlib.suppress(EngineError):  # the first error says what happened
                await self.cancel()
            raise
        if last:
            self._unfit = None
            self._finish()

    def _close(self) -> None:
        self._done = self._done or asyncio.Event()
        self._done.clear()
        self._under_way, self._changed = True, False

    async def _settled(self) -> None:
        """Wait until an engine that is not paused runs nothing.

        SGLang stops requests whose callers have gone, but late, and loads new weights beside them. It then keeps its
        old cache (seen with 0.5.23).
        """
        deadline = time.monotonic() + _SETTLE_S
        while not self._paused():
            try:
                await self._control.call("/flush_cache", {})
                return
            except RefusedControl:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_SETTLE_POLL_S)

    async def _check_held(self) -> None:
        """Refuse where it would end the engine.

        Before 0.5.23 SGLang ends when it is to drop its cache for new weights and a pause has left requests in it.
        """
        if not self._holds():
            return
        await self._begin()
        if not self._brackets:
            raise EngineError(
                f"the engine at {self._control.url} keeps paused requests, and this SGLang cannot change weights beside "
                "them: pause it with mode='abort', or take SGLang 0.5.23 or newer"
            )
        await self._control.call("/end_weight_update", {})

    def _finish(self) -> None:
        self._under_way = False
        if self._done is not None:
            self._done.set()

    async def _doubt(self) -> None:
        """Take the engine's weights for a mixture, unless it says that it never has one: then it has those of before."""
        info = None
        with contextlib.suppress(EngineError):
            info = await self._control.call("/server_info", None)
        if not isinstance(info, dict) or info.get("whole_updates") is not True:
            self._unfit = _MIXTURE

    async def _begin(self) -> None:
        if not self._brackets:
            return
        try:
            await self._control.call("/begin_weight_update", {})
            return
        except RefusedControl as error:
            if error.status == 404:
                self._brackets = False  # SGLang before 0.5.23
                return
            if error.status != 400:
                raise
        # Somebody who is gone may have left an update open: whoever sends all weights can begin anew.
        await self._control.call("/end_weight_update", {})
        await self._control.call("/begin_weight_update", {})


def pickle_tensors(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """Return tensors as SGLang takes them: a base64 pickle, by value."""
    # Sharing a CPU tensor by file descriptor crashes SGLang's scheduler. A view would carry its whole storage.
    pairs = [(name, tensor.detach().cpu().contiguous().clone()) for name, tensor in named]
    return base64.b64encode(pickle.dumps(pairs)).decode()
