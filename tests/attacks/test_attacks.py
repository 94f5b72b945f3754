"""Every attack on both backends, and for every attack a control that shows that it works where its defence is away.

Everything runs in an outer world (outer_sandbox.py), one for each backend, in which `driver` prints what became of it; each test
here looks at one line of that.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from attacks.attack import BACKENDS, LIMITS, Attack, NoControl
from attacks.driver import ATTACKS, Result
from attacks.outer_sandbox import TESTS, NoOuterWorld, Outer, launch, namespaces, open_tree
from dockerd import NoDocker, image_tar

from agentrl.config.sandbox import SandboxLimits
from agentrl.sandbox.cgroup import CgroupTree, Mounts, parse_mounts, sockets_bytes
from agentrl.sandbox.seccomp import bpf_program

pytestmark = pytest.mark.timeout(600)


@dataclass
class Report:
    """What one driver printed."""

    outer: dict[str, bool] = field(default_factory=dict)
    results: dict[tuple[str, bool], Result] = field(default_factory=dict)
    skip: str = ""


def run(backend: str, tree: CgroupTree, controls: frozenset[str]) -> Report:
    report, which = Report(), "controls too" if backend in controls else "attacks only"
    try:
        image = str(image_tar()) if backend == "docker" else ""
        with launch(tree, "attacks.driver", backend, image, which) as process:
            assert process.stdout is not None
            for line in process.stdout:
                record = json.loads(line)
                if "skip" in record and "attack" not in record:
                    report.skip = record["skip"]
                elif "outer" in record:
                    report.outer = record["outer"]
                else:
                    report.results[record["attack"], record["control"]] = Result(**record)
    except (NoOuterWorld, NoDocker) as error:
        report.skip = str(error)
    return report


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[str, Report]]:
    """The drivers' of those backends that a test was chosen of, at once: each is in a world of its own, and mostly waits."""
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    chosen = {item.callspec.params["report"] for item in items if "report" in item.callspec.params}
    control = test_it_succeeds_where_its_defence_is_away.__name__
    controls = frozenset(item.callspec.params["report"] for item in items if item.originalname == control)
    try:
        with open_tree() as tree, ThreadPoolExecutor(len(BACKENDS)) as pool:
            results = dict(zip(chosen, pool.map(partial(run, tree=tree, controls=controls), chosen), strict=True))
    except NoOuterWorld as error:
        pytest.skip(str(error))
    yield results
    assert not _groups(tree.server), "cgroups were left"


@pytest.fixture(scope="module", params=BACKENDS)
def report(request: pytest.FixtureRequest, reports: dict[str, Report]) -> tuple[str, Report]:
    result = reports[request.param]
    if result.skip:
        pytest.skip(result.skip)
    return request.param, result


def _groups(server: str) -> list[Path]:
    """Return the cgroups of outer worlds that a server made; another test run on this machine has its own."""
    mounts: Mounts = parse_mounts(Path("/proc/self/mounts").read_text())
    tops = [*mounts.v1.values(), *([mounts.v2] if mounts.v2 is not None else [])]
    return [folder for top in tops for folder in top.glob(f"agentrl/{server}/attacks-*")]


def named(attack: Attack) -> str:
    return attack.name.replace(" ", "-")


def test_there_are_many_and_each_has_its_name() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 120


def test_the_page_has_every_attack() -> None:
    page = (TESTS.parent / "docs" / "explanation" / "attacks.md").read_text()
    rows = [line.split(" | ")[0].removeprefix("| ") for line in page.splitlines() if line.count(" | ") == 4]
    assert {row for row in rows if not row.startswith("**")} == {"attack", *(attack.name for attack in ATTACKS)}
    assert f"runs {len(ATTACKS)} attacks on both backends" in page
    counts = {machine: len(bpf_program(machine)) // 8 for machine in ("x86_64", "aarch64")}
    assert f"({counts['x86_64']} instructions on x86_64, {counts['aarch64']} on aarch64)" in page


def test_few_attacks_have_no_control() -> None:
    without = [attack for attack in ATTACKS for b in BACKENDS if isinstance(attack.control_of(b), NoControl)]
    assert len({attack.name for attack in without}) <= 7


def test_the_outer_world_holds(report: tuple[str, Report]) -> None:
    _, seen = report
    assert seen.outer
    assert all(seen.outer.values()), seen.outer


def test_the_end_of_one_outer_world_leaves_room_for_the_next() -> None:
    """The drivers share a tree of cgroups: one may end before the other has made its group."""
    try:
        with open_tree() as tree:
            for _ in range(2):
                with launch(tree, "platform") as process:
                    assert process.stdout is not None
                    assert process.stdout.read()
                assert not _groups(tree.server)
    except NoOuterWorld as error:
        pytest.skip(str(error))
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = [Path(folder) for folder, kind in mounts if kind in ("cgroup", "cgroup2")]
    assert not [top for top in tops if (top / "agentrl" / tree.server).exists()]


def test_the_driver_refuses_to_attack_anywhere_else() -> None:
    """Started in the machine's own namespaces it says so and ends; it has not mounted or attacked anything by then."""
    outer = Outer("nowhere", (), namespaces())
    done = subprocess.run(
        [sys.executable, "-m", "attacks.driver", str(outer), "bubblewrap", "", "attacks only"],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)])},
        check=True,
    )
    (line,) = done.stdout.splitlines()
    assert "machine's own namespaces: ['ipc', 'mnt', 'net', 'pid', 'uts']" in json.loads(line)["skip"]


@pytest.mark.parametrize("attack", ATTACKS, ids=named)
def test_it_fails_and_the_next_call_is_answered(report: tuple[str, Report], attack: Attack) -> None:
    _, seen = report
    result = seen.results[attack.name, False]
    assert result.status in attack.status, result
    if attack.hurts_itself and result.next != "42":
        assert result.next.startswith("out_of_memory"), result
        assert result.success == "the next call fails", result
    else:
        assert result.next == "42", result
        assert result.success == "", result


def test_the_memory_of_sockets_is_counted(report: tuple[str, Report]) -> None:
    """No attack got a sandbox beyond its limit; on cgroup v1 what sockets hold has a limit of its own beside it."""
    backend, seen = report
    for attack in ATTACKS:
        limits = SandboxLimits(**{**LIMITS, **attack.limits})
        peaks = seen.results[attack.name, False].peak_mib
        if attack.name.endswith("sockets"):
            print(f"{backend}: {attack.name}: memory_mb={limits.memory_mb}, peaks {peaks} MiB")
        assert peaks, attack.name
        assert peaks[0] <= limits.memory_mb, attack.name
        assert sum(peaks[1:]) <= sockets_bytes(limits) / 2**20 + 1, attack.name


@pytest.mark.parametrize("attack", ATTACKS, ids=named)
@pytest.mark.parametrize("report", ["bubblewrap", pytest.param("docker", marks=pytest.mark.long)], indirect=True)
def test_it_succeeds_where_its_defence_is_away(report: tuple[str, Report], attack: Attack) -> None:
    backend, seen = report
    control = attack.control_of(backend)
    if isinstance(control, NoControl):
        pytest.skip(f"no control: {control.why}")
    result = seen.results[attack.name, True]
    if result.skip:
        pytest.skip(result.skip)
    assert result.success, (control, result)
