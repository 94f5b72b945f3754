"""200 machines through one daemon with a bound of 8: none is left after a SIGKILL of the run and the time to live."""

from pathlib import Path

import pytest
from dockerd import DockerHost
from killed_containers import kill_run

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


def test_200_machines_through_a_bound_of_8(dockerd: DockerHost, tmp_path: Path) -> None:
    killed = kill_run(dockerd.url, dockerd.image, tmp_path, machines=200, bound=8, played=192, lease_s=10)
    print(
        f"{killed.played} machines played, at most {killed.most_machines} at a time; {killed.at_the_kill} containers "
        f"and volumes at the kill, {len(killed.remains)} after {killed.seconds:.1f} s"
    )
    assert killed.at_the_kill
    assert killed.most_machines == 8
    assert killed.remains == []
