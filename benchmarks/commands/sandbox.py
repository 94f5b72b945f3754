"""``agentrl bench sandbox``."""

from __future__ import annotations

import argparse

from rich.console import Console

from benchmarks.commands.output import open_table, split_numbers

HELP = "cold starts and calls/s: backends alone, docker exec, and through server and client"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--backends", default="bubblewrap,docker", help="comma-separated; docker wants a daemon")
    parser.add_argument("--sessions", default="1,2,16,256", help="sessions at the same time, comma-separated")
    parser.add_argument("--calls", type=int, default=2000, help="calls of each measurement, about")
    parser.add_argument("--exec-sessions", default="1,2,16", help="the same for docker exec, which is slow")
    parser.add_argument("--exec-calls", type=int, default=100, help="calls of each measurement of docker exec")
    parser.add_argument("--docker-url", help="the daemon's address, as sandbox.docker_url")
    parser.add_argument("--image", help="the image of docker, as sandbox.image")


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Measure and print."""
    from benchmarks.sandbox import SandboxBench

    docker = {"docker_url": arguments.docker_url, "image": arguments.image}
    bench = SandboxBench(
        backends=arguments.backends.split(","),
        sessions=split_numbers(arguments.sessions, "--sessions"),
        calls=arguments.calls,
        exec_sessions=split_numbers(arguments.exec_sessions, "--exec-sessions"),
        exec_calls=arguments.exec_calls,
        docker={key: value for key, value in docker.items() if value is not None},
    )
    heads = ("what", "n", "cold ms", "open s", "p50 ms", "p99 ms", "calls/s", "wrong")
    with open_table(console, "calling", *heads) as (table, progress):
        for name, times in bench.run(progress):
            latency = (f"{times.cold_ms:.0f}", f"{times.open_s:.1f}", f"{times.p50_ms:.1f}", f"{times.p99_ms:.0f}")
            table.add_row(name, str(times.sessions), *latency, f"{times.calls_per_s:.0f}", str(times.wrong))
    console.print(
        "n: sessions at the same time; cold: one session and its first call; open: until all sessions had answered a call; "
        "p50, p99: a call, the others "
        "calling as well. Targets: bubblewrap alone over 300 calls/s on one core and p50 under 5 ms; through server and "
        "client over 200 calls/s on two cores; wrong replies none"
    )
