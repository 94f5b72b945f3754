"""``agentrl bench learner``: tokens/s, share of the GPU's matrix rate and memory of optimizer steps, against other loops."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.cluster.learner_group import start_learners
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.types import Row
from agentrl.learner.base import LearnerGroup
from agentrl.learner.device import resolve_device
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.learner.registry import BACKENDS, make_backend
from agentrl.models.random_models import Shape, find_model_shape, write_random_model
from agentrl.planner.training_summary import estimate_memory, fit_to_gpu
from benchmarks.learner_loops import LOOPS, OtherLoop, check_loop
from benchmarks.learner_rows import WORKLOADS, RowOptions
from benchmarks.step_profile import StepProfile, profile_step

_MATRIX = {"cuda": 8192, "cpu": 256}
"""Rows of the square matrices whose product's rate is the measure, by device."""
_OTHER_TOKENS = 16384
"""Tokens of a micro-batch of other loops, unless ``batch.tokens_per_micro`` is set."""
_TOLD = ("loss", "entropy", "grad_norm")
"""Metrics of each step's line: layouts of ranks should agree in them."""


@dataclass(frozen=True, slots=True)
class LearnerBench:
    """Options of the benchmark; see the command."""

    size: str
    rows: int
    median_tokens: int
    longest: int
    steps: int
    loops: Sequence[str]
    """Other loops to measure; see `LOOPS`. Names of learner backends are agentrl's learner with that backend."""
    workload: str = "lognormal"
    """Which rows; see `WORKLOADS`."""
    seed: int = 0
    kernels: int = 0
    """Kernels of each loop's profile, which takes one more step; 0 for none."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Optimizer steps of one loop."""

    name: str
    first_s: float
    """The first step, which compiles."""
    step_s: float
    """Median of the steps after the second."""
    tokens_per_s: float
    utilization: float
    """Floating-point operations of the model, none that were computed again, over those of a large product in the same time."""
    peak_gib: float | None
    """Memory of a GPU at most."""
    estimated_gib: float | None = None
    """What a dry run says of agentrl's learner."""
    profile: StepProfile | None = None


def measure_learner(config: Config, bench: LearnerBench, tell: Callable[[str], None]) -> Iterator[StepTimes]:
    """Measure agentrl's learner as configured, then the other loops, all on the same random model and rows.

    Raises:
        ConfigError: an unknown size or loop, or the learner cannot start.
    """
    shape = find_model_shape(bench.size)
    if bench.workload not in WORKLOADS:
        raise ConfigError(f"--workload={bench.workload}: there are {', '.join(WORKLOADS)}")
    for name in bench.loops:
        if name not in BACKENDS:
            check_loop(name)
    device = resolve_device(config.learner)
    if bench.kernels and (device != "cuda" or config.learner.ranks > 1):
        raise ConfigError(f"--kernels={bench.kernels} needs learner.ranks=1 and a GPU; leave it out")
    options = RowOptions(bench.rows, bench.median_tokens, bench.longest, shape.vocab_size, bench.seed)
    rows = WORKLOADS[bench.workload](options)
    with tempfile.TemporaryDirectory() as folder:
        active = f", {shape.active_parameters / 1e9:.2f}B of a token" if shape.num_experts else ""
        tell(f"writing a random model of {shape.parameters / 1e9:.2f}B parameters{active}")
        model = Path(folder) / "model"
        write_random_model(model, shape, weights=True, device=device)
        peak_rate = config.learner.ranks * matrix_rate(torch.device(device))
        work = training_flops(shape, rows)
        _free()
        tell(f"a product of large bfloat16 matrices: {peak_rate / 1e12:.0f} TFLOP/s")
        best_s = work / peak_rate
        yield _measure_agentrl("agentrl", config, bench, rows, model, best_s, tell)
        for name in bench.loops:
            _free()
            if name in BACKENDS:
                learner = config.learner.model_copy(update={"backend": name})
                other_config = config.model_copy(update={"learner": learner})
                yield _measure_agentrl(f"agentrl {name}", other_config, bench, rows, model, best_s, tell)
                continue
            tokens = _OTHER_TOKENS if config.batch.tokens_per_micro == "auto" else config.batch.tokens_per_micro
            loop = OtherLoop(LOOPS[name], model, rows, tokens, torch.device(device))
            yield _measure_steps(name, loop.step, bench, rows, best_s, tell)
            del loop


def _measure_agentrl(
    name: str,
    config: Config,
    bench: LearnerBench,
    rows: Sequence[Row],
    model: Path,
    best_s: float,
    tell: Callable[[str], None],
) -> StepTimes:
    """Measure agentrl's learner as configured."""
    make_backend(config.learner).check(config.algo, [model])
    longest = max(len(row.token_ids) for row in rows)
    config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_tokens": longest})})
    config, lines = fit_to_gpu(config, model)
    for line in lines:
        tell(line)
    with _learner(config, model, model.parent) as learner:
        batch = packed_batch(config, rows, share_prefixes=config.batch.share_prefixes and learner.shares_prefixes)
        memory, _ = estimate_memory(config, model, accumulates=len(batch.micro[0]) > 1)
        times = _measure_steps(name, lambda: learner.train_step(batch), bench, rows, best_s, tell)
    return replace(times, estimated_gib=memory.total / 2**30)


def packed_batch(config: Config, rows: Sequence[Row], *, share_prefixes: bool) -> GlobalBatch:
    """Return the rows as a batch, half with a positive advantage."""
    advantages = {
        row.key: np.full(len(row.token_ids), 1.0 - 2.0 * (number % 2), np.float32) for number, row in enumerate(rows)
    }
    options = PackOptions(
        tokens_per_micro=config.batch.micro_tokens,
        data_parallel_size=make_backend(config.learner).data_parallel_size,
        share_prefixes=share_prefixes,
    )
    return pack(rows, options, RowSignals(advantages))


def training_flops(shape: Shape, rows: Sequence[Row]) -> float:
    """Return the floating-point operations of a step: 6 a parameter and token, the head's only at trained tokens, those of a
    token's experts only, and causal attention. Tokens that rows begin with count in every row.
    """
    tokens = sum(len(row.token_ids) for row in rows)
    trained = sum(int(row.mask.sum()) for row in rows)
    head = shape.vocab_size * shape.hidden_size
    body = shape.active_parameters - head * (1 if shape.tie_word_embeddings else 2)
    pairs = sum(len(row.token_ids) ** 2 / 2 for row in rows)
    attention = 12 * shape.num_hidden_layers * shape.num_attention_heads * shape.head_dim * pairs
    return 6.0 * (body * tokens + head * trained) + attention


def matrix_rate(device: torch.device) -> float:
    """Return the floating-point operations per second of a product of large square bfloat16 matrices."""
    size = _MATRIX[device.type]
    first, second = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(20):
        _wait(device)
        start = time.perf_counter()
        first @ second
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / median(seconds[5:])


@contextmanager
def _learner(config: Config, model: Path, folder: Path) -> Iterator[LearnerGroup]:
    """Open the learner: in this process for one rank, else of Ray actors."""
    if config.learner.ranks == 1:
        learner: LearnerGroup = LocalLearnerGroup(model, config.learner, config.algo, seed=0)
    else:
        learner = start_learners(model, config.learner, config.algo, seed=0, run_dir=folder)
    try:
        yield learner
    finally:
        learner.close()


def _measure_steps(
    name: str,
    step: Callable[[], dict[str, float]],
    bench: LearnerBench,
    rows: Sequence[Row],
    best_s: float,
    tell: Callable[[str], None],
) -> StepTimes:
    seconds, metrics = [], dict[str, float]()
    for number in range(bench.steps):
        start = time.perf_counter()
        metrics = step()
        seconds.append(time.perf_counter() - start)
        values = "".join(f", {key} {metrics[f'train/{key}']:.6g}" for key in _TOLD if f"train/{key}" in metrics)
        tell(f"{name}: step {number + 1} of {bench.steps}, {seconds[-1]:.2f} s{values}")
    step_s = median(seconds[2:] or seconds[-1:])
    tokens = sum(len(row.token_ids) for row in rows)
    peak = metrics.get("train/peak_gpu_gib")
    memory = "" if peak is None else f", {peak:.1f} GiB of a GPU"
    tell(f"{name}: {tokens / step_s:,.0f} tokens/s, utilization {best_s / step_s:.3f}{memory}")
    profile = profile_step(step, top=bench.kernels) if bench.kernels else None
    return StepTimes(name, seconds[0], step_s, tokens / step_s, best_s / step_s, peak, profile=profile)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free() -> None:
    """Release the memory of the loop before."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
