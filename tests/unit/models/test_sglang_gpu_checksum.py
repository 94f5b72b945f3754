"""SGLang's checksums of weights on a GPU. The expected values are those of its kernel, run by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from agentrl.models.weight_checksum import GpuChecksum, raw_bytes


def weights(count: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(count, dtype=torch.float32) % 257 / 7).to(dtype)


@pytest.mark.parametrize(
    ("count", "dtype", "expected"),
    [
        (0, torch.float32, "0000000000000000"),
        (1, torch.bfloat16, "3d93a6540b54ef2a"),
        (3, torch.float32, "b4d59416e20f6d5a"),
        (8192, torch.float32, "76d28368808f5042"),
        (8193, torch.float32, "bece55b4533c74e4"),
        (50001, torch.bfloat16, "c1ddc1643235072d"),
    ],
)
def test_what_sglang_computes(count: int, dtype: torch.dtype, expected: str) -> None:
    assert GpuChecksum(raw_bytes(weights(count, dtype))).hexdigest() == expected


@pytest.mark.parametrize("cuts", [[1], [4, 8], [40_001, 40_003, 100_000], [8192 * 4, 8192 * 64 * 4]])
def test_pieces_are_as_good_as_the_whole(cuts: list[int]) -> None:
    data = bytes(raw_bytes(weights(600_000, torch.float32)))
    hasher = GpuChecksum()
    for start, end in zip([0, *cuts], [*cuts, None], strict=True):
        hasher.update(data[start:end])
        hasher.hexdigest()
    assert hasher.hexdigest() == GpuChecksum(data).hexdigest()
