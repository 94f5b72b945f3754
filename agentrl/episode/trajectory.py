"""What one agent saw and said in an episode: a graph of tokens, each with who made it.

A node holds only the tokens it adds to its parent, all of one provenance and, if sampled, of one request. A prompt
that starts like an earlier one reuses its nodes by the longest common *token* prefix and forks at the first difference,
so nothing is ever patched. Each leaf is one training row; a sampled node that leaves share is trained in the first.

Token layout of a row of two turns (``p`` prompt, ``a b`` sampled, ``o`` observation), masks beneath::

    p p p a a a o o o b b
    0 0 0 1 1 1 0 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import SamplerError
from agentrl.types import ForkReason, Generation, MaskReason, Provenance, Row, RowKey

_NONE = -1


@dataclass(slots=True, eq=False)
class Node:
    """Tokens that follow another node's. ``n`` tokens; the last two arrays are empty unless they were sampled."""

    parent: int
    """Index of the node before; -1 at a root."""
    end: int
    """Tokens from the root to the end of this node."""
    provenance: Provenance
    """Of all its tokens."""
    token_ids: NDArray[np.int32]
    """``[n]``, at least one."""
    logprobs: NDArray[np.float32]
    """``[n]`` at the sampling temperature."""
    versions: NDArray[np.int32]
    """``[n]`` policy version that sampled each token."""
    request_id: str = ""
    """The request that sampled them."""
    fork: ForkReason | None = None
    """Why they do not follow what was said last, where they begin a fork."""

    @property
    def start(self) -> int:
        """Tokens before this node."""
        return self.end - len(self.token_ids)


_NO_LOGPROBS = np.zeros(0, np.float32)
_NO_VERSIONS = np.zeros(0, np.int32)


class Trajectory:
    """Grows at its tip; `extend_to` moves the tip, forking where it must."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.temperature = 1.0
        """At which its tokens were sampled."""
        self._tip = _NONE
        self._reason: ForkReason | None = None  # of a fork whose first node is still to come
        # Tokens up to the tip, in two parts: joining them costs a copy, which grows with the episode.
        self._before: tuple[int, ...] = ()
        self._since: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the root to the tip."""
        return self._before + self._since

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, shared ones once."""
        return sum(len(node.token_ids) for node in self.nodes if node.provenance is Provenance.SAMPLED)

    def append_observed(self, token_ids: Sequence[int]) -> None:
        """Add tokens that nobody sampled."""
        self._append(Provenance.OBSERVED, token_ids)

    def append_demonstrated(self, token_ids: Sequence[int]) -> None:
        """Add tokens that a scripted expert wrote; their mask is 1, for supervised fine-tuning only."""
        self._append(Provenance.DEMONSTRATED, token_ids)

    def append_sampled(self, generation: Generation) -> None:
        """Add what an engine sampled; nothing, where it was aborted before the first token.

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
            added: how many of them were appended to the tokens up to the tip, where they were: nothing is compared.
            fork: why the prompt was made anew, for the rows that begin here; ``TEMPLATE`` if None.
        """
        prompt_ids = tuple(prompt_ids)
        middle, known = len(self._before), len(self._before) + len(self._since)
        assert added is None or added + known == len(prompt_ids), "what was appended follows the tip"
        if added is None and (prompt_ids[:middle] != self._before or prompt_ids[middle:known] != self._since):
            known, self._reason = self._fork(np.array(prompt_ids, np.int32)), fork or ForkReason.TEMPLATE
        if known < len(prompt_ids):
            self._add(Provenance.OBSERVED, np.array(prompt_ids[known:], np.int32), _NO_LOGPROBS, _NO_VERSIONS, "")
        self._before, self._since = prompt_ids, ()
        return known

    def rows(self, prompt_id: str, rollout_id: str, agent_id: str = "main") -> list[Row]:
        """Return one row a leaf, in the order their last nodes were added; none where nothing is to be trained on."""
        parents = {node.parent for node in self.nodes}
        trained: set[int] = set()
        rows: list[Row] = []
        for leaf in range(len(self.nodes)):
            if leaf not in parents:
                rows.append(self._row(RowKey(prompt_id, rollout_id, agent_id, len(rows)), leaf, trained))
        return rows if trained else []

    def to_state(self) -> dict[str, Any]:
        """Return the graph as JSON-able data."""
        nodes = [
            {
                "parent": node.parent,
                "end": node.end,
                "provenance": int(node.provenance),
                "token_ids": node.token_ids.tolist(),
                "logprobs": node.logprobs.tolist(),
                "versions": node.versions.tolist(),
                "request_id": node.request_id,
                "fork": node.fork and node.fork.value,
            }
            for node in self.nodes
        ]
        return {"nodes": nodes, "tip": self._tip, "temperature": self.temperature}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Return the graph that `to_state` wrote."""
        graph = cls()
        for node in state["nodes"]:
            graph.nodes.append(
                Node(
                    node["parent"],
                    node["end"],
                    Provenance(node["provenance"]),
                    np.array(node["token_ids"], np.int32),
                    np.array(node["logprobs"], np.float32),
                    np.array(node["versions"], np.int32),
                    node["request_id"],
                    ForkReason(node["fork"]) if node["fork"] else None,
                )
            )
        graph.temperature = state["temperature"]
        graph._tip = state["tip"]
        graph._before = tuple(index for node in graph._nodes_to(graph._tip) for index in node.token_ids.tolist())
        return graph

    def _append(
        self,
        provenance: Provenance,
        token_ids: Sequence[int],
        logprobs: NDArray[np.float32] = _NO_LOGPROBS,
        versions: NDArray[np.int32] = _NO_VERSIONS,
        request_id: str = "",
    ) -> None:
        if len(token_ids):
            self._add(provenance, np.array(token_ids, np.int32), logprobs, versions, request_id)
            self._since += tuple(token_ids)

    def _add(
        self,
        provenance: Provenance,
        token_ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        versions: NDArray[np.int32],
        request_id: str,
    ) -> None:
        before = self.nodes[self._tip].end if self._tip != _NONE else 0
        end = before + len(token_ids)
        self.nodes.append(Node(self._tip, end, provenance, token_ids, logprobs, versions, request_id, self._reason))
        self._tip, self._reason = len(self.nodes) - 1, None

    def _fork(self, prompt: NDArray[np.int32]) -> int:
        """Put the tip at the end of the longest common prefix of ``prompt`` and the graph; return its length."""
        children: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(index)
        self._tip, known = _NONE, 0
        while True:
            best, common = _NONE, 0
            for child in children.get(self._tip, ()):
                same = _common_prefix(self.nodes[child].token_ids, prompt[known:])
                if same > common:
                    best, common = child, same
            if best == _NONE:
                return known
            known += common
            if common < len(self.nodes[best].token_ids):
                self._tip = self._split(best, common)
                return known
            self._tip = best

    def _split(self, index: int, size: int) -> int:
        """Cut a node after ``size`` tokens and return the new node that holds them; the rest stays at ``index``."""
        node = self.nodes[index]
        cut_end = node.start + size
        head = Node(node.parent, cut_end, node.provenance, node.token_ids[:size], node.logprobs[:size],
                    node.versions[:size], node.request_id, node.fork)  # fmt: skip
        node.fork = None
        self.nodes.append(head)
        node.parent = len(self.nodes) - 1
        node.token_ids, node.logprobs, node.versions = node.token_ids[size:], node.logprobs[size:], node.versions[size:]
        return node.parent

    def _indices_to(self, tip: int) -> list[int]:
        path: list[int] = []
        while tip != _NONE:
            path.append(tip)
            tip = self.nodes[tip].parent
        return path[::-1]

    def _nodes_to(self, tip: int) -> Iterator[Node]:
        return (self.nodes[index] for index in self._indices_to(tip))

    def _row(self, key: RowKey, leaf: int, trained: set[int]) -> Row:
        """Build the row of ``leaf`` and add the nodes that it trains to ``trained``."""
        path = self._indices_to(leaf)
        size = self.nodes[leaf].end
        provenance = np.zeros(size, np.uint8)
        mask = np.zeros(size, np.uint8)
        reason = np.full(size, MaskReason.OBSERVED, np.uint8)
        logprobs = np.zeros(size, np.float32)
        versions = np.full(size, -1, np.int32)
        requests = np.full(size, -1, np.int32)
        request_ids: dict[str, int] = {}
        start = 0
        fork: ForkReason | None = None
        for index in path:
            node = self.nodes[index]
            fork = node.fork or fork
            here = slice(start, node.end)
            start = node.end
            if node.provenance is Provenance.OBSERVED:
                continue
            provenance[here] = node.provenance
            fresh = index not in trained
            mask[here] = fresh
            reason[here] = MaskReason.NONE if fresh else MaskReason.SHARED
            trained.add(index)
            if node.provenance is Provenance.SAMPLED:
                logprobs[here] = node.logprobs
                versions[here] = node.versions
                requests[here] = request_ids.setdefault(node.request_id, len(request_ids))
        token_ids = np.concatenate([self.nodes[index].token_ids for index in path])
        ids = tuple(request_ids)
        return Row(key, token_ids, provenance, mask, reason, logprobs, versions, requests, ids, fork, self.temperature)


def _common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size


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
