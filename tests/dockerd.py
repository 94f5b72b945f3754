"""A Docker daemon for tests: the one that runs here, or one of our own that is gone afterwards.

`running_dockerd` is a plain context manager, the fixture `dockerd` (in conftest.py) wraps it. By hand:
``python tests/dockerd.py`` prints address and image, and ends what it started when its standard input ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import docker
import docker.errors
import psutil
import requests

IMAGE = "agentrl-sandbox:test"
USUAL_SOCKET = "unix:///var/run/docker.sock"
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2**32
"""Memory that is free with which a daemon keeps its files there: a disk takes ten times as long."""
STARTS_WITHIN_S = 30.0
ENDS_WITHIN_S = 30.0


class NoDocker(Exception):
    """There is no daemon, or no image for it, and none can be made; the message says why."""


@dataclass(frozen=True)
class DockerHost:
    """A daemon that answers."""

    url: str
    image: str = IMAGE


@dataclass
class OwnDaemon:
    """A daemon of ours, and everything it starts, below one folder."""

    folder: Path
    storage: str = "overlay2"
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def cgroup_parent(self) -> str:
        """The cgroup above its containers, below the roots of all hierarchies."""
        return f"/{self.folder.name}"

    @property
    def log(self) -> Path:
        return self.folder / "dockerd.log"

    def start(self) -> None:
        """Start it and wait until it answers; a second start finds what the first has left."""
        command = [
            # It ends with whoever started it, however that ends.
            *("setpriv", "--pdeathsig", "TERM"),
            # No bridge, no packet filter, no forwarding: containers without a network need none of them, and the
            # machine's own network stays as it is.
            *("dockerd", "--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"),
            *(f"--storage-driver={self.storage}", "--exec-opt", "native.cgroupdriver=cgroupfs"),
            *("-H", self.url, "--data-root", f"{self.folder}/data", "--exec-root", f"{self.folder}/exec"),
            *("--pidfile", f"{self.folder}/docker.pid", "--config-file", f"{self.folder}/none.json"),
            f"--cgroup-parent={self.cgroup_parent}",
        ]
        (self.folder / "none.json").write_text("{}")
        # Those that were killed leave their ids there, which a new one believes as long as they are not even reaped.
        for pid_file in ("docker.pid", "exec/containerd/containerd.pid"):
            (self.folder / pid_file).unlink(missing_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not _answers(self.url):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise NoDocker(f"dockerd with {self.storage} does not start: {self._last_words()}")
            time.sleep(0.05)

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        fault_lines = [
            line for line in lines if "level=fatal" in line or "level=error" in line or "failed to start" in line
        ]
        return (fault_lines or lines or ["it printed nothing"])[-1]

    def kill(self) -> None:
        """SIGKILL the daemon; containerd dies with it, its containers stay."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        while "containerd" in self._names():
            time.sleep(0.01)

    def stop(self) -> None:
        """End the daemon, what it started, its mounts and its cgroups.

        Nothing of it is used again. Asked to end, it may wait 15 seconds for its containerd, which has ended long since.
        """
        if self.process is not None and self.process.poll() is None:
            self.kill()
        children = self.children()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, ENDS_WITHIN_S)
        for mount in self._mounts():
            subprocess.run(["umount", "--lazy", mount], check=False, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + ENDS_WITHIN_S
        while (groups := self.cgroups()) and time.monotonic() < deadline:
            for group in groups:
                with contextlib.suppress(OSError):  # a process that was just killed may still be in it
                    group.rmdir()
            time.sleep(0.01)

    def cgroups(self) -> list[Path]:
        """Return the cgroups that it made, inner ones first."""
        mounts = Path("/sys/fs/cgroup")
        roots = (mounts / self.folder.name, *(mount / self.folder.name for mount in mounts.iterdir()))
        # Others make and remove cgroups meanwhile, which `os.walk` passes over.
        return sorted((Path(path) for root in roots for path, _, _ in os.walk(root)), reverse=True)

    def _names(self) -> list[str]:
        try:
            return [child.name() for child in self.children()]
        except psutil.NoSuchProcess:  # just now
            return self._names()

    def children(self) -> list[psutil.Process]:
        """Return what runs for it: containerd and shims (they name our folder), what shims run, and reapers of machines."""
        ours = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                named = any(str(self.folder) in word for word in process.cmdline())
                is_reaper = named and "agentrl.containers.reaper" in process.cmdline()
                if is_reaper or (named and process.name().startswith("containerd")):
                    ours += [process, *process.children(recursive=True)]
        return ours

    def _mounts(self) -> list[str]:
        """Return the mounts below our folder, inner ones first."""
        mounted = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        return sorted((point for point in mounted if point.startswith(f"{self.folder}/")), key=len, reverse=True)


def _answers(url: str) -> bool:
    try:
        client = docker.APIClient(base_url=url, timeout=10, version="1.41")
        try:
            return bool(client.ping())
        finally:
            client.close()
    except (docker.errors.DockerException, requests.RequestException, OSError):
        return False


@contextlib.contextmanager
def own_daemon() -> Iterator[OwnDaemon]:
    """Start a daemon without any image; end it afterwards.

    Raises:
        NoDocker: this machine cannot run one.

    """
    if shutil.which("dockerd") is None:
        raise NoDocker("no Docker daemon answers and dockerd is not installed (Debian: docker.io)")
    if os.geteuid() != 0:
        raise NoDocker("no Docker daemon answers and only root can start one")
    with contextlib.ExitStack() as exits:
        reasons = []
        for parent, storage in _storages():
            # Not below the tests' own temporary folder: the path of a socket has 108 bytes at most.
            folder = Path(tempfile.mkdtemp(prefix="agentrl-dockerd-", dir=parent))
            exits.callback(shutil.rmtree, folder, ignore_errors=True)
            daemon = OwnDaemon(folder, storage)
            try:
                daemon.start()
                break
            except NoDocker as error:
                reasons.append(str(error))
        else:
            raise NoDocker("; ".join(reasons))
        exits.callback(daemon.stop)
        yield daemon


def _storages() -> Iterator[tuple[Path | None, str]]:
    """Return folders for a daemon's files with storage drivers, the best first; None: the folder for temporary files."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK):  # it may be a read-only mount
        facts = os.statvfs(MEMORY)
        free = min(facts.f_bavail * facts.f_frsize, psutil.virtual_memory().available)
        if free >= MEMORY_BYTES and not facts.f_flag & os.ST_NOEXEC:
            yield MEMORY, "overlay2"
    yield None, "overlay2"
    yield None, "vfs"


@contextlib.contextmanager
def running_dockerd() -> Iterator[DockerHost]:
    """Give a daemon that has `IMAGE`: a running one, else one of our own, which ends with the block.

    Raises:
        NoDocker: see `own_daemon`, `image_tar`.

    """
    for url in (os.environ.get("DOCKER_HOST"), USUAL_SOCKET):
        if url and _answers(url):
            import_image(url)
            yield DockerHost(url)
            return
    with own_daemon() as daemon:
        import_image(daemon.url)
        yield DockerHost(daemon.url)


def import_image(url: str) -> None:
    """Give the daemon `IMAGE` if it has none."""
    client = docker.APIClient(base_url=url, timeout=120)
    try:
        if not client.images(IMAGE, quiet=True):
            repository, tag = IMAGE.split(":")
            client.import_image_from_file(str(image_tar()), repository=repository, tag=tag)
    finally:
        client.close()


def image_tar() -> Path:
    """Return the image's files: a small Debian with Python, made once and kept.

    Raises:
        NoDocker: it is not there and cannot be made.

    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "agentrl"
    cache.mkdir(parents=True, exist_ok=True)
    tar = cache / "sandbox-bookworm-1.tar"
    with (cache / "sandbox.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not tar.exists():
            _debootstrap(tar)
    return tar


def _debootstrap(tar: Path) -> None:
    if shutil.which("debootstrap") is None:
        raise NoDocker("debootstrap, which makes the image, is not installed")
    # Beside the result and not in /tmp, which may forbid devices or programs.
    with tempfile.TemporaryDirectory(prefix="debootstrap-", dir=tar.parent) as folder:
        root = Path(folder) / "root"
        made = subprocess.run(
            ["debootstrap", "--variant=minbase", "--include=python3,procps", "bookworm", str(root)],
            capture_output=True,
            text=True,
        )
        if made.returncode != 0:
            lines = (made.stdout + made.stderr).strip().splitlines() or ["nothing"]
            raise NoDocker(f"debootstrap ended with {made.returncode}: {lines[-1]}")
        for spare in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
            shutil.rmtree(root / spare, ignore_errors=True)
        archive = Path(folder) / "image.tar"
        subprocess.run(
            [
                "tar",
                "--numeric-owner",
                "--one-file-system",
                "--exclude=./dev/*",
                "-C",
                str(root),
                "-cf",
                str(archive),
                ".",
            ],
            check=True,
        )
        archive.rename(tar)


def main() -> None:
    """Run a daemon until standard input ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with running_dockerd() as host:
        print(f"sandbox.docker_url={host.url} sandbox.image={host.image}", flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
