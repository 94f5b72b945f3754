"""``agentrl bench``."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.console import Console
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from agentrl.cli.options import add_config_arguments, add_plain_config_arguments, resolve_config, resolve_plain_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.obs.console import make_console
from benchmarks import async_arguments

if TYPE_CHECKING:
    from benchmarks.efficiency import EfficiencyBench
    from benchmarks.step_profile import StepProfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    rollout = actions.add_parser(
        "rollout", help="episodes, tokens and CPU a turn: real engine, and replayed in the process"
    )
    rollout.add_argument("--episodes", type=int, default=256, help="episodes to run")
    add_config_arguments(rollout)
    efficiency = actions.add_parser(
        "efficiency",
        help="tokens/s of both loops over those of a bare client that requests the same of the same engines",
    )
    _add_efficiency_arguments(efficiency)
    weights = actions.add_parser(
        "weights", help="seconds and GB/s of new weights into an engine, by transport and bucket size"
    )
    weights.add_argument("--sizes", default="0.6b,8b", help="of the random models: tiny, 0.6b, 4b, 8b; comma-separated")
    weights.add_argument(
        "--transports", default="", help="ipc, distributed, disk, tensor, delta; what can be here unless set"
    )
    weights.add_argument(
        "--buckets", default="", help="sizes of a bucket, MiB, comma-separated; by default that of a run"
    )
    weights.add_argument("--repeats", type=int, default=3, help="counted pushes of each; disk always has one")
    weights.add_argument("--folder", type=Path, help="where disk writes; the temporary folder unless it is set")
    add_plain_config_arguments(weights)
    learner = actions.add_parser(
        "learner", help="tokens/s and memory of optimizer steps, against other loops on the same model and rows"
    )
    _add_learner_arguments(learner)
    asynchronous = actions.add_parser(
        "async", help="asynchronous against synchronous training in virtual time, each with its best split of the GPUs"
    )
    async_arguments.add_arguments(asynchronous)
    masks = actions.add_parser("masks", help="tokens/s from turns to checked batches, against retokenizing every turn")
    add_config_arguments(masks)
    view = actions.add_parser("view", help="seconds to make a page of a large run, and to open it in a browser")
    view.add_argument("--rollouts", type=int, default=2000, help="rollouts of the synthetic run")
    view.add_argument("--tokens", type=int, default=2000, help="tokens of each")
    sandbox = actions.add_parser(
        "sandbox", help="cold starts and calls/s: backends alone, docker exec, and through server and client"
    )
    sandbox.add_argument("--backends", default="bubblewrap,docker", help="comma-separated; docker wants a daemon")
    sandbox.add_argument("--sessions", default="1,2,16,256", help="sessions at the same time, comma-separated")
    sandbox.add_argument("--calls", type=int, default=2000, help="calls of each measurement, about")
    sandbox.add_argument("--exec-sessions", default="1,2,16", help="the same for docker exec, which is slow")
    sandbox.add_argument("--exec-calls", type=int, default=100, help="calls of each measurement of docker exec")
    sandbox.add_argument("--docker-url", help="the daemon's address, as sandbox.docker_url")
    sandbox.add_argument("--image", help="the image of docker, as sandbox.image")


def _add_efficiency_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", default="0.6b", help="of the random model: tiny, 0.6b, 4b or 8b")
    parser.add_argument("--episodes", type=int, default=256, help="episodes of a pass")
    parser.add_argument("--concurrency", type=int, help="episodes at the same time; all, unless it is set")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--new-tokens", type=int, default=256, help="sampled tokens of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of the first prompt, about")
    parser.add_argument("--observation-tokens", type=int, default=128, help="tokens of an observation, about")
    parser.add_argument("--repeats", type=int, default=2, help="passes of each")
    parser.add_argument(
        "--scripted",
        metavar="NUMBERS",
        help="without a model: cost of the runner at these numbers of concurrent episodes, comma-separated",
    )
    add_plain_config_arguments(parser)


def _add_learner_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--size", default="tiny", help="of the random model: tiny, tiny-moe, 0.6b, 4b, 8b or 30b-a3b-12"
    )
    parser.add_argument("--rows", type=int, default=48, help="rows of a step")
    parser.add_argument(
        "--workload", default="lognormal", help="lognormal, groups (with a common prompt) or forks (of episodes)"
    )
    parser.add_argument("--median-tokens", type=int, default=1636, help="of a row")
    parser.add_argument("--longest", type=int, default=4096, help="maximum tokens of a row")
    parser.add_argument("--steps", type=int, default=6, help="steps of each loop; the first two do not count")
    parser.add_argument(
        "--loops", default="", help="other loops: fsdp, megatron, hf, liger, compiled, trl; comma-separated"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="kernels to print of a profiled step, from the longest on"
    )
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    if arguments.action == "view":
        _view(arguments.rollouts, arguments.tokens, make_console())
        return
    if arguments.action == "sandbox":
        _sandbox(arguments, make_console())
        return
    if arguments.action == "async":
        async_arguments.run(arguments, make_console())
        return
    if arguments.action == "efficiency" and arguments.scripted is not None:
        _concurrency(arguments, resolve_plain_config(arguments), make_console())
        return
    if arguments.action in ("efficiency", "weights"):
        measure = _efficiency if arguments.action == "efficiency" else _weights
        asyncio.run(measure(arguments, resolve_plain_config(arguments), make_console()))
        return
    if arguments.action == "learner":
        _learner(arguments, resolve_plain_config(arguments), make_console())
        return
    config = resolve_config(arguments)
    if arguments.action == "rollout":
        _rollout(arguments, config, make_console())
    else:
        _masks(config, make_console())


def _rollout(arguments: argparse.Namespace, config: Config, console: Console) -> None:
    from benchmarks.rollout import measure_rollout

    with console.status("running episodes"):
        times = asyncio.run(measure_rollout(config, arguments.episodes))
    table = Table("sampler", "episodes/s", "sampled tokens/s", "turns", "runner CPU ms/turn", "of that event loop")
    for name, one in times.items():
        table.add_row(
            name,
            f"{one.episodes_per_s:.1f}",
            f"{one.tokens_per_s:,.0f}",
            str(one.turns),
            f"{one.cpu_ms_per_turn:.3f}",
            f"{one.loop_ms_per_turn:.3f}",
        )
    console.print(table)
    runner = times["replayed"].cpu_ms_per_turn
    client = times["engine"].cpu_ms_per_turn - runner
    console.print(f"runner with tools {runner:.3f} ms a turn (target under 1); HTTP client {client:.3f} ms in addition")


def _efficiency_bench(arguments: argparse.Namespace) -> EfficiencyBench:
    from benchmarks.efficiency import EfficiencyBench

    return EfficiencyBench(
        size=arguments.size,
        episodes=arguments.episodes,
        concurrency=arguments.concurrency or arguments.episodes,
        turns=arguments.turns,
        new_tokens=arguments.new_tokens,
        prompt_tokens=arguments.prompt_tokens,
        observation_tokens=arguments.observation_tokens,
        repeats=arguments.repeats,
    )


def _concurrency(arguments: argparse.Namespace, config: Config, console: Console) -> None:
    from benchmarks.concurrency import measure_concurrency

    bench, numbers = _efficiency_bench(arguments), _numbers(arguments.scripted, "--scripted")
    heads = ("episodes", "sampler", "turns", "CPU ms/turn", "of that event loop", "KiB/episode", "stall ms", "threads")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
    try:
        with console.status("starting") as status:
            for one in measure_concurrency(config, bench, numbers, _teller(console, status)):
                sampler = "HTTP" if one.over_http else "in the process"
                cpu = (f"{one.cpu_ms_per_turn:.3f}", f"{one.loop_ms_per_turn:.3f}")
                rest = (f"{one.kib_per_episode:.0f}", f"{one.stall_ms:.0f}", str(one.threads))
                table.add_row(f"{one.concurrency:,}", sampler, f"{one.turns:,}", *cpu, *rest)
    finally:
        console.print(table)
    console.print(
        f"episodes: at the same time, {bench.turns} turns of {bench.new_tokens} tokens each; HTTP less in the process is the "
        "HTTP client. KiB: growth of the process's memory, finished rollouts included. Stall: longest delay of a callback of "
        "the event loop"
    )


async def _efficiency(arguments: argparse.Namespace, config: Config, console: Console) -> None:
    from benchmarks.efficiency import Pass, efficiency, measure_efficiency

    bench = _efficiency_bench(arguments)
    table = Table("pass", "who", "seconds", "sampled tokens/s", "CPU ms/turn")
    passes: list[Pass] = []
    try:
        with console.status("making a model") as status:
            async for one in measure_efficiency(config, bench, _teller(console, status)):
                passes.append(one)
                seconds, rate, cpu = f"{one.seconds:.2f}", f"{one.tokens_per_s:,.0f}", f"{one.cpu_ms_per_turn:.2f}"
                console.print(f"{one.who}: {seconds} s, {rate} sampled tokens/s")
                table.add_row(str(len(passes)), one.who, seconds, rate, cpu)
    finally:
        console.print(table)
    console.print(
        f"efficiency {efficiency(passes, 'synchronous'):.3f} synchronous, {efficiency(passes, 'asynchronous'):.3f} asynchronous: "
        "the loop's sampled tokens/s over the bare client's, medians (target 0.98). "
        f"{bench.episodes} episodes of {bench.turns} turns of {bench.new_tokens} tokens, {bench.concurrency} at the same "
        f"time, random {bench.size} model, {config.sampler.backend}; the cache flushed before each pass"
    )


async def _weights(arguments: argparse.Namespace, config: Config, console: Console) -> None:
    from benchmarks.weights import WeightsBench, measure_weights

    bench = WeightsBench(
        sizes=arguments.sizes.split(","),
        transports=[part for part in arguments.transports.split(",") if part],
        bucket_mib=_numbers(arguments.buckets, "--buckets") if arguments.buckets else [None],
        repeats=arguments.repeats,
        folder=arguments.folder,
    )
    heads = ("model", "transport", "MiB", "GB", "ms", "gather", "pack", "request", "load", "GB/s", "plain", "share")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
    try:
        with console.status("making models") as status:
            async for one in measure_weights(config, bench, _teller(console, status)):
                seconds = (one.seconds, one.gather_s, one.pack_s, one.request_s, one.load_s)
                times = (f"{1000 * value:.1f}" for value in seconds)
                plain = ("", "") if one.plain is None else (f"{one.plain / 1e9:.1f}", f"{one.rate / one.plain:.2f}")
                sizes = (one.size, one.transport, str(one.bucket_mib), f"{one.bytes / 1e9:.2f}")
                table.add_row(*sizes, *times, f"{one.rate / 1e9:.2f}", *plain)
    finally:
        console.print(table)
    console.print(
        "MiB: limit of a bucket. ms: the whole update of one engine, the check of its version included. Parts: gather, until "
        "the buckets were complete, the cast from float32 included; pack, handles (ipc), copies to the CPU (tensor) or files "
        "(disk); request, as many requests without weights as there are buckets; load, transfer and load in the engine. "
        "GB/s: of pack, request and load. plain: GB/s of the same bytes copied on the same device (ipc) or broadcast to "
        "another process (distributed), in pieces of a bucket's size; share: GB/s over that. Medians; the learner is one rank "
        "in this process. Targets: ipc 200 GB/s at 8b and 60 at 0.6b; distributed 0.7 of plain at 8b and 0.4 at 0.6b"
    )


def _learner(arguments: argparse.Namespace, config: Config, console: Console) -> None:
    from benchmarks.learner import LearnerBench, measure_learner

    bench = LearnerBench(
        size=arguments.size,
        rows=arguments.rows,
        median_tokens=arguments.median_tokens,
        longest=arguments.longest,
        steps=arguments.steps,
        workload=arguments.workload,
        loops=[part for part in arguments.loops.split(",") if part],
        kernels=arguments.kernels,
    )
    heads = ("loop", "first s", "s a step", "tokens/s", "utilization", "GiB", "estimated")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
    try:
        with console.status("starting") as status:
            for one in measure_learner(config, bench, _teller(console, status)):
                memory = ("" if each is None else f"{each:.1f}" for each in (one.peak_gib, one.estimated_gib))
                rates = (f"{one.tokens_per_s:,.0f}", f"{one.utilization:.3f}")
                table.add_row(one.name, f"{one.first_s:.1f}", f"{one.step_s:.3f}", *rates, *memory)
                if one.profile is not None:
                    console.print(_profile_table(one.name, one.profile))
    finally:
        console.print(table)
    console.print(
        "utilization: floating-point operations of the model (6 a parameter and token, the head's at trained tokens only, "
        "causal attention; none that were computed again) over those of a product of large bfloat16 matrices in the same "
        "time. The optimizer's step counts. Medians of the steps after the second; GiB: most memory of a GPU; estimated: "
        "what agentrl train --dry-run says of it"
    )


def _profile_table(name: str, profile: StepProfile) -> Table:
    """Return the kernels of a profiled step. The profiler slows the host down: idle shares are upper bounds."""
    title = (
        f"{name}: {profile.wall_s:.3f} s, GPU idle {1 - profile.busy_s / profile.wall_s:.1%}, {profile.kernels:,} kernels, "
        f"{profile.waits} waits of the host for {profile.waited_s:.3f} s"
    )
    table = Table("kernel", "count", "ms", "share of the step", title=title, title_justify="left")
    for kernel, count, seconds in profile.by_name:
        table.add_row(kernel, f"{count:,}", f"{1e3 * seconds:.1f}", f"{seconds / profile.wall_s:.1%}")
    return table


def _masks(config: Config, console: Console) -> None:
    from benchmarks.rollout import measure_long, measure_masks

    table = Table("episodes", "tokens", "rows tokens/s", "packing tokens/s", "check tokens/s", "all tokens/s")
    for name, one in measure_masks(config):
        rates = (one.build_tokens_per_s, one.pack_tokens_per_s, one.check_tokens_per_s, one.tokens_per_s)
        table.add_row(name, f"{one.tokens:,}", *(f"{rate:,.0f}" for rate in rates))
    console.print(table)
    table = Table("turns", "tokens", "exact s", "tokens/s", "µs a token", "retokenised s", "times cheaper")
    with console.status("holding long conversations"):
        for long in measure_long(config):
            table.add_row(
                str(long.turns),
                f"{long.tokens:,}",
                f"{long.seconds:.3f}",
                f"{long.tokens_per_s:,.0f}",
                f"{1e6 / long.tokens_per_s:.2f}",
                f"{long.retokenise_s:.2f}",
                f"{long.ratio:.1f}",
            )
    console.print(table)
    console.print(
        "exact: render, bridge, parse, graph, rows, pack, check; retokenised: the chat template on the whole conversation "
        "every turn. Tokenising the observations counts on both sides (target 20 times cheaper, µs a token level)"
    )


def _view(rollouts: int, tokens: int, console: Console) -> None:
    from benchmarks.viewer import measure_view

    with console.status("building and opening a page"):
        times = measure_view(rollouts, tokens)
    table = Table("rollouts", "tokens", "page MiB", "build s", "open ms", "open s, from outside")
    table.add_row(
        f"{rollouts:,}",
        f"{rollouts * tokens:,}",
        f"{times.size / 2**20:.1f}",
        f"{times.build_s:.1f}",
        f"{times.ready_ms:.0f}",
        f"{times.wall_s:.2f}",
    )
    console.print(table)
    console.print("open: until the first rollout with its tokens is on screen (target under 3 s)")


def _sandbox(arguments: argparse.Namespace, console: Console) -> None:
    from benchmarks.sandbox import SandboxBench

    bench = SandboxBench(
        backends=arguments.backends.split(","),
        sessions=_numbers(arguments.sessions, "--sessions"),
        calls=arguments.calls,
        exec_sessions=_numbers(arguments.exec_sessions, "--exec-sessions"),
        exec_calls=arguments.exec_calls,
        docker={
            key: value
            for key, value in (("docker_url", arguments.docker_url), ("image", arguments.image))
            if value is not None
        },
    )
    heads = ("what", "n", "cold ms", "open s", "p50 ms", "p99 ms", "calls/s", "wrong")
    table = Table(*(Column(head, no_wrap=True) for head in heads), box=SIMPLE, padding=(0, 0, 0, 1))
    with console.status("calling") as status:
        for name, one in bench.run(_teller(console, status)):
            row = (f"{one.cold_ms:.0f}", f"{one.open_s:.1f}", f"{one.p50_ms:.1f}", f"{one.p99_ms:.0f}")
            table.add_row(name, str(one.sessions), *row, f"{one.calls_per_s:.0f}", str(one.wrong))
    console.print(table)
    console.print(
        "n: sessions at the same time; cold: one session and its first call; open: until all sessions had answered a call; "
        "p50, p99: a call, the others "
        "calling as well. Targets: bubblewrap alone over 300 calls/s on one core and p50 under 5 ms; through server and "
        "client over 200 calls/s on two cores; wrong replies none"
    )


def _teller(console: Console, status: Status) -> Callable[[str], None]:
    """Return a progress callback: a line per call in a log, a changing line in a terminal."""
    return (lambda text: status.update(Text(text))) if console.is_terminal else console.print


def _numbers(text: str, option: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",") if part]
    except ValueError:
        raise ConfigError(f"{option}={text}: numbers, separated by commas") from None
