"""Handles of weights on a GPU, without one: what is in the pickle, and that torch's rebuilding gets what it wants."""

import base64
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions
from torch.storage import TypedStorage

from agentrl.core.errors import LearnerError
from agentrl.distributed.base import tensor_spec
from agentrl.distributed.flat_bucket import serialize, views
from agentrl.learner.export import SharedMemory, SharedTensor, plan_buckets

WEIGHTS = {
    "a": torch.arange(5, dtype=torch.float32),
    "b": torch.arange(12).reshape(3, 4).bfloat16(),
    "c": torch.tensor(7.0),
}
SHARED = ("0a1b", b"memory", 160, 512, b"counter", 3, b"event", True)


class OpenedHere(pickle.Unpickler):
    """Opens the memory that it is given in place of a GPU's, and notes what the pickle names."""

    def __init__(self, data: str, flat: torch.Tensor) -> None:
        super().__init__(io.BytesIO(base64.b64decode(data)))
        self.flat = flat
        self.named: set[tuple[str, str]] = set()
        self.calls: list[dict[str, Any]] = []

    def find_class(self, module: str, name: str) -> Any:
        self.named.add((module, name))
        return self.rebuild if name == "rebuild_cuda_tensor" else super().find_class(module, name)

    def rebuild(self, *args: Any) -> torch.Tensor:
        arguments = inspect.signature(reductions.rebuild_cuda_tensor).bind(*args).arguments
        self.calls.append(arguments)
        assert arguments["storage_cls"] is TypedStorage
        storage = TypedStorage(wrap_storage=self.flat.untyped_storage(), dtype=arguments["dtype"], _internal=True)
        where = (arguments["tensor_offset"], arguments["tensor_size"], arguments["tensor_stride"])
        return torch._utils._rebuild_tensor(storage, *where)


def opened_bucket() -> tuple[OpenedHere, Any]:
    [plan] = plan_buckets([tensor_spec(*item) for item in WEIGHTS.items()], 1 << 20)
    flat = torch.zeros(plan.size + 100, dtype=torch.uint8)
    for name, view in views(plan.specs, flat):
        view.copy_(WEIGHTS[name])
    opened = OpenedHere(serialize(SharedTensor(flat[: plan.size], SHARED), plan.specs), flat)
    return opened, opened.load()


def test_another_process_opens_one_memory_for_all_weights() -> None:
    opened, bucket = opened_bucket()
    actual = {
        metadata.name: bucket["flattened_tensor"][metadata.start_idx : metadata.end_idx]
        .view(metadata.dtype)
        .reshape(metadata.shape)
        for metadata in bucket["metadata"]
    }
    assert actual.keys() == WEIGHTS.keys()
    assert all(
        torch.equal(actual[name], tensor) and actual[name].dtype == tensor.dtype for name, tensor in WEIGHTS.items()
    )
    assert [metadata.numel for metadata in bucket["metadata"]] == [
        metadata.end_idx - metadata.start_idx for metadata in bucket["metadata"]
    ]
    [calls] = opened.calls
    assert (calls["dtype"], calls["tensor_size"]) == (torch.uint8, (20 + 24 + 4,))
    assert (calls["storage_device"], calls["storage_handle"], calls["storage_size_bytes"]) == ("0a1b", b"memory", 160)
    assert (calls["storage_offset_bytes"], calls["requires_grad"]) == (512, False)
    assert (calls["ref_counter_handle"], calls["ref_counter_offset"]) == (b"counter", 3)
    assert (calls["event_handle"], calls["event_sync_required"]) == (b"event", True)


def test_the_pickle_names_only_what_sglang_lets_in() -> None:
    """The newest SGLang has a list of exactly what a pickle may name; these are on it."""
    opened, _ = opened_bucket()
    assert opened.named == {
        ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"),
        ("torch", "Tensor"),
        ("torch.storage", "TypedStorage"),
        ("torch", "uint8"),
        ("torch", "float32"),
        ("torch", "bfloat16"),
        ("types", "SimpleNamespace"),
    }


def test_weights_on_a_cpu_cannot_be_shared() -> None:
    with pytest.raises(LearnerError, match="not on a GPU"):
        SharedMemory(16, torch.device("cpu")).handle(16, [])


def test_a_bucket_that_does_not_fit_names_the_key() -> None:
    with pytest.raises(
        LearnerError, match=r"bucket of weights of 1,099,511,627,776 MiB; a smaller weights\.bucket_mib"
    ):
        SharedMemory.reserve(1 << 60, torch.device("cpu"))
