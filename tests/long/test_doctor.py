"""`agentrl doctor` names the cause of seeded faults first; see `seeded_faults`."""

from pathlib import Path

import pytest

from tests.long.seeded_faults import FAULTS, SeededFault, diagnosis

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

ASKED = 18 / 20


def test_hit_rate_on_seeded_faults(tmp_path: Path) -> None:
    missed = {}
    for number, fault in enumerate(FAULTS):
        hit, finding = diagnosis(fault, tmp_path / str(number))
        if not hit:
            missed[fault.name] = finding
    assert len(FAULTS) >= 20
    assert len(FAULTS) - len(missed) >= ASKED * len(FAULTS), missed


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    _, finding = diagnosis(SeededFault("none", "", ""), tmp_path / "healthy")
    assert (finding.severity, finding.title) == ("state", "no problem")
