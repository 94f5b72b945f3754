"""Contents of tensors on the CPU, in blocks of memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.learner import offload
from agentrl.learner.offload import CpuOffload

DTYPES = (torch.uint8, torch.bfloat16, torch.float32, torch.int64)


@pytest.fixture(scope="module", autouse=True)
def small_blocks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_BLOCK_BYTES", 4096)
        yield


@given(st.lists(st.tuples(st.integers(0, 1500), st.sampled_from(DTYPES)), min_size=1, max_size=12), st.integers(1, 5))
def test_contents_come_back_whatever_block_they_are_in(sizes, offset):
    tensors = [torch.randint(100, (offset + size,)).to(dtype)[offset:] for size, dtype in sizes]
    expected = [tensor.clone() for tensor in tensors]
    offloaded = CpuOffload()
    offloaded.copy(tensors[::2])
    offloaded.offload(tensors)
    assert {tensor.untyped_storage().nbytes() for tensor in tensors} == {0}
    copies = [offloaded.cpu_copy(tensor) for tensor in tensors]
    assert all(torch.equal(copy, content) for copy, content in zip(copies, expected, strict=True))
    offloaded.restore()
    assert all(torch.equal(tensor, content) for tensor, content in zip(tensors, expected, strict=True))


def test_many_small_tensors_share_blocks_and_a_large_one_has_one_alone():
    tensors = [torch.zeros(size, dtype=torch.uint8) for size in (500, 512, 9000, 3000, 100)]
    offloaded = CpuOffload()
    offloaded.copy(tensors)
    blocks = [offloaded.cpu_copy(tensor).untyped_storage() for tensor in tensors]
    assert [block.nbytes() for block in blocks] == [4096, 4096, 9000, 3584, 3584]
    assert blocks[0].data_ptr() == blocks[1].data_ptr()
    assert blocks[3].data_ptr() == blocks[4].data_ptr()


def test_a_tensor_that_has_grown_has_new_memory():
    tensor = torch.arange(3)
    offloaded = CpuOffload()
    offloaded.copy([tensor])
    tensor.resize_(5)
    tensor[:] = torch.arange(5)
    offloaded.copy([tensor])
    assert offloaded.cpu_copy(tensor).tolist() == [0, 1, 2, 3, 4]
