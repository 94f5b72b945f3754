"""What one conversation saw and said: a path through the token graph of its episode, which it grows at its tip.

A prompt that starts like an earlier one reuses its nodes by the longest common *token* prefix and forks at the first
difference. Other conversations of the episode (`branch`) grow the same graph, each at a tip of its own, in any order.

Token layout of a row of two turns (``p`` prompt, ``a b`` sampled, ``o`` observation), masks beneath::

    p p p a a a o o o b b
    0 0 0 1 1 1 0 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import SamplerError
from agentrl.core.types import ForkReason, Generation, Provenance, Row
from agentrl.episode.token_graph import ROOT, Node, TokenGraph, node_from_dict, node_to_dict

_NO_LOGPROBS = np.zeros(0, np.float32)
_NO_VERSIONS = np.zeros(0, np.int32)


class Trajectory:
    """Grows at its tip; `extend_to` moves the tip, forking where it must."""

    def __init__(self) -> None:
        self.graph = TokenGraph()
        """Of the whole episode."""
        self.branches: list[Trajectory] = []
        """Those that began here, in order."""
        self._name: tuple[int, ...] = ()
        self._tip = ROOT
        self._fork: ForkReason | None = None
        # Tokens up to the tip, in two parts: joining them costs a copy, which grows with the episode.
        self._before: tuple[int, ...] = ()
        self._since: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the root to the tip."""
        return self._before + self._since

    @property
    def temperature(self) -> float:
        """At which the episode's tokens were sampled."""
        return self.graph.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if value != self.temperature and self.sampled_tokens:
            raise ValueError(
                f"what was sampled at temperature {self.temperature:g} cannot go on at {value:g}: a row has one temperature; "
                f"set sampler.temperature={self.temperature:g}"
            )
        self.graph.temperature = value

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled in the episode, shared ones once."""
        return self.graph.sampled_tokens

    @property
    def branch_name(self) -> tuple[int, ...]:
        """Which conversation of the episode this is, see `Node.branch`."""
        return self._name

    def branch(self) -> Trajectory:
        """Return another conversation of the episode, whose tip is here so far; rows that it begins are ``BRANCH``."""
        other = Trajectory()
        other.graph, other._tip, other._before, other._since = self.graph, self._tip, self._before, self._since
        other._name, other._fork = (*self._name, len(self.branches)), ForkReason.BRANCH
        self.branches.append(other)
        return other

    def append_observed(self, token_ids: Sequence[int]) -> None:
        """Add tokens that nobody sampled."""
        self._append(Provenance.OBSERVED, token_ids)

    def append_demonstrated(self, token_ids: Sequence[int]) -> None:
        """Add tokens that a scripted expert wrote; their mask is 1, for supervised fine-tuning only."""
        self._append(Provenance.DEMONSTRATED, token_ids)

    def append_sampled(self, generation: Generation) -> None:
        """Add what an engine sampled; nothing, where it was aborted before the first token.

        The same tokens sampled twice are two samples, and both are trained.

        Raises:
            SamplerError: ids, log-probabilities, versions and request do not belong together.
        """
        size = len(generation.token_ids)
        fault = _fault(generation)
        if fault:
            raise SamplerError(f"request {generation.request_id!r} returned {fault}")
        if size == 0:
            return
        versions = np.empty(size, np.int32)
        for start, version in generation.versions:
            versions[start:] = version
        logprobs = np.array(generation.logprobs, np.float32)
        self._append(Provenance.SAMPLED, generation.token_ids, logprobs, versions, generation.request_id)

    def extend_to(self, prompt_ids: Sequence[int], *, added: int | None = None, fork: ForkReason | None = None) -> int:
        """Move the tip to the end of ``prompt_ids`` and return how many of them were there already.

        The common prefix keeps its nodes and their provenance; the rest is added as observed. A prompt that does not
        start with all tokens up to the tip forks the graph.

        Args:
            prompt_ids: the whole prompt.
            added: how many of them were appended to the tokens up to the tip, where they were: nothing before them is
                compared.
            fork: why the prompt was made anew, for the rows that begin here; ``TEMPLATE`` if None.
        """
        prompt_ids = tuple(prompt_ids)
        middle, known = len(self._before), len(self._before) + len(self._since)
        assert added is None or added + known == len(prompt_ids), "what was appended follows the tip"
        if added is None and (prompt_ids[:middle] != self._before or prompt_ids[middle:known] != self._since):
            self._tip, known, self._fork = ROOT, 0, fork or ForkReason.TEMPLATE
        self._tip, more = self.graph.walk(self._tip, prompt_ids[known:])
        known += more
        if known < len(prompt_ids):
            self._add(Provenance.OBSERVED, prompt_ids[known:], _NO_LOGPROBS, _NO_VERSIONS, "")
        self._before, self._since = prompt_ids, ()
        return known

    def rows(self, prompt_id: str, rollout_id: str, agent_id: str = "main") -> list[Row]:
        """Return the episode's rows, one a leaf of its graph; none where nothing is to be trained on.

        This conversation's come first, in the order they were begun, then those of its branches. All but the first
        say why they fork. A sampled token is trained in the first row that has it.
        """
        return self.graph.rows(prompt_id, rollout_id, agent_id)

    def to_state(self) -> dict[str, Any]:
        """Return the graph and the conversations that grow it from here on as JSON-able data."""
        nodes = [node_to_dict(node) for node in self.graph.nodes]
        return {"nodes": nodes, "temperature": self.temperature, **self._place()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Return what `to_state` wrote."""
        graph = TokenGraph([node_from_dict(node) for node in state["nodes"]], state["temperature"])
        return cls._placed(graph, state)

    def _place(self) -> dict[str, Any]:
        branches = [branch._place() for branch in self.branches]
        fork = self._fork and self._fork.value
        return {"tip": self._tip, "name": list(self._name), "fork": fork, "branches": branches}

    @classmethod
    def _placed(cls, graph: TokenGraph, place: dict[str, Any]) -> Trajectory:
        trajectory = cls()
        trajectory.graph, trajectory._tip, trajectory._name = graph, place["tip"], tuple(place["name"])
        trajectory._fork = ForkReason(place["fork"]) if place["fork"] else None
        trajectory._before = graph.token_ids(trajectory._tip)
        trajectory.branches = [cls._placed(graph, branch) for branch in place["branches"]]
        return trajectory

    def _append(
        self,
        provenance: Provenance,
        token_ids: Sequence[int],
        logprobs: NDArray[np.float32] = _NO_LOGPROBS,
        versions: NDArray[np.int32] = _NO_VERSIONS,
        request_id: str = "",
    ) -> None:
        if len(token_ids):
            self._add(provenance, token_ids, logprobs, versions, request_id)
            self._since += tuple(token_ids)

    def _add(
        self,
        provenance: Provenance,
        token_ids: Sequence[int],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        request_id: str,
    ) -> None:
        ids = np.array(token_ids, np.int32)
        end = self.graph.end(self._tip) + len(ids)
        node = Node(self._tip, end, provenance, ids, logprobs, versions, request_id, self._name, self._fork)
        self._tip = self.graph.add(node)


def _fault(generation: Generation) -> str:
    """Return what is wrong with a generation, in words; empty if nothing is."""
    size = len(generation.token_ids)
    if len(generation.logprobs) != size:
        return f"{size} token ids and {len(generation.logprobs)} log-probabilities"
    if size and not generation.request_id:
        return "tokens without a request id"
    if size and (not generation.versions or generation.versions[0][0] != 0):
        return f"versions {generation.versions}, which say nothing of its first token"
    if any(before[0] >= after[0] for before, after in pairwise(generation.versions)):
        return f"versions {generation.versions} that are not in order"
    return ""
