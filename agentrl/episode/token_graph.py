"""The tokens of an episode as a graph: what its conversations share is there once.

A node holds only the tokens it adds to its parent, all of one provenance and, if sampled, of one request. Nothing is ever
patched: what differs from what is there becomes a new branch at the first differing token. Each leaf is one training
row; a sampled node that leaves share is trained in the first of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import ForkReason, MaskReason, Provenance, Row, RowKey

ROOT = -1
"""Parent of the first nodes."""


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
    branch: tuple[int, ...] = ()
    """The conversation that added them: ``()`` is the first, ``(2, 0)`` the first branch of its third branch."""
    fork: ForkReason | None = None
    """Why that conversation forked last; None before it did."""

    @property
    def start(self) -> int:
        """Tokens before this node."""
        return self.end - len(self.token_ids)


class TokenGraph:
    """All tokens of one episode. Nodes keep their index, and an index its end, when others are added or cut."""

    def __init__(self, nodes: Sequence[Node] = (), temperature: float = 1.0) -> None:
        self.nodes: list[Node] = list(nodes)
        self.temperature = temperature
        """At which its tokens were sampled."""
        self._children: dict[int, list[int]] = {}
        for index, node in enumerate(self.nodes):
            self._children.setdefault(node.parent, []).append(index)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled, shared ones once."""
        return sum(len(node.token_ids) for node in self.nodes if node.provenance is Provenance.SAMPLED)

    def add(self, node: Node) -> int:
        """Add a node and return its index."""
        self.nodes.append(node)
        self._children.setdefault(node.parent, []).append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def end(self, tip: int) -> int:
        """Return how many tokens there are from the root to the end of a node."""
        return self.nodes[tip].end if tip != ROOT else 0

    def walk(self, tip: int, token_ids: Sequence[int]) -> tuple[int, int]:
        """Follow tokens from a node as far as they are there; return the node where they end, and how many there were.

        Where they end within a node, it is cut in two.
        """
        if tip not in self._children:
            return tip, 0
        wanted, known = np.array(token_ids, np.int32), 0
        while True:
            best, common = ROOT, 0
            for child in self._children.get(tip, ()):
                same = common_prefix(self.nodes[child].token_ids, wanted[known:])
                if same > common:
                    best, common = child, same
            if best == ROOT:
                return tip, known
            known += common
            if common < len(self.nodes[best].token_ids):
                return self._split(best, common), known
            tip = best

    def path(self, tip: int) -> list[int]:
        """Return the nodes from the root to a node."""
        path: list[int] = []
        while tip != ROOT:
            path.append(tip)
            tip = self.nodes[tip].parent
        return path[::-1]

    def token_ids(self, tip: int) -> tuple[int, ...]:
        """Return all tokens from the root to the end of a node."""
        return tuple(token for index in self.path(tip) for token in self.nodes[index].token_ids.tolist())

    def rows(self, prompt_id: str, rollout_id: str, agent_id: str) -> list[Row]:
        """Return one row a leaf: a conversation's in the order they were begun, its branches' after them."""
        leaves = sorted(set(range(len(self.nodes))) - set(self._children), key=lambda leaf: self._order(leaf))
        trained: set[int] = set()
        keys = (RowKey(prompt_id, rollout_id, agent_id, number) for number in range(len(leaves)))
        rows = [self._row(key, leaf, trained) for key, leaf in zip(keys, leaves, strict=True)]
        return rows if trained else []

    def _order(self, leaf: int) -> tuple[tuple[int, ...], int]:
        return self.nodes[leaf].branch, leaf

    def _split(self, index: int, size: int) -> int:
        """Cut a node after ``size`` tokens and return the new node that holds them; the rest stays at ``index``."""
        node = self.nodes[index]
        siblings = self._children[node.parent]
        siblings.remove(index)
        head = Node(node.parent, node.start + size, node.provenance, node.token_ids[:size], node.logprobs[:size],
                    node.versions[:size], node.request_id, node.branch, node.fork)  # fmt: skip
        node.parent = self.add(head)
        node.token_ids, node.logprobs, node.versions = node.token_ids[size:], node.logprobs[size:], node.versions[size:]
        self._children[node.parent] = [index]
        return node.parent

    def _row(self, key: RowKey, leaf: int, trained: set[int]) -> Row:
        """Build the row of ``leaf`` and add the nodes that it trains to ``trained``."""
        path = [self.nodes[index] for index in self.path(leaf)]
        fork = self.nodes[leaf].fork if key.row else None
        assert fork is not None or key.row == 0, "a conversation that has forked knows why"
        size = self.nodes[leaf].end
        provenance = np.zeros(size, np.uint8)
        mask = np.zeros(size, np.uint8)
        reason = np.full(size, MaskReason.OBSERVED, np.uint8)
        logprobs = np.zeros(size, np.float32)
        versions = np.full(size, -1, np.int32)
        requests = np.full(size, -1, np.int32)
        request_ids: dict[str, int] = {}
        for index, node in zip(self.path(leaf), path, strict=True):
            if node.provenance is Provenance.OBSERVED:
                continue
            here = slice(node.start, node.end)
            fresh = index not in trained
            trained.add(index)
            provenance[here] = node.provenance
            mask[here] = fresh
            reason[here] = MaskReason.NONE if fresh else MaskReason.SHARED
            if node.provenance is Provenance.SAMPLED:
                logprobs[here] = node.logprobs
                versions[here] = node.versions
                requests[here] = request_ids.setdefault(node.request_id, len(request_ids))
        token_ids = np.concatenate([node.token_ids for node in path])
        ids = tuple(request_ids)
        return Row(key, token_ids, provenance, mask, reason, logprobs, versions, requests, ids, fork, self.temperature)


def node_to_dict(node: Node) -> dict[str, Any]:
    """Return a node as JSON-able data."""
    return {
        "parent": node.parent,
        "end": node.end,
        "provenance": int(node.provenance),
        "token_ids": node.token_ids.tolist(),
        "logprobs": node.logprobs.tolist(),
        "versions": node.versions.tolist(),
        "request_id": node.request_id,
        "branch": list(node.branch),
        "fork": node.fork and node.fork.value,
    }


def node_from_dict(data: dict[str, Any]) -> Node:
    """Return what `node_to_dict` was given."""
    return Node(
        data["parent"],
        data["end"],
        Provenance(data["provenance"]),
        np.array(data["token_ids"], np.int32),
        np.array(data["logprobs"], np.float32),
        np.array(data["versions"], np.int32),
        data["request_id"],
        tuple(data["branch"]),
        ForkReason(data["fork"]) if data["fork"] else None,
    )


def common_prefix(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Return how many values two arrays begin with alike."""
    size = min(len(left), len(right))
    different = left[:size] != right[:size]
    return int(different.argmax()) if different.any() else size
