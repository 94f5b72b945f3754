"""Host memory by kind of process, and its warnings."""

import pytest

from agentrl.obs.host_memory import GIB, STEPS, HostMemory, grows, process_kind, process_memory, used_and_limit


def memory(sizes, *, used=1, limit=100):
    notes = []
    return HostMemory(notes.append, lambda: {kind: size * GIB for kind, size in sizes.items()},
                      lambda: (used * GIB, limit * GIB)), notes  # fmt: skip


def test_the_largest_value_of_a_step_counts():
    sizes = {"trainer": 1, "engine": 2}
    watch, notes = memory(sizes)
    assert watch.metrics() == {}
    watch.update()
    sizes["engine"] = 5
    watch.update()
    sizes["engine"] = 3
    watch.update()
    metrics = {"host_memory/trainer_gib": 1.0, "host_memory/engine_gib": 5.0, "host_memory/total_gib": 6.0}
    assert watch.metrics() == metrics | {"host_memory/used_share": 0.01}
    assert watch.metrics()["host_memory/engine_gib"] == 3.0
    assert not notes


def test_little_memory_left_is_a_warning():
    watch, notes = memory({"trainer": 1, "engine": 90}, used=95)
    watch.update()
    watch.update()
    [warning] = notes
    assert "95.0 of 100.0 GiB" in warning
    assert "90.0 of them by the processes of kind engine" in warning


def test_steady_growth_is_a_warning():
    sizes = {"trainer": 10.0, "learner": 10.0}
    watch, notes = memory(sizes)
    for _ in range(2 * STEPS):
        watch.update()
        watch.metrics()
        sizes["learner"] += 0.2
    [warning] = notes
    assert "kind learner has grown from 10.00 to 13.00 GiB over the last 16 steps" in warning


@pytest.mark.parametrize(
    "values",
    [[1.0] * 16, [1.0] * 8 + [3.0] * 8, [1.0, 9.0] * 8, [1.0 + 0.01 * step for step in range(16)]],
    ids=["constant", "one jump", "waves", "little"],
)
def test_other_changes_are_none(values):
    assert not grows(values)


def test_this_process_is_the_trainer():
    assert process_memory()["trainer"] > 2**20


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("/usr/bin/python -m agentrl.inference.embedded --model x", "engine"),
        ("python -m agentrl.cli.main tools serve search", "tool_server"),
        ("ray::LearnerActor.train_step", "learner"),
        ("ray::EngineHost.start", "engine"),
        ("/x/ray/core/src/ray/raylet/raylet --a", "ray"),
        ("bwrap --unshare-all", "sandbox"),
        ("sleep 3", "tool_server"),
    ],
)
def test_kinds(line, kind):
    assert process_kind(line.split(), "tool_server") == kind


def test_other_processes_of_the_run_are_others():
    assert process_kind(["sleep"], "trainer") == "other"


def test_the_limit_of_a_container(tmp_path):
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert used_and_limit(tmp_path) == (600000, 1000000)
    (tmp_path / "memory.max").write_text("max\n")
    used, limit = used_and_limit(tmp_path)
    assert 0 < used < limit
    assert used_and_limit(tmp_path / "none")[1] == limit
