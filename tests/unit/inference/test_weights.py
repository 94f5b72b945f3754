import base64
import os
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl.distributed.flat_bucket import serialize_tensors
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.weights import read_bucket


def encoded(value: Any) -> list[str]:
    return [base64.b64encode(pickle.dumps(value)).decode()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_the_client_sends_comes_back(dtype: torch.dtype) -> None:
    base = torch.arange(24.0, dtype=dtype).reshape(4, 6)
    sent = [("a", base), ("view", base.t()[1:3]), ("parameter", torch.nn.Parameter(base.float()))]
    got = dict(read_bucket([serialize_tensors(sent)]))
    for name, tensor in sent:
        torch.testing.assert_close(got[name], tensor.detach(), rtol=0, atol=0)


def test_a_view_does_not_carry_its_whole_storage() -> None:
    assert len(serialize_tensors([("v", torch.zeros(1_000_000)[:10])])) < 10_000


class Shell:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


@pytest.mark.parametrize("evil", [Shell(), {"flattened_tensor": Shell(), "metadata": []}, os.system, torch.load])
def test_pickles_that_would_run_code_are_refused(evil: Any) -> None:
    with pytest.raises(BadRequestError, match="tensors only"):
        read_bucket(encoded(evil))


def test_code_inside_a_tensors_storage_is_refused() -> None:
    class Storage:
        def __reduce__(self) -> Any:
            return torch.storage._load_from_bytes, (pickle.dumps(Shell()),)

    with pytest.raises(BadRequestError, match="cannot be read"):
        read_bucket(encoded({"flattened_tensor": Storage(), "metadata": []}))


@pytest.mark.parametrize(
    "broken",
    [
        [],
        ["%%%"],
        encoded({"a": 1}),
        encoded([("a", torch.ones(1))]),
        encoded({"flattened_tensor": 1, "metadata": [SimpleNamespace(name="a", start_idx=0, end_idx=1)]}),
    ],
)
def test_anything_but_a_bucket_is_refused(broken: list[str]) -> None:
    with pytest.raises(BadRequestError):
        read_bucket(broken)
