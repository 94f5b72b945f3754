import numpy as np

from agentrl.inference.embedded.kv_slots import NoSlot, SlotAssignment, SlotTable


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def run(table: SlotTable, tokens: np.ndarray, output: int = 0) -> int:
    """SlotAssignment a request, compute its prompt and ``output`` more tokens; return its slot, still active."""
    assigned = table.assign(tokens)
    assert isinstance(assigned, SlotAssignment)
    table.mark_computed()
    for token in range(output):
        table.append(assigned.slot, 1000 + token)
        table.mark_computed()
    return assigned.slot


def test_the_next_turn_takes_its_own_slot_over() -> None:
    table = SlotTable(4, 100)
    slot = run(table, np.arange(50), output=20)
    table.release(slot)
    turn = np.concatenate([np.arange(50), 1000 + np.arange(20), ids(7, 8)])
    assert table.assign(turn) == SlotAssignment(slot, slot, 70)


def test_another_request_copies_the_shared_prefix_and_leaves_the_slot_whole() -> None:
    table = SlotTable(4, 100)
    slot = run(table, np.arange(50), output=20)
    table.release(slot)
    other_values = np.concatenate([np.arange(40), ids(90, 91)])
    assigned = table.assign(other_values)
    assert isinstance(assigned, SlotAssignment)
    assert assigned.slot != slot
    assert (assigned.source, assigned.cached) == (slot, 40)
    assert table.held[slot] == 70


def test_the_last_token_is_always_computed() -> None:
    table = SlotTable(4, 100)
    table.release(run(table, np.arange(50)))
    assert table.assign(np.arange(50)) == SlotAssignment(0, 0, 49)


def test_active_slots_can_be_copied_from_but_not_taken() -> None:
    table = SlotTable(2, 100)
    first = run(table, np.arange(50))
    assigned = table.assign(np.append(np.arange(50), 77))
    assert assigned == SlotAssignment(1 - first, first, 50)
    assert table.assign(np.arange(5)) is NoSlot.FULL


def test_a_request_waits_for_a_long_prefix_that_this_step_computes() -> None:
    table = SlotTable(4, 200)
    assert isinstance(table.assign(np.arange(100)), SlotAssignment)
    assert table.assign(np.append(np.arange(90), 5)) is NoSlot.PREFIX_PENDING
    assert isinstance(table.assign(np.append(np.arange(10), 150)), SlotAssignment), "a short one is not worth the wait"
    table.mark_computed()
    assigned = table.assign(np.append(np.arange(90), 5))
    assert isinstance(assigned, SlotAssignment)
    assert assigned.cached == 90


def test_the_least_recently_used_idle_slot_is_reused_after_empty_ones() -> None:
    table = SlotTable(3, 100)
    slots = [run(table, np.arange(start, start + 20)) for start in (0, 100)]
    for slot in reversed(slots):
        table.release(slot)
    assert run(table, np.arange(200, 220)) == 2
    assert run(table, np.arange(300, 320)) == slots[1]


def test_after_a_flush_nothing_old_is_found() -> None:
    table = SlotTable(4, 100)
    idle, active = run(table, np.arange(50)), run(table, np.arange(100, 150))
    table.release(idle)
    table.flush()
    for start in (0, 100):
        assigned = table.assign(np.arange(start, start + 40))
        assert isinstance(assigned, SlotAssignment)
        assert assigned.cached == 0
        table.release(assigned.slot)
    table.release(active)
    assigned = table.assign(np.arange(100, 160))
    assert isinstance(assigned, SlotAssignment)
    # The slot that was active keeps nothing either; at most the copy just placed above, of new weights, is found.
    assert table.held[active] == 0 or assigned.slot == active


def test_a_prefix_of_another_namespace_is_not_reused() -> None:
    table = SlotTable(4, 100)
    table.release(run(table, np.arange(50)))
    of_other = table.assign(np.arange(60), namespace=1)
    assert isinstance(of_other, SlotAssignment)
    assert of_other.cached == 0
    table.mark_computed()
    table.release(of_other.slot)
    again = [table.assign(np.arange(70), namespace=number) for number in (2, 1, 0)]
    assert [assignment.cached for assignment in again if isinstance(assignment, SlotAssignment)] == [0, 60, 50]
