"""The admission rule of asynchronous training: which groups may begin, and which are trained next.

A group that begins while the engines have version ``v`` must be trained by step ``v + max_staleness``, which trains that
version. The groups that must be trained by step ``d`` always fit into the batches from the next step ``t`` to ``d``, which are
``(d - t + 1) * batch_size`` groups. Admission keeps this for new groups, and a batch is taken only if it keeps this for those
that stay. So the bound holds without discarding a group: a step waits for an old group rather than take a newer one.

A group that a filter drops leaves its place to the next one. This loosens the rule for those that stay, and the new group is
admitted by the rule, so the bound holds with any number of replacements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(slots=True)
class AdmittedGroup:
    """A group that was admitted and that no step has taken."""

    position: int
    """Position of its task in the order of the run."""
    version: int
    """The engines' policy version at its admission: its tokens are not older."""
    finished: bool = False
    """All of its episodes have ended."""
    committed: bool = False
    """It belongs to the next step's batch, which is not full."""


class Admission:
    """Admits groups in the order of tasks, and forms batches of them.

    Args:
        positions: of the tasks in their order, without those that were trained before.
        step: finished training steps.
        steps: of the run; groups of later ones are not admitted.
        batch_size: groups of a step.
        max_staleness: most versions between a group's admission and the step that trains it.
        most: groups that are admitted and not taken, at least ``batch_size``; None: as many as ``max_staleness`` allows.
        has_task: whether there is a task at a position; after the first without one there is none.
    """

    def __init__(
        self,
        positions: Iterator[int],
        *,
        step: int,
        steps: int,
        batch_size: int,
        max_staleness: int,
        most: int | None = None,
        has_task: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self.step = step
        """The policy version that the next batch trains: the number of steps whose batch was taken."""
        self._positions = positions
        self._next = next(positions)
        self._has_task = has_task
        self._unadmitted = (steps - step) * batch_size
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self.passed_over = 0
        """Groups that were admitted before one of the groups that were taken last, and stay."""
        self._most = (max_staleness + 1) * batch_size if most is None else most
        self._waiting: dict[int, AdmittedGroup] = {}
        """By position, in the order of admission."""

    def admit(self, version: int) -> int | None:
        """Admit the next group while the engines have ``version``; return its position, or None if none may begin."""
        room = (version + self._max_staleness + 1 - self.step) * self._batch_size
        if self._unadmitted <= 0 or len(self._waiting) >= min(room, self._most) or not self._has_task(self._next):
            return None
        self._unadmitted -= 1
        position, self._next = self._next, next(self._positions)
        self._waiting[position] = AdmittedGroup(position, version)
        return position

    @property
    def is_exhausted(self) -> bool:
        """Whether the groups that are left do not fill a batch, and there is no task for another one."""
        return self.finished == len(self._waiting) < self._batch_size and not self._has_task(self._next)

    def restore(self, position: int, version: int) -> None:
        """Admit a group that the same rule admitted in an earlier process, at ``version``; the oldest first."""
        self._unadmitted -= 1
        self._waiting[position] = AdmittedGroup(position, version)

    def finish(self, position: int) -> None:
        """Record that all episodes of a group have ended."""
        self._waiting[position].finished = True

    def drop(self, position: int) -> None:
        """Remove a group that is not trained, so that another one may begin in its place."""
        del self._waiting[position]
        self._unadmitted += 1

    def commit(self, *, in_order: bool = False) -> list[int]:
        """Choose finished groups for the next step before its batch is full; return the positions of those that were not yet.

        Those that were admitted first are chosen, as many as the bound permits for the groups that stay. With ``in_order`` a
        group is chosen only if all before it are.
        """
        groups = [group for group in self._waiting.values() if not group.committed]
        free = self._batch_size - (len(self._waiting) - len(groups))
        spare = [self._spare(index, group.version) for index, group in enumerate(groups)]
        # A chosen group leaves its place in the batch and in the order, so those after it keep what they have to spare.
        least_after = [*accumulate(reversed(spare[1:]), min, initial=self._batch_size)][::-1]
        chosen: list[int] = []
        least_before = self._batch_size
        for index, group in enumerate(groups):
            if len(chosen) == free or (in_order and not group.finished):
                break
            if not group.finished:
                least_before = min(least_before, self._spare(index - len(chosen), group.version))
                continue
            if least_after[index] + free <= 0 or least_before + free - len(chosen) - 1 <= 0:
                break
            group.committed = True
            chosen.append(group.position)
        return chosen

    def _spare(self, index: int, version: int) -> int:
        """Return how many more groups of its version could be before the group with this index, if only full batches follow."""
        return (version + self._max_staleness - self.step) * self._batch_size - index

    def take(self, *, in_order: bool = False) -> list[int] | None:
        """Return the positions of the next step's groups, ascending; None if the step must wait.

        Groups that `commit` chose are taken. Of the other finished groups those that were admitted first are, which also
        leaves most room to those that stay. With ``in_order`` the step waits until these are the first of all groups.
        """
        finished = [group for group in self._waiting.values() if group.finished]
        if len(finished) < self._batch_size:
            return None
        batch = sorted(finished, key=lambda group: not group.committed)[: self._batch_size]
        batch_positions = {group.position for group in batch}
        staying = [group.version for group in self._waiting.values() if group.position not in batch_positions]
        last = max((number for number, position in enumerate(self._waiting) if position in batch_positions), default=-1)
        passed_over = last + 1 - len(batch)
        if not self._in_time(staying) or (in_order and passed_over):
            return None
        self.step += 1
        self.passed_over = passed_over
        for position in batch_positions:
            del self._waiting[position]
        return sorted(batch_positions)

    def _in_time(self, versions: Sequence[int]) -> bool:
        """Return whether groups of these versions, ascending, can be trained in time by the steps after the next."""
        return all(self._spare(index, version) > 0 for index, version in enumerate(versions))

    @property
    def finished(self) -> int:
        """Finished groups that were not taken."""
        return sum(group.finished for group in self._waiting.values())

    @property
    def oldest(self) -> int | None:
        """Position of the first group that was admitted and not taken or dropped."""
        return next(iter(self._waiting), None)

    @property
    def unfinished(self) -> Sequence[int]:
        """Positions of the groups that are not finished, the first admitted first."""
        return [group.position for group in self._waiting.values() if not group.finished]
