"""Context parallelism: which rank has which tokens and heads, and what a configuration may ask for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import TypeVar

import pytest
import torch
from transformers import Qwen3Config

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError
from agentrl.learner import context_parallel
from agentrl.learner.attention import DividedRows, packed_attention, packed_rows
from agentrl.learner.context_parallel import Context
from agentrl.learner.fsdp.backend import FsdpBackend
from agentrl.models.load import read_rope_types
from tests.algo_config import make_algo
from tests.unit.learner.learners import SIZES, make_model

T = TypeVar("T")
LENGTHS = (37, 5, 11, 9)


class Switch:
    """An all-to-all among threads, in place of that of a process group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = Barrier(size)
        self._sent: dict[int, torch.Tensor] = {}

    def exchange(self, parts: torch.Tensor, group: str) -> torch.Tensor:
        """Return what the other threads sent to the one whose rank ``group`` is."""
        self._sent[int(group)] = parts
        self._barrier.wait(20)
        received = torch.stack([self._sent[rank][int(group)] for rank in range(self.size)])
        self._barrier.wait(20)
        return received

    def run(self, call: Callable[[Context], T]) -> list[T]:
        """Return what a call returns on each rank."""
        with ThreadPoolExecutor(self.size) as threads:
            return [*threads.map(call, [Context(str(rank), self.size, rank) for rank in range(self.size)])]


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_token_is_scored_by_one_rank_which_has_the_position_before_it(size: int) -> None:
    length = 64
    at_N = torch.arange(1, length)
    actual = []
    for rank in range(size):
        context = Context("", size, rank)
        own_N = at_N[context.has(at_N - 1, length)]
        assert set((own_N - 1).tolist()) <= set(range(length)[context.token_slice(length)])
        actual += own_N.tolist()
    assert sorted(actual) == at_N.tolist()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("size", "heads", "key_heads"), [(2, 4, 2), (4, 4, 2), (2, 6, 3), (4, 8, 8)])
def test_attention_over_parts_is_that_over_whole_rows(
    monkeypatch: pytest.MonkeyPatch, size: int, heads: int, key_heads: int, window: int | None
) -> None:
    torch.manual_seed(0)
    length = 64
    positions_L = torch.cat([torch.arange(n) for n in (*LENGTHS, length - sum(LENGTHS))])
    row_L = torch.cat([torch.full((n,), number) for number, n in enumerate(LENGTHS)])
    row_L = torch.cat([row_L, torch.full((length - len(row_L),), -1)]).int()
    rows = packed_rows(positions_L[None], row_L[None], torch.device("cpu"))
    states = [
        torch.randn(1, n, length, d, dtype=torch.float64) for n, d in ((heads, 6), (key_heads, 6), (key_heads, 5))
    ]
    options = {"sliding_window": window, "s_aux": torch.randn(heads, dtype=torch.float64) if window else None}
    expected, _ = packed_attention(torch.nn.Module(), *states, None, packed=rows, **options)

    def attend(context: Context) -> torch.Tensor:
        own = [state[:, :, context.token_slice(length)] for state in states]
        packed = DividedRows(rows, context)
        return packed_attention(torch.nn.Module(), *own, None, packed=packed, **options)[0]

    switch = Switch(size)
    monkeypatch.setattr(context_parallel, "exchange", switch.exchange)
    actual = torch.cat(switch.run(attend), 1)
    torch.testing.assert_close(actual, expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    Qwen3Config(**SIZES | {"num_attention_heads": 12, "num_key_value_heads": 3}).save_pretrained(folder)
    return folder


def check(model: Path, **learner: object) -> None:
    FsdpBackend(LearnerConfig(**learner)).check(make_algo(), [model])


def test_ranks_are_divided_among_shares(model: Path) -> None:
    assert FsdpBackend(LearnerConfig(ranks=8, context_parallel=4)).data_parallel_size == 2
    for size in (1, 2, 4):
        check(model, ranks=8, context_parallel=size)
    check(model, ranks=2, context_parallel=2, fp8=True)
    check(model, ranks=1, fp8=True)


@pytest.mark.parametrize(
    ("learner", "message"),
    [
        ({"ranks": 6, "replicas": 4}, r"learner\.replicas=4 does not divide learner\.ranks=6"),
        ({"ranks": 6, "expert_parallel": 4}, r"learner\.expert_parallel=4 does not divide the 6 ranks of a copy"),
        (
            {"ranks": 8, "replicas": 4, "expert_parallel": 4},
            r"expert_parallel=4 does not divide the 2 ranks of a copy .*learner\.ranks=8, learner\.replicas=4",
        ),
        ({"ranks": 2, "expert_parallel": 2}, r"learner\.expert_parallel=2: the model in \S+ has no experts"),
        ({"ranks": 6, "context_parallel": 4}, r"learner\.context_parallel=4 does not divide learner\.ranks=6"),
        (
            {"ranks": 3, "context_parallel": 3},
            r"learner\.context_parallel=3: micro-batches are multiples of 32 tokens; .* 1, 2, 4, 8, 16 or 32",
        ),
        ({"ranks": 8, "context_parallel": 8}, r"learner\.context_parallel=8 does not divide the 12 attention heads"),
        (
            {"ranks": 4, "context_parallel": 4, "fp8": True},
            r"context_parallel=4 with learner\.fp8.* 16 tokens .* 1 or 2",
        ),
    ],
)
def test_what_ranks_cannot_divide_is_refused(model: Path, learner: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(model, **learner)


def test_rope_that_depends_on_the_longest_row_is_refused(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    Qwen3Config(**SIZES, head_dim=8, rope_parameters=rope | {"original_max_position_embeddings": 64}).save_pretrained(
        tmp_path
    )
    assert read_rope_types(tmp_path) == {"longrope"}
    with pytest.raises(
        ConfigError, match=r"learner\.context_parallel=2: the RoPE .*longrope.*set learner.context_parallel=1"
    ):
        check(tmp_path, ranks=2, context_parallel=2)


def test_experts_that_ranks_cannot_divide_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "qwen3_moe")
    check(folder, ranks=5, expert_parallel=5)
    with pytest.raises(ConfigError, match=r"learner\.expert_parallel=2 does not divide the 5 experts of the model"):
        check(folder, ranks=2, expert_parallel=2)
