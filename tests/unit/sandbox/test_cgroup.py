"""Control groups: parsing of the kernel's files, both versions on a fake kernel, and removal of groups of servers that died."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import wait_until

from agentrl.config.sandbox import SandboxLimits
from agentrl.sandbox.base import ALL_DEFENCES, Defence
from agentrl.sandbox.cgroup import (
    RUNNER_PROCESSES,
    CgroupError,
    CgroupTree,
    find_tree,
    parse_count,
    parse_mounts,
    parse_own,
    server_gone,
    server_name,
    settings_v1,
    settings_v2,
)

V1_FILES = ("cgroup.procs", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "pids.max", "cpu.cfs_quota_us")
V2_FILES = ("cgroup.procs", "cgroup.kill", "memory.max", "memory.swap.max", "pids.max", "cpu.max")
LIMITS = SandboxLimits(memory_mb=100, processes=10, cpus=0.5)


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where new folders are cgroups: with files in them, to be removed by rmdir once no process is in them."""
    mkdir = Path.mkdir

    def make(self: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        if self.exists() and exist_ok:
            return
        if parents and not self.parent.exists():
            make(self.parent, mode, parents=True)
        mkdir(self, mode)
        if self.is_relative_to(tmp_path / "v2"):
            enabled = (
                (self.parent / "cgroup.subtree_control").read_text() if self.name != "v2" else "memory pids cpu io"
            )
            (self / "cgroup.controllers").write_text(enabled.replace("+", ""))
            (self / "cgroup.subtree_control").write_text("")
            for name in V2_FILES:
                if name.split(".")[0] in ("cgroup", *enabled.replace("+", "").split()):
                    (self / name).write_text("")
        elif self != tmp_path / "v1":
            for name in V1_FILES:
                (self / name).write_text("")

    def remove(self: Path) -> None:
        if any(path.is_dir() for path in self.iterdir()) or (self / "cgroup.procs").read_text():
            raise OSError(errno.EBUSY, "Device or resource busy")
        shutil.rmtree(self)

    monkeypatch.setattr(Path, "mkdir", make)
    monkeypatch.setattr(Path, "rmdir", remove)
    for name in ("v2", "v1", "v1/memory", "v1/pids", "v1/cpu"):
        (tmp_path / name).mkdir()
    return tmp_path


def v2_tree(kernel: Path) -> CgroupTree:
    return CgroupTree(dict.fromkeys(("memory", "pids", "cpu"), kernel / "v2"), kernel / "v2")


def v1_tree(kernel: Path) -> CgroupTree:
    return CgroupTree({name: kernel / "v1" / name for name in ("memory", "pids", "cpu")}, None)


def test_mounts_of_both_versions() -> None:
    mounts = parse_mounts(
        "proc /proc proc rw 0 0\n"
        "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
        "cgroup /sys/fs/cgroup/me\\040mory cgroup rw,memory 0 0\n"
        "cgroup /sys/fs/cgroup/systemd cgroup rw,name=systemd 0 0\n"
        "cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n"
    )
    assert mounts.v1 == {"cpu": Path("/sys/fs/cgroup/cpu,cpuacct"), "memory": Path("/sys/fs/cgroup/me mory")}
    assert mounts.v2 == Path("/sys/fs/cgroup/unified")
    assert parse_mounts("").v2 is None


def test_own_group_of_version_2() -> None:
    assert parse_own("4:memory:/a\n0::/user.slice/user-1000.slice/x.scope\n") == "user.slice/user-1000.slice/x.scope"
    assert parse_own("4:memory:/a\n") == ""


def test_counts() -> None:
    v1 = "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n"
    v2 = "low 0\nhigh 0\nmax 7\noom 2\noom_kill 4\noom_group_kill 0\n"
    assert (parse_count(v1, "oom_kill"), parse_count(v2, "oom_kill"), parse_count("", "oom_kill")) == (3, 4, 0)


def test_limits_as_files() -> None:
    assert settings_v1(LIMITS, ALL_DEFENCES) == {
        "memory": {
            "memory.limit_in_bytes": "104857600",
            "memory.memsw.limit_in_bytes": "104857600",
            "memory.kmem.tcp.limit_in_bytes": "26214400",  # sockets, a quarter
        },
        "pids": {"pids.max": str(10 + RUNNER_PROCESSES)},
        "cpu": {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "50000"},
    }
    assert settings_v2(LIMITS, ALL_DEFENCES) == {
        "memory": {"memory.max": "104857600", "memory.swap.max": "0", "memory.oom.group": "0"},
        "pids": {"pids.max": str(10 + RUNNER_PROCESSES)},
        "cpu": {"cpu.max": "50000 100000"},
    }


@pytest.mark.parametrize("settings", [settings_v1, settings_v2])
def test_without_a_defence_its_limit_is_not_set(settings: object) -> None:
    assert callable(settings)
    for defence, controller in ((Defence.MEMORY, "memory"), (Defence.PROCESSES, "pids"), (Defence.CPU, "cpu")):
        files = settings(LIMITS, ALL_DEFENCES - {defence})
        assert [name for name in files if not files[name]] == [controller]


def test_version_2_on_a_pretended_kernel(kernel: Path) -> None:
    tree = v2_tree(kernel)
    tree.start()
    group = tree.create("one", LIMITS, ALL_DEFENCES)
    (folder,) = group.folders
    assert (folder / "memory.max").read_text() == "104857600"
    assert (folder / "memory.swap.max").read_text() == "0"
    assert not (folder / "memory.oom.group").exists(), "a kernel that does not have it is not made to"
    assert group.joins == [folder / "cgroup.procs"]
    (folder / "memory.events").write_text("oom 1\noom_kill 2\n")
    assert group.oom_kills() == 2
    group.kill()
    assert (folder / "cgroup.kill").read_text() == "1"
    (folder / "cgroup.procs").write_text("77\n")
    assert not group.remove()
    (folder / "cgroup.procs").write_text("")
    assert group.remove()
    assert group.oom_kills() == 0
    tree.close()
    assert list((kernel / "v2" / "agentrl").glob("*-*")) == []


def test_processes_of_a_delegated_group_make_room(kernel: Path) -> None:
    """Version 2 passes controllers on only from a group without processes; the root is excepted."""
    (kernel / "v2" / "cgroup.type").write_text("domain")
    (kernel / "v2" / "cgroup.procs").write_text("77\n")
    v2_tree(kernel).start()
    assert (kernel / "v2" / "agentrl-server" / "cgroup.procs").read_text() == "77"
    assert (kernel / "v2" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_version_1_on_a_pretended_kernel(kernel: Path) -> None:
    tree = v1_tree(kernel)
    tree.start()
    group = tree.create("one", LIMITS, ALL_DEFENCES)
    assert len(group.joins) == 3
    (memory,) = [folder for folder in group.folders if "memory" in folder.parts]
    (memory / "memory.oom_control").write_text("oom_kill 5\n")
    assert group.oom_kills() == 5
    assert group.remove()
    tree.close()


def test_a_group_that_cannot_be_made_leaves_nothing(kernel: Path) -> None:
    tree = v1_tree(kernel)
    tree.start()
    tree.create("one", LIMITS, ALL_DEFENCES)
    (cpu,) = (kernel / "v1" / "cpu" / "agentrl").glob("*-*")
    (cpu / "two").mkdir()
    with pytest.raises(FileExistsError):
        tree.create("two", LIMITS, ALL_DEFENCES)
    assert not list((kernel / "v1" / "memory").glob("agentrl/*/two"))


def test_servers_of_one_process_are_apart(kernel: Path) -> None:
    trees = [v1_tree(kernel), v1_tree(kernel)]
    for tree in trees:
        tree.start()
    group = trees[0].create("one", LIMITS, ALL_DEFENCES)
    trees[1].close()
    assert all(folder.exists() for folder in group.folders)


def test_a_server_is_known_by_start_time_and_namespace() -> None:
    mine = server_name()
    pid, started, namespace = mine.split("-")
    assert not server_gone(mine)
    assert not server_gone(f"{mine}-7")
    assert server_gone(f"{pid}-{int(started) - 1}-{namespace}"), "the number is another process's by now"
    assert not server_gone(f"{pid}-{int(started) - 1}-1"), "of a namespace that we do not see into"
    assert not server_gone("other")
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        name = server_name(child.pid)
        child.kill()
    assert server_gone(name)


def test_only_what_dead_servers_have_left_is_reaped(kernel: Path) -> None:
    tree = v1_tree(kernel)
    tree.start()
    pid, started, namespace = server_name().split("-")
    dead = f"{pid}-{int(started) - 1}-{namespace}-1"
    for name in (dead, "other", f"1-2-{int(namespace) + 1}"):
        (kernel / "v1" / "pids" / "agentrl" / name / "box").mkdir(parents=True)
    assert tree.reap() == [dead]
    remaining_groups = {path.name for path in (kernel / "v1" / "pids" / "agentrl").iterdir() if path.is_dir()}
    assert remaining_groups == {"other", f"1-2-{int(namespace) + 1}", tree.server}


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    try:
        tree = find_tree()
        tree.start()
    except CgroupError as error:
        pytest.skip(f"no cgroups here: {error}")
    yield tree
    tree.close()


def test_members_are_killed_and_the_group_goes(tree: CgroupTree) -> None:
    group = tree.create("one", LIMITS, ALL_DEFENCES)
    with subprocess.Popen(["/bin/sleep", "60"]) as child:
        for file in group.joins:
            file.write_text(str(child.pid))
        assert not group.remove()
        group.kill()
        assert child.wait(10) == -9
    wait_until(group.remove, 10)


def test_remains_of_a_server_are_killed(tree: CgroupTree) -> None:
    """A process in the group of a server that is gone: not ours by birth, as after SIGKILL of the server."""
    with subprocess.Popen(["/bin/sleep", "60"]) as server:
        tree_name = f"{server_name(server.pid)}-1"
        server.kill()
    tops = tree._tops
    with subprocess.Popen(["/bin/sleep", "60"]) as orphan:
        for top in tops:
            (top / tree_name / "box").mkdir(parents=True)
            (top / tree_name / "box" / "cgroup.procs").write_text(str(orphan.pid))
        assert tree_name in tree.reap()
        assert orphan.wait(10) == -9
    assert not any((top / tree_name).exists() for top in tops)


def test_a_parent_can_be_given(tree: CgroupTree) -> None:
    name = f"agentrl-test-{os.getpid()}"
    parents = [top.parent / name for top in tree._tops]
    for parent in parents:
        parent.mkdir()
    try:
        below = find_tree(name)
        below.start()
        group = below.create("one", LIMITS, ALL_DEFENCES)
        assert all(folder.parents[3].name == name or folder.parents[2].name == name for folder in group.folders)
        assert group.remove()
        below.close()
    finally:
        for parent in parents:
            (parent / "agentrl").rmdir()
            parent.rmdir()
