"""Calls of the callbacks of a run: one after the other, with errors that name the callback."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.core.callback import Callback, OptimizerBatch, RunHandle
from agentrl.core.errors import CallbackError, ConfigError
from agentrl.core.imports import load_object
from agentrl.core.types import Rollout
from agentrl.core.user_code import await_user_code, call_in_thread, calling, describe, user_error
from agentrl.obs.progress import ProgressView
from agentrl.obs.waiting import waiting

KEY = "train.callbacks"


def check_callbacks(references: Iterable[str]) -> None:
    """Check that all references of ``train.callbacks`` name callbacks.

    Raises:
        ConfigError: one does not exist, or is no callback.
    """
    for reference in references:
        _load(reference)


def load_callbacks(references: Iterable[str]) -> list[Callback]:
    """Return the callbacks of ``train.callbacks``; classes are called without arguments.

    Raises:
        ConfigError: see `check_callbacks`, or a constructor raises.
    """
    callbacks = []
    for reference in references:
        target = _load(reference)
        if isinstance(target, Callback):
            callbacks.append(target)
            continue
        with calling(f"{KEY}={reference}: {target.__name__}()"):
            callbacks.append(target())
    return callbacks


def check_objects(callbacks: Sequence[object]) -> None:
    """Check what the caller of a run gave as its callbacks.

    Raises:
        ConfigError: an object is no callback.
    """
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = "; call the class" if inspect.isclass(callback) and issubclass(callback, Callback) else ""
            raise ConfigError(f"callbacks: {callback!r:.100} is no instance of agentrl.Callback{hint}")


def _load(reference: str) -> Callback | type[Callback]:
    target = load_object(reference, KEY)
    if isinstance(target, Callback) or (inspect.isclass(target) and issubclass(target, Callback)):
        return target
    raise ConfigError(f"{KEY}={reference}: {target!r:.100} is no subclass of agentrl.Callback")


@dataclass(slots=True)
class RunCallbacks:
    """The callbacks of a run, in the order in which they are called."""

    callbacks: Sequence[Callback] = ()
    run: RunHandle = field(default_factory=lambda: RunHandle(Path(), {}, 0, 0))

    @property
    def stops(self) -> bool:
        """Whether a callback has ended the run."""
        return self.run.stop_reason is not None

    @asynccontextmanager
    async def running(self, view: ProgressView) -> AsyncIterator[None]:
        """Call ``on_start`` before the body, and ``on_end`` after it, whatever ends it.

        Raises:
            CallbackError: a hook raised. If an error ends the body, that of an ``on_end`` is only printed.
        """
        self.run.on_stop = lambda reason: view.print_text(f"a callback stops the run: {reason}")
        await self._call_all("on_start")
        try:
            yield
        except (Exception, asyncio.CancelledError) as error:
            for callback in self.callbacks:
                try:
                    await self._call(callback, "on_end", self.run, error)
                except CallbackError as second:
                    view.print_text(f"warning: {second}")
            raise
        first_error: CallbackError | None = None
        for callback in self.callbacks:
            try:
                await self._call(callback, "on_end", self.run, None)
            except CallbackError as error:  # the others are to close what they opened
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    async def on_rollouts(self, rollouts: Sequence[Rollout]) -> None:
        """Call the hook of all callbacks."""
        await self._call_all("on_rollouts", rollouts)

    async def on_batch(self, batch: OptimizerBatch) -> None:
        """Call the hook of all callbacks."""
        await self._call_all("on_batch", batch)

    async def on_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Call the hook of all callbacks, and return the metrics that they add.

        Raises:
            CallbackError: a hook raised, or returned something else than metrics.
        """
        added: dict[str, float] = {}
        for callback in self.callbacks:
            result = await self._call(callback, "on_step", self.run, metrics)
            if result is not None:
                added |= _checked_metrics(f"{_name(callback)}.on_step", result, {*metrics, *added})
        return added

    async def on_weights_synced(self) -> None:
        """Call the hook of all callbacks."""
        await self._call_all("on_weights_synced")

    async def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call the hook of all callbacks."""
        await self._call_all("on_eval", step, metrics)

    async def on_checkpoint(self, path: Path) -> None:
        """Call the hook of all callbacks."""
        await self._call_all("on_checkpoint", path)

    async def _call_all(self, hook: str, *arguments: object) -> None:
        for callback in self.callbacks:
            await self._call(callback, hook, self.run, *arguments)

    async def _call(self, callback: Callback, hook: str, *arguments: object) -> object:
        """Call a hook and wait for its result.

        Raises:
            CallbackError: it raised.
        """
        if getattr(type(callback), hook) is getattr(Callback, hook):  # no thread is started for it
            return None
        function, name = getattr(callback, hook), f"{_name(callback)}.{hook}"
        try:
            with waiting("callback", name):
                if inspect.iscoroutinefunction(function):
                    return await await_user_code(function(*arguments))
                return await call_in_thread(lambda: function(*arguments), name)
        except BaseException as caught:
            error = user_error(caught)
            raise CallbackError(f"callback {name} raised {describe(error)}") from error


def _name(callback: Callback) -> str:
    return type(callback).__name__


def _checked_metrics(name: str, result: object, taken: set[str]) -> dict[str, float]:
    """Return the result of an ``on_step`` as metrics.

    Raises:
        CallbackError: it is none, or has a name that the step has already.
    """
    if not isinstance(result, Mapping):
        raise CallbackError(f"callback {name} returned {result!r:.100}; it may return a mapping of metrics, or None")
    metrics = {}
    for key, value in result.items():
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not isinstance(key, str) or not math.isfinite(number):
            raise CallbackError(
                f"callback {name} returned the metric {key!r}={value!r:.100}, which is no finite number"
            )
        if key in taken or key == "step":
            raise CallbackError(f"callback {name} returned the metric {key!r}, which the step has already; rename it")
        metrics[key] = number
    return metrics
