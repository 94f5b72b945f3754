"""The contract of weight transports, for their authors' tests."""

from __future__ import annotations

import asyncio
import inspect
import tempfile
from pathlib import Path

import torch

from agentrl.core.errors import EngineError, LearnerError
from agentrl.testing.contract import require
from agentrl.testing.engine import FakeEngine
from agentrl.testing.learner import FakeLearner
from agentrl.weight_sync.base import SyncedWeights, Transport, TransportOptions

_BUCKET_BYTES = 12
"""Holds some of the weights, so that there are several buckets; the largest weight has more."""


def check_transport(transport: type[Transport]) -> None:
    """Check that a transport keeps the contract of `agentrl.weight_sync.base`, on a CPU. Not for use in an event loop.

    It syncs the weights of a `FakeLearner` to `FakeEngine` objects: all weights and the version arrive at every engine, also in
    another dtype, at a second sync, and after a failed one; a refusal and a wrong version raise `EngineError`; reports of size
    and fingerprint follow the weights; no file is left.

    Example::

        check_transport(SharedFolderTransport)

    Raises:
        ContractError: what the transport does, and what it should do.
    """
    require(
        inspect.isclass(transport) and issubclass(transport, Transport),
        f"{transport!r:.80} must be a subclass of agentrl.weight_sync.base.Transport",
    )
    abstract = ", ".join(sorted(transport.__abstractmethods__))
    require(not abstract, f"{transport.__name__} must implement {abstract}")
    require(transport.default_bucket_mib > 0, "default_bucket_mib must be positive")
    with tempfile.TemporaryDirectory(prefix="check-transport-") as folder:
        asyncio.run(_check(transport, Path(folder)))


async def _check(transport: type[Transport], folder: Path) -> None:
    await _check_syncs(transport, folder)
    await _check_dtype(transport, folder)
    await _check_refusal(transport, folder)
    await _check_version(transport, folder)


def _make_weights(shift: float = 0.0) -> dict[str, torch.Tensor]:
    return {
        "embed.weight": torch.arange(24, dtype=torch.float32).reshape(6, 4) + shift,
        "layer.weight": torch.tensor([[0.5, -2.0]]),
        "layer.bias": torch.tensor([1.0, 2.0, 3.0]),
        "head.scale": torch.tensor(4.0),
    }


async def _check_syncs(transport: type[Transport], folder: Path) -> None:
    """Check three syncs: the first, one without a change, and one of changed weights to engines of which one is new."""
    weights, engines = _make_weights(), [FakeEngine(0), FakeEngine(1)]
    learner = FakeLearner(weights)
    instance = transport(TransportOptions(_BUCKET_BYTES, folder, timeout_s=10.0))
    reports: list[SyncedWeights] = []
    try:
        for version in (1, 2, 3):
            if version == 3:
                weights["embed.weight"][0, 0] += 1.0
                engines[1] = FakeEngine(1)
            reports.append(await instance.sync_weights(learner, engines, version))
            for engine in engines:
                _require_weights(engine, weights, f"after the sync of version {version}")
                _require_version(engine, version)
    finally:
        await instance.aclose()
    require(not [*folder.iterdir()], f"no file may be left in the folder: {[path.name for path in folder.iterdir()]}")
    require(reports[0].bytes > 0, "SyncedWeights.bytes of a first sync must be the size of the weights")
    first, second, third = (report.fingerprint for report in reports)
    require(first == second, "the fingerprints of equal weights must be equal")
    require(second != third, "the fingerprint must differ if a weight does")


async def _check_dtype(transport: type[Transport], folder: Path) -> None:
    weights, engine = _make_weights(1 / 3), FakeEngine()
    instance = transport(TransportOptions(_BUCKET_BYTES, folder, dtype="bfloat16", check="checksum", timeout_s=10.0))
    try:
        await instance.sync_weights(FakeLearner(weights), [engine], 1)
    finally:
        await instance.aclose()
    _require_weights(engine, {name: weight.bfloat16() for name, weight in weights.items()}, "with dtype=bfloat16")


async def _check_refusal(transport: type[Transport], folder: Path) -> None:
    """Check that a refusal is an `EngineError`, and that the next sync is complete."""
    weights, engines = _make_weights(), [FakeEngine(0), FakeEngine(1, refuse="layer.bias")]
    learner = FakeLearner(weights)
    instance = transport(TransportOptions(_BUCKET_BYTES, folder, timeout_s=10.0))
    try:
        await _require_engine_error(instance, learner, engines, "an engine that refuses a weight")
        engines[1].refuse = None
        await instance.sync_weights(learner, engines, 2)
        for engine in engines:
            _require_weights(engine, weights, "after a sync that followed a failed one")
            _require_version(engine, 2)
    finally:
        await instance.aclose()
    require(not [*folder.iterdir()], "no file may be left in the folder after a failed sync")


async def _check_version(transport: type[Transport], folder: Path) -> None:
    instance = transport(TransportOptions(_BUCKET_BYTES, folder, timeout_s=10.0))
    try:
        learner = FakeLearner(_make_weights())
        await _require_engine_error(instance, learner, [FakeEngine(stuck=True)], "an engine that keeps its version")
    finally:
        await instance.aclose()


async def _require_engine_error(
    instance: Transport, learner: FakeLearner, engines: list[FakeEngine], cause: str
) -> None:
    try:
        await instance.sync_weights(learner, engines, 1)
    except EngineError:
        return
    except LearnerError as error:
        require(False, f"{cause} must raise EngineError, not {error!r}", error)
    require(False, f"{cause} must raise EngineError")


def _require_weights(engine: FakeEngine, weights: dict[str, torch.Tensor], moment: str) -> None:
    for name, weight in weights.items():
        require(
            engine.weights.get(name) == weight.tolist(),
            f"engine {engine.number} must hold {name} {moment}; it has {engine.weights.get(name)!r:.80}",
        )


def _require_version(engine: FakeEngine, version: int) -> None:
    require(
        engine.sampled_version == version,
        f"engine {engine.number} must sample with version {version}, it samples with {engine.sampled_version}",
    )
