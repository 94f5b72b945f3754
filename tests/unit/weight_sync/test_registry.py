"""Transports by name, what they declare, and the contract of those that run on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.load import load_config
from agentrl.distributed.sglang_loader import LOADERS
from agentrl.testing import ContractError, FakeEngine, check_transport
from agentrl.weight_sync.base import SyncedWeights
from agentrl.weight_sync.bucketwise import TensorSync
from agentrl.weight_sync.disk import DiskSync
from agentrl.weight_sync.registry import TRANSPORTS, for_transport, transport_class, transport_faults

GPU = ["sampler.backend=sglang"]
IPC = ["weights.transport=ipc", "placement.mode=colocate"]
ONE_GPU = ["weights.transport=ipc", "placement.mode=separate", *GPU]
SEND = ["weights.transport=distributed"]


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (["weights.transport=ipc", *GPU, "placement.mode=disaggregate"], "placement.mode=colocate, not disaggregate"),
        ([*ONE_GPU, "learner.ranks=2"], "learner.ranks=2, and an engine has 1 (sampler.sglang.tp_size"),
        ([*ONE_GPU, "sampler.sglang={tp_size: 2}"], "learner.ranks=1, and an engine has 2 (sampler.sglang.tp_size"),
        (
            [*ONE_GPU, "sampler.url=http://10.0.0.1:30000"],
            "ipc with sampler.url=http://10.0.0.1:30000: the GPUs of running",
        ),
        (["weights.transport=ipc"], "weights.transport=ipc is for GPUs"),
        ([*IPC], "weights.transport=ipc is for GPUs"),
        ([*IPC, *GPU, "sampler.sglang={device: cpu}"], "weights.transport=ipc is for GPUs"),
        ([*IPC, *GPU, "learner.device=cpu"], "weights.transport=ipc is for GPUs"),
        (["weights.transport=delta", "placement.mode=colocate"], "release the weights that changes are to"),
        ([*SEND, *GPU, "placement.mode=colocate"], "set weights.transport=ipc"),
        ([*SEND, *GPU, "learner.device=cpu"], "engines on GPUs receive weights from a GPU only"),
        ([*SEND, *GPU, "sampler.sglang={tp_size: 2, pp-size: 2}"], "tensor parallel ranks only"),
        ([*IPC, *GPU, "sampler.sglang={dp_size: 2}"], "tensor parallel ranks only"),
    ],
)
def test_ways_that_lead_nowhere(settings: list[str], why: str) -> None:
    [fault] = transport_faults(load_config(None, settings))
    assert why in fault


@pytest.mark.parametrize(
    "settings",
    [
        [*IPC, *GPU],
        [*ONE_GPU],
        [
            *ONE_GPU,
            "sampler.engines=2",
            "async.max_staleness=1",
            "eval.background=true",
            "sampler.groups.eval.serves=evaluation",
        ],
        [*IPC, *GPU, "sampler.sglang={tensor-parallel-size: 2}", "learner.ranks=2"],
        [*SEND],
        [*SEND, "placement.mode=colocate"],
        [*SEND, *GPU, "placement.mode=disaggregate"],
        ["weights.transport=disk", *GPU, "sampler.sglang={pp_size: 2}", "placement.mode=disaggregate"],
    ],
)
def test_ways_that_are_open(settings: list[str]) -> None:
    assert transport_faults(load_config(None, settings)) == []


@pytest.mark.parametrize("name", sorted({*TRANSPORTS} - {"ipc"}))
def test_transports_of_a_cpu_keep_the_contract(name: str) -> None:
    check_transport(TRANSPORTS[name])


class Forgetful(TensorSync):
    """Leaves out the second bucket."""

    async def _transfer(self, learner, engines, bucket, version, number):  # type: ignore[no-untyped-def]
        if number != 2 or bucket.last:
            await super()._transfer(learner, engines, bucket, version, number)


class Littering(DiskSync):
    """Leaves a file."""

    async def sync_weights(self, learner, engines, version):  # type: ignore[no-untyped-def]
        (self.options.folder / "left").touch()
        return await super().sync_weights(learner, engines, version)


class Reporting(TensorSync):
    """Reports what it has not measured."""

    async def sync_weights(self, learner, engines, version):  # type: ignore[no-untyped-def]
        await super().sync_weights(learner, engines, version)
        return SyncedWeights(version, 1)


class Trusting(TensorSync):
    """Does not check what the engines have."""

    async def sync_weights(self, learner, engines, version):  # type: ignore[no-untyped-def]
        for engine in engines:
            engine.stuck = False
        return await super().sync_weights(learner, engines, version)


@pytest.mark.parametrize(
    ("transport", "why"),
    [
        (Forgetful, "engine 0 must hold"),
        (Littering, "no file may be left"),
        (Reporting, "fingerprints of equal weights"),
        (Trusting, "an engine that keeps its version must raise EngineError"),
        (FakeEngine, "must be a subclass"),
    ],
)
def test_a_violation_is_found(transport: type, why: str) -> None:
    with pytest.raises((ContractError, AssertionError), match=why):
        check_transport(transport)


def test_a_class_in_a_file_is_a_transport(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from agentrl.weight_sync.bucketwise import TensorSync\n\nclass Mine(TensorSync):\n    default_bucket_mib = 3\n"
    )
    name = f"{file}:Mine"
    assert transport_class(name).bucket_bytes(None) == 3 << 20
    assert transport_faults(load_config(None, [f"weights.transport={name}"])) == []


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tensr", "Did you mean 'tensor'"),
        ("agentrl.testing:FakeEngine", "no subclass of agentrl.weight_sync.base.Transport"),
        ("agentrl.weight_sync.bucketwise:BucketwiseSync", "does not implement _transfer"),
    ],
)
def test_what_is_no_transport_is_refused(name: str, why: str) -> None:
    [fault] = transport_faults(load_config(None, [f"weights.transport={name}"]))
    assert why in fault


def test_engines_of_a_run_are_started_for_their_transport() -> None:
    delta = load_config(None, [*GPU, "weights.transport=delta"])
    loaders = {"custom_weight_loader": [*LOADERS]}
    assert for_transport(delta).sampler.sglang == loaders
    assert for_transport(load_config(None, GPU)).sampler.sglang == loaders, "that of weights.transport=tensor"
    own = load_config(None, [*GPU, "sampler.sglang={custom_weight_loader: [mine.load]}"])
    assert for_transport(own).sampler.sglang == {"custom_weight_loader": ["mine.load", *LOADERS]}
    for settings in (["weights.transport=delta"], [*GPU, "weights.transport=disk"]):
        assert for_transport(load_config(None, settings)).sampler.sglang == {}
