"""Weight updates of an SGLang engine, and its membership in process groups of weight broadcasts."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import EngineError, SamplerError
from agentrl.distributed.base import LOAD_FORMAT, TensorSpec, WeightGroup
from agentrl.distributed.sglang_loader import BUCKET_LOADER, FOLDER, LOADER, PROBE_LOADER
from agentrl.inference.base import LoraAdapter
from agentrl.inference.client.adapters import SGLangAdapters
from agentrl.inference.client.control import ControlEndpoint, ControlRefused
from agentrl.inference.client.engine_state import RequestsInProgress
from agentrl.inference.client.payloads import TARGET, TENSORS, EnginePayloads, tensors_body

if TYPE_CHECKING:
    import torch

    from agentrl.distributed.payload_server import Payload
    from agentrl.distributed.sglang_loader.agentrl_weight_loaders import EncodedBucket


_TOUCHED = ("Failed to update weights", "cache was not flushed")
"""SGLang's messages of failures after which weights may have changed."""
_CLOSED = ("no weight update is in progress", "no weight-update session is open")
"""Messages of the embedded engine and of SGLang: another client has ended the update."""
_MIXTURE = "got only a part of an update of its weights"
_EMPTY = "has released the memory of its weights, and got no whole update since"
_SETTLE_S = 300.0
_SETTLE_POLL_S = 0.05


async def _no_other_process(*, updated: bool = False) -> RequestsInProgress:
    return RequestsInProgress()


class SGLangWeightUpdates:
    """Weight updates of one engine; see `agentrl.inference.base.WeightUpdates`.

    SGLang changes its weights with every bucket, and would sample between two. So generations wait from the first bucket
    to the last, and are refused after an update that broke off, until a whole one has come. The embedded engine stages
    buckets until the last one, and reports that: it keeps sampling with the old weights.
    """

    def __init__(
        self,
        control: ControlEndpoint,
        *,
        paused: Callable[[], bool],
        keeps_requests: Callable[[], bool],
        publish: Callable[..., Awaitable[RequestsInProgress]] = _no_other_process,
        drops_cache: bool = True,
    ) -> None:
        """Control the engine behind ``control``.

        Args:
            control: the engine.
            paused: whether it is paused now.
            keeps_requests: whether it is paused and keeps requests.
            publish: informs other processes that sample with the engine: called when `ready` has changed, and with
                ``updated=True`` when the engine has received weights. Returns once they know, with their requests.
            drops_cache: whether an update empties the prefix cache.
        """
        self.owner = ""
        """Sent with every version, to recognise weights of other clients; empty: versions are numbers alone."""
        self.sent_owner = ""
        """The owner, once the engine has weights of it."""
        self._control = control
        self._paused = paused
        self._keeps_requests = keeps_requests
        self.publish = publish
        """See the arguments."""
        self._others_keep_requests = False
        """Whether a paused engine keeps requests of other processes."""
        self._drops_cache = drops_cache
        self.version: int | None = None
        """Version of the last whole update; None: there was none."""
        self.adapters = SGLangAdapters(control)
        """The engine's LoRA adapters."""
        self._in_progress = False
        self._brackets = True
        """The engine has /begin_weight_update, as far as is known."""
        self.payloads = EnginePayloads(control)
        """What the engine fetches."""
        self._changed = False
        """The update in progress may have changed weights."""
        self._unfit: str | None = None
        """Why its weights must not be sampled with."""
        self._released = False
        """The memory of its weights is released."""
        self._done: asyncio.Event | None = None
        """Cleared while an update is in progress; None: none was so far."""

    @property
    def in_progress(self) -> bool:
        """Whether the engine is receiving weights, during which it may not answer."""
        return self._in_progress

    @property
    def unfit(self) -> str:
        """Why generations fail instead of waiting; empty if they do not."""
        if self._unfit is None:
            return ""
        return f"the engine at {self._control.url} {self._unfit}: it samples nothing until a whole one has come"

    @property
    def ready(self) -> bool:
        """Whether generations may start: `wait_ready` would neither wait nor raise."""
        return self._unfit is None and not self._in_progress

    async def wait_ready(self) -> None:
        """Wait while an update is in progress.

        Raises:
            SamplerError: the engine may hold a mixture of weights.
        """
        if self._done is not None:
            await self._done.wait()
        if self.unfit:
            raise SamplerError(self.unfit)

    async def wait_idle(self) -> None:
        """Wait until the engine runs nothing, and drop its prefix cache.

        Raises:
            EngineError: it is paused or receives weights, or does not become idle.
        """
        if self._paused() or self._in_progress:
            raise EngineError(f"the engine at {self._control.url} is paused or gets weights: that must end first")
        await self._wait_settled(drop=True)

    def set_released(self, released: bool, *, lost: bool = True) -> None:
        """Record whether the memory of the weights is released, and whether they are ``lost`` with it."""
        self._released = released
        if released and lost:
            self._unfit = _EMPTY

    def check_resumed(self) -> None:
        """Check that the weights have memory.

        Raises:
            EngineError: it is released.
        """
        if self._released:
            raise EngineError(
                f"the engine at {self._control.url} has released the memory of its weights: call memory.resume('weights') first"
            )

    async def from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights."""
        body = {
            "model_path": str(folder.absolute()),
            "weight_version": self._version_name(version),
            "flush_cache": self._drops_cache,
        }
        # Otherwise SGLang uses the format of its start, and one that started with dummy weights would refuse to load any.
        body["load_format"] = "auto"
        self.check_resumed()
        await self._close()
        updated = False
        try:
            await self._wait_settled()
            await self._check_kept_requests()
            await self._load(body)
            self.version, self.sent_owner, updated = version, self.owner, True
        finally:
            await self._finish(updated=updated)

    async def from_adapters(self, adapters: Mapping[str, LoraAdapter], version: int) -> None:
        """Load the LoRA adapters of policies, while no generation starts."""
        self.check_resumed()
        await self._close()
        try:
            await self._wait_settled()
            await self.adapters.load(adapters, version, self._version_name(version), keep_old=self._has_kept_requests())
            self.sent_owner = self.owner
        finally:
            await self._finish()

    async def _load(self, body: dict[str, Any]) -> None:
        try:
            await self._control.call("/update_weights_from_disk", body)
            self._unfit = None
            self.adapters.drop()
        except EngineError as error:
            # SGLang's other refusals come before it touches a weight.
            if not isinstance(error, ControlRefused) or any(words in str(error) for words in _TOUCHED):
                await self._mark_mixture()
            raise

    async def from_tensors(
        self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
    ) -> None:
        """Load one bucket of weights from the request."""
        from agentrl.distributed.flat_bucket import join_tensors, serialize
        from agentrl.distributed.sglang_loader.agentrl_weight_loaders import encode_whole

        flat, specs = await asyncio.to_thread(join_tensors, named)
        loaders = await self.payloads.loaders()
        if PROBE_LOADER in loaders or (ranks > 1 and BUCKET_LOADER in loaders):
            bucket = encode_whole(flat, [(spec.name, spec.dtype, spec.shape) for spec in specs])
            await self._load_encoded(BUCKET_LOADER, bucket, version, last=last, ranks=ranks)
            return
        # SGLang's own loader has each rank read an entry.
        entries = [await asyncio.to_thread(serialize, flat, specs)] * ranks
        await self._bucket(TENSORS, tensors_body(LOAD_FORMAT, entries), version, last=last)

    async def from_changes(self, changes: EncodedBucket, version: int, *, last: bool, ranks: int = 1) -> None:
        """Load one bucket of changes of weights."""
        if LOADER not in await self.payloads.loaders():
            self.payloads.forget_loaders()
            raise EngineError(
                f"the engine at {self._control.url} does not take changes of weights: start it with "
                f"--custom-weight-loader {LOADER} and PYTHONPATH={FOLDER}, or set weights.transport=tensor"
            )
        # Sent a second time, they would be changes to other weights.
        await self._load_encoded(LOADER, changes, version, last=last, ranks=ranks, once=True)

    async def _load_encoded(
        self, loader: str, bucket: EncodedBucket, version: int, *, last: bool, ranks: int, once: bool = False
    ) -> None:
        """Load one bucket by a loader of agentrl."""
        await self.begin()
        async with self.payloads.body(loader, bucket, ranks) as (body, payload):
            await self._bucket(TENSORS, body, version, last=last, once=once, payload=payload)

    async def from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Load one bucket of weights from memory of the engine's GPUs, one handle a rank."""
        await self._bucket(TENSORS, tensors_body(LOAD_FORMAT, handles), version, last=last)

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        """Load one bucket that is broadcast; see `agentrl.learner.base.WeightBucket.broadcast`."""
        from agentrl.distributed.flat_bucket import broadcast_as_one

        body: dict[str, Any] = {
            "load_format": LOAD_FORMAT if broadcast_as_one(specs) else None,
            "names": [spec.name for spec in specs],
            "dtypes": [spec.dtype for spec in specs],
            "shapes": [list(spec.shape) for spec in specs],
            "group_name": group.name,
        }
        # Sent a second time, it would wait for a second broadcast.
        await self._bucket("/update_weights_from_distributed", body, version, last=last, once=True)

    async def begin(self) -> None:
        """Begin an update: no generation starts until `cancel` or the last bucket."""
        if self._in_progress:
            return
        self.check_resumed()
        await self._close()
        try:
            await self._wait_settled()
            await self._check_kept_requests()
            await self._begin()
        except BaseException:
            await self._finish()
            raise

    async def cancel(self) -> None:
        """End an update that broke off."""
        if not self._in_progress:
            return
        try:
            if self._changed:
                await self._mark_mixture()
            if self._brackets:
                await self._control.call("/end_weight_update", {})
        finally:
            await self._finish()

    async def _bucket(
        self,
        path: str,
        body: dict[str, Any],
        version: int,
        *,
        last: bool,
        once: bool = False,
        payload: Payload | None = None,
    ) -> None:
        await self.begin()
        body |= {"flush_cache": last and self._drops_cache, **TARGET}
        if last:
            body["weight_version"] = self._version_name(version)
        before, self._changed = self._changed, True
        try:
            await self._control.call(path, body, once=once)
            if payload is not None:
                await self.payloads.check_fetched(payload)
            if last and self._brackets:
                await self._control.call("/end_weight_update", {})
        except EngineError as error:
            if isinstance(error, ControlRefused) and "Failed to receive" in str(error):
                self._changed = before
            with contextlib.suppress(EngineError):  # the first error is the informative one
                await self.cancel()
            if "out of memory" in str(error):
                raise EngineError(f"{error}; a smaller weights.bucket_mib needs less memory in the engine") from error
            if any(words in str(error) for words in _CLOSED):
                raise EngineError(
                    f"{error}. Another run or program updates the same engine: an engine serves one run at a time"
                ) from error
            raise
        if last:
            self._unfit, self.version, self.sent_owner = None, version, self.owner
            self.adapters.drop()
            await self._finish(updated=True)
        else:
            await self.publish(updated=True)

    async def _close(self) -> None:
        self._done = self._done or asyncio.Event()
        self._done.clear()
        self._in_progress, self._changed = True, False
        self._others_keep_requests = (await self.publish()).kept

    def _version_name(self, version: int) -> str:
        return f"{version}-{self.owner}" if self.owner else str(version)

    def _has_kept_requests(self) -> bool:
        return self._keeps_requests() or (self._paused() and self._others_keep_requests)

    async def _wait_settled(self, *, drop: bool = False) -> None:
        """Wait until an engine that is not paused runs nothing; it may ``drop`` its prefix cache also if updates do not.

        SGLang stops requests whose callers have disconnected, but late, and loads new weights while they run. It then
        keeps its old cache (seen with 0.5.23).
        """
        deadline = time.monotonic() + _SETTLE_S
        while not self._paused():
            try:
                if drop or self._drops_cache:
                    await self._control.call("/flush_cache", {})
                    return
                load = await self._control.load()
                if load is not None and not load.running + load.waiting:
                    return
            except ControlRefused:
                if time.monotonic() > deadline:
                    raise
            if time.monotonic() > deadline:
                raise EngineError(f"the engine at {self._control.url} still runs requests after {_SETTLE_S:g} s")
            await asyncio.sleep(_SETTLE_POLL_S)

    async def _check_kept_requests(self) -> None:
        """Refuse an update that would crash the engine.

        Before 0.5.23 SGLang crashes if it must drop its cache for new weights while a pause keeps requests in it.
        """
        if not self._has_kept_requests():
            return
        await self._begin()
        if not self._brackets:
            raise EngineError(
                f"the engine at {self._control.url} keeps paused requests, and this SGLang cannot change weights with "
                "them: set weights.pause=abort, or take SGLang 0.5.23 or newer"
            )
        await self._control.call("/end_weight_update", {})

    async def _finish(self, *, updated: bool = False) -> None:
        self._in_progress = False
        if self._done is not None:
            self._done.set()
        await self.publish(updated=updated)

    async def _mark_mixture(self) -> None:
        """Mark the engine's weights as a mixture, unless it reports that it stages updates: then it has the old ones."""
        info = None
        with contextlib.suppress(EngineError):
            info = await self._control.call("/server_info", None)
        if not isinstance(info, dict) or info.get("whole_updates") is not True:
            self._unfit = _MIXTURE

    async def _begin(self) -> None:
        if not self._brackets:
            return
        try:
            await self._control.call("/begin_weight_update", {"selector": TARGET["selector"]})
            return
        except ControlRefused as error:
            if error.status == 404:
                self._brackets = False  # SGLang before 0.5.23
                return
            if error.status != 400:
                raise
        # A client that is gone may have left an update open: a sender of all weights may begin again.
        await self._control.call("/end_weight_update", {})
        await self._control.call("/begin_weight_update", {"selector": TARGET["selector"]})


class SGLangWeightGroups:
    """Process groups of one engine; see `agentrl.inference.base.WeightGroups`."""

    def __init__(self, control: ControlEndpoint) -> None:
        """Use the engine behind ``control``."""
        self._control = control
        self._ranks: int | None = None
        """Cached return value of `ranks`."""

    async def ranks(self) -> int:
        """Return the engine's tensor-parallel size."""
        if self._ranks is not None:
            return self._ranks
        info = await self._control.call("/server_info", None)
        try:
            self._ranks = int(info["tp_size"])
            return self._ranks
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine at {self._control.url} reports no tp_size in /server_info: {error}"
            ) from error

    async def join(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group; not repeated if the connection fails."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control.call("/init_weights_update_group", body, once=True)

    async def leave(self, group: WeightGroup) -> None:
        """Leave a group."""
        await self._control.call("/destroy_weights_update_group", {"group_name": group.name})
