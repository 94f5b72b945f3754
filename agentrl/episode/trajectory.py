"""Token-level record of an episode: a graph of token runs, and the trajectories that grow it.

A node of the graph holds only the tokens it adds to its parent, all of one provenance and, if sampled, of one request.
A prompt that starts like an earlier one reuses its nodes by the longest common *token* prefix and forks at the first
difference; recorded tokens are never changed. Each leaf is one training row. A sampled node that several leaves share is
trained in the first of their rows.

Token layout of a row of two turns (``p`` prompt, ``a b`` sampled, ``o`` observation), with its loss mask below::

    p p p a a a o o o b b
    0 0 0 1 1 1 0 0 0 1 1
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core import experts
from agentrl.core.errors import SamplerError
from agentrl.core.experts import Experts, unknown_expert_mask, unknown_experts
from agentrl.core.images import Image, ImageSpan, PlacedImage
from agentrl.core.sampling_support import SamplingSupport, concatenate_supports, decode_support, encode_support
from agentrl.core.types import ForkReason, Generation, MaskReason, Provenance, Row, RowKey

_ROOT = -1
"""Parent of the first nodes."""
_INT32 = 2**31
_LOWEST = float(np.finfo(np.float32).min)


@dataclass(slots=True, eq=False)
class _Node:
    """``n`` tokens that follow those of another node; the last two arrays are empty unless the tokens were sampled."""

    parent: int
    """Index of the preceding node; -1 at a root."""
    end: int
    """Tokens from the root to the end of this node."""
    provenance: Provenance
    """Provenance of all its tokens."""
    token_ids: NDArray[np.int32]
    """``[n]``, at least one."""
    logprobs: NDArray[np.float32]
    """``[n]`` at the sampling temperature."""
    versions: NDArray[np.int32]
    """``[n]`` policy version that sampled each token."""
    request_id: str = ""
    """The request that sampled the tokens."""
    turn: int = -1
    """Number of earlier turns of the conversation that sampled them."""
    branch: tuple[int, ...] = ()
    """The conversation that added them: ``()`` is the first, ``(2, 0)`` the first branch of its third branch."""
    fork: ForkReason | None = None
    """Reason for the last fork of that conversation; None before the first."""
    experts: Experts | None = None
    """``[n, layers, K]``, as in `Row`."""
    support: SamplingSupport | None = None
    """Sampling support of the ``n`` tokens, as in `Row`."""
    images: tuple[ImageSpan, ...] = ()
    """Images whose tokens are here, counted from the root."""

    @property
    def start(self) -> int:
        """Tokens before this node."""
        return self.end - len(self.token_ids)


@dataclass(slots=True, eq=False)
class _TokenGraph:
    """All tokens of one episode. Adding or splitting nodes changes neither a node's index nor its end."""

    nodes: list[_Node] = field(default_factory=list)
    temperature: float = 1.0
    """Sampling temperature of all its tokens."""
    children: dict[int, list[int]] = field(default_factory=dict)
    """Indices by parent."""
    images: dict[str, Image] = field(default_factory=dict)
    """Images of its tokens by digest."""

    def add(self, node: _Node) -> int:
        """Add a node and return its index."""
        self.nodes.append(node)
        self.children.setdefault(node.parent, []).append(len(self.nodes) - 1)
        return len(self.nodes) - 1

    def walk(self, tip: int, token_ids: Sequence[int], images: Sequence[ImageSpan] = ()) -> tuple[int, int]:
        """Match tokens from a node on; return the node where the match ends and the number of tokens matched.

        A match that ends within a node splits it. The tokens of two images may be equal: a match ends before an image that
        is not the same.

        Args:
            tip: the node.
            token_ids: tokens that follow it.
            images: those of these tokens, counted from the root.
        """
        if tip not in self.children:
            return tip, 0
        new_ids, matched = np.array(token_ids, np.int32), 0
        while True:
            best, common = _ROOT, 0
            for child in self.children.get(tip, ()):
                node = self.nodes[child]
                same = _common_prefix(node.token_ids, new_ids[matched:])
                same = min(same, _first_other_image(node.images, images, node.start, node.end) - node.start)
                if same > common:
                    best, common = child, same
            if best == _ROOT:
                return tip, matched
            matched += common
            if common < len(self.nodes[best].token_ids):
                return self._split(best, common), matched
            tip = best

    def path(self, tip: int) -> list[int]:
        """Return the indices of the nodes from the root to a node."""
        path: list[int] = []
        while tip != _ROOT:
            path.append(tip)
            tip = self.nodes[tip].parent
        return path[::-1]

    def token_ids(self, tip: int) -> tuple[int, ...]:
        """Return all tokens from the root to the end of a node."""
        return tuple(token for index in self.path(tip) for token in self.nodes[index].token_ids.tolist())

    def rows(self) -> list[tuple[int, ForkReason | None]]:
        """Return each leaf with the reason for its row's fork, in the order in which the rows were begun.

        A node belongs to the row of its first child that a conversation continued, so a row that a conversation returns
        to stays where it was begun.
        """
        in_order = sorted(range(len(self.nodes)), key=lambda index: (self.nodes[index].branch, index))
        first: dict[int, int] = {}  # position in that order of the first node at or below a node
        for position, index in enumerate(in_order):
            while index != _ROOT and index not in first:
                first[index] = position
                index = self.nodes[index].parent
        rows: list[tuple[int, ForkReason | None]] = []
        covered: set[int] = set()
        for index in in_order:
            if index in covered:
                continue
            leaf = index
            while leaf in self.children:
                leaf = min(self.children[leaf], key=lambda child: first[child])
            covered.update(self.path(leaf))
            rows.append((leaf, self.nodes[index].fork))
        return rows

    def experts(self, path: Sequence[int]) -> Experts | None:
        """Return the experts of the tokens of a path; None if none are known."""
        nodes = [self.nodes[index] for index in path]
        return experts.concatenate([node.experts for node in nodes], [len(node.token_ids) for node in nodes])

    def support(self, path: Sequence[int]) -> SamplingSupport | None:
        """Return the sampling support of the tokens of a path; None if none is known."""
        nodes = [self.nodes[index] for index in path]
        return concatenate_supports([node.support for node in nodes], [len(node.token_ids) for node in nodes])

    def route(self, tip: int, start: int, routed: Experts) -> None:
        """Record the experts of the tokens from ``start`` on of the path to a node; those that are known stay."""
        for index in reversed(self.path(tip)):
            node = self.nodes[index]
            if node.end <= start:
                break
            first = max(start, node.start)
            node_experts = routed[first - start : node.end - start]
            if node.experts is None:
                node.experts = unknown_experts(len(node.token_ids), routed)
            experts.fill(node.experts[first - node.start :][: len(node_experts)], node_experts)

    def _split(self, index: int, size: int) -> int:
        """Split a node after ``size`` tokens and return the new node that holds them; the other tokens stay at ``index``."""
        node = self.nodes[index]
        siblings = self.children[node.parent]
        siblings.remove(index)
        head = _Node(node.parent, node.start + size, node.provenance, node.token_ids[:size], node.logprobs[:size],
                     node.versions[:size], node.request_id, node.turn, node.branch, node.fork)  # fmt: skip
        if node.experts is not None:
            head.experts, node.experts = node.experts[:size], node.experts[size:]
        if node.support is not None:
            head.support, node.support = node.support.slice(0, size), node.support.slice(size, len(node.support))
        head.images = tuple(span for span in node.images if span.start < head.end)
        node.images = node.images[len(head.images) :]
        node.parent = self.add(head)
        node.token_ids, node.logprobs, node.versions = node.token_ids[size:], node.logprobs[size:], node.versions[size:]
        self.children[node.parent] = [index]
        return node.parent


class Trajectory:
    """Tokens of one conversation: a path through the token graph of its episode, extended at its tip.

    Other conversations of the episode (`branch`) extend the same graph, each at its own tip, in any order.
    """

    def __init__(self) -> None:
        self.branches: list[Trajectory] = []
        """Trajectories that `branch` returned, in order."""
        self.mask_reason = MaskReason.NONE
        """Why the samples of this conversation are not trained; ``NONE`` if they are."""
        self._graph = _TokenGraph()
        self._name: tuple[int, ...] = ()
        self._tip = _ROOT
        self._fork: ForkReason | None = None
        self._turns = 0  # that this conversation has sampled
        # Tokens up to the tip, in two parts: joining them costs a copy, which grows with the episode.
        self._before: tuple[int, ...] = ()
        self._since: tuple[int, ...] = ()

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens from the root to the tip."""
        return self._before + self._since

    @property
    def temperature(self) -> float:
        """Sampling temperature of the episode."""
        return self._graph.temperature

    @temperature.setter
    def temperature(self, value: float) -> None:
        if value != self.temperature and self.sampled_tokens:
            raise ValueError(
                f"what was sampled at temperature {self.temperature:g} cannot continue at {value:g}: a row has one temperature; "
                f"set sampler.temperature={self.temperature:g}"
            )
        self._graph.temperature = value

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy sampled in the episode; shared ones count once."""
        return sum(len(node.token_ids) for node in self._graph.nodes if node.provenance is Provenance.SAMPLED)

    @property
    def branch_name(self) -> tuple[int, ...]:
        """Position of the conversation in the episode: ``()`` is the first, ``(2, 0)`` the first branch of its third branch."""
        return self._name

    @property
    def tip(self) -> int:
        """Where the conversation is in the graph, for `branch`; stays valid when the conversation continues."""
        return self._tip

    def branch(self, tip: int | None = None, fork: ForkReason = ForkReason.BRANCH) -> Trajectory:
        """Return a trajectory of another conversation of the episode that starts at ``tip``, by default this one's.

        Args:
            tip: where it starts, see `tip`.
            fork: the reason of its rows.
        """
        trajectory = Trajectory()
        trajectory._graph, trajectory._tip = self._graph, self._tip if tip is None else tip
        if tip is None:
            trajectory._before, trajectory._since = self._before, self._since
        else:
            trajectory._before = self._graph.token_ids(tip)
        trajectory._name, trajectory._fork = (*self._name, len(self.branches)), fork
        self.branches.append(trajectory)
        return trajectory

    def append_demonstrated(self, token_ids: Sequence[int]) -> None:
        """Add tokens of a scripted expert. Their mask is 1; only supervised fine-tuning accepts them."""
        if len(token_ids):
            self._extend(Provenance.DEMONSTRATED, len(token_ids)).token_ids[:] = token_ids
            self._since += tuple(token_ids)

    @property
    def routed_tokens(self) -> int:
        """Tokens from the root on whose experts are known: the first whose experts an engine has to return."""
        for index in self._graph.path(self._tip):
            node = self._graph.nodes[index]
            if node.experts is None:
                return node.start
            unknown_tokens = unknown_expert_mask(node.experts)
            if unknown_tokens.any():
                return node.start + int(unknown_tokens.argmax())
        return len(self.token_ids)

    def append_sampled(self, generation: Generation) -> None:
        """Add the tokens of a generation; a generation aborted before its first token adds nothing.

        The same tokens sampled twice are two samples, and both are trained on.

        Raises:
            SamplerError: ids, log-probabilities, versions or request are inconsistent or impossible.
        """
        fault = _fault(generation)
        if fault is not None:
            raise SamplerError(f"request {generation.request_id!r} returned {fault}")
        turn, self._turns = self._turns, self._turns + 1
        size = len(generation.token_ids)
        if size:
            node = self._extend(Provenance.SAMPLED, size)
            node.request_id, node.turn = generation.request_id, turn
            node.token_ids[:], node.logprobs[:] = generation.token_ids, generation.logprobs
            node.support = generation.support
            for start, version in generation.versions:
                node.versions[start:] = version
            self._since += generation.token_ids
            if generation.experts is not None:
                self._graph.route(self._tip, generation.experts_from, generation.experts)

    def placed_images(self, tokens: int | None = None) -> tuple[PlacedImage, ...]:
        """Return the images up to the tip, or of the first ``tokens`` tokens."""
        spans = (span for index in self._graph.path(self._tip) for span in self._graph.nodes[index].images)
        return tuple(
            PlacedImage(span, self._graph.images[span.digest]) for span in spans if tokens is None or span.end <= tokens
        )

    @property
    def images(self) -> Mapping[str, Image]:
        """Images of the episode by digest."""
        return self._graph.images

    def extend_to(
        self,
        prompt_ids: Sequence[int],
        *,
        images: Sequence[PlacedImage] = (),
        added: int | None = None,
        fork: ForkReason | None = None,
    ) -> int:
        """Move the tip to the end of ``prompt_ids`` and return how many of these tokens the graph already had.

        The common prefix keeps its nodes and their provenance; the rest is added as observed. A prompt that does not
        start with all tokens up to the tip forks the graph.

        Args:
            prompt_ids: the whole prompt.
            images: all images of the prompt.
            added: if the prompt is all tokens up to the tip and new ones, the number of new ones: the others are then
                not compared.
            fork: why the prompt was rendered again, for the rows that begin here; ``TEMPLATE`` if None.
        """
        prompt_ids = tuple(prompt_ids)
        middle, known_tokens = len(self._before), len(self._before) + len(self._since)
        assert added is None or added + known_tokens == len(prompt_ids), "added tokens follow the tip"
        spans = [placed.span for placed in images]
        if added is None and (
            prompt_ids[:middle] != self._before
            or prompt_ids[middle:known_tokens] != self._since
            or _spans_before(spans, known_tokens) != [placed.span for placed in self.placed_images()]
        ):
            self._tip, known_tokens, self._fork = _ROOT, 0, fork or ForkReason.TEMPLATE
        self._tip, more = self._graph.walk(self._tip, prompt_ids[known_tokens:], spans)
        known_tokens += more
        if known_tokens < len(prompt_ids):
            node = self._extend(Provenance.OBSERVED, len(prompt_ids) - known_tokens)
            node.token_ids[:] = prompt_ids[known_tokens:]
            node.images = tuple(span for span in spans if span.start >= known_tokens)
            self._graph.images.update({placed.image.digest: placed.image for placed in images})
        self._before, self._since = prompt_ids, ()
        return known_tokens

    def rows(self, prompt_id: str, rollout_id: str, agent_id: str = "main") -> list[Row]:
        """Return the episode's rows, one for each leaf of its graph; none if there is nothing to train on.

        The rows of this conversation come first, in the order in which they were begun, then those of its branches. All
        but the first have a fork reason. A sampled token is trained in the first row that contains it, unless its conversation
        has a `mask_reason`.
        """
        nodes, first_turns = self._graph.nodes, self._first_turns()
        masks = {trajectory._name: trajectory.mask_reason for trajectory in self._conversations()}
        rows: list[Row] = []
        trained: set[int] = set()
        for number, (leaf, row_fork) in enumerate(self._graph.rows()):
            fork = row_fork if number else None
            assert fork is not None or number == 0, "a conversation that has forked has a reason"
            path, size = self._graph.path(leaf), nodes[leaf].end
            token_ids = np.concatenate([nodes[index].token_ids for index in path])
            provenance, mask = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            reason = np.full(size, MaskReason.OBSERVED, np.uint8)
            logprobs = np.zeros(size, np.float32)
            versions, requests = np.full(size, -1, np.int32), np.full(size, -1, np.int32)
            request_ids: dict[str, int] = {}
            turns: dict[str, int] = {}
            for index in path:
                node = nodes[index]
                if node.provenance is Provenance.OBSERVED:
                    continue
                span = slice(node.start, node.end)
                fresh = index not in trained
                trained.add(index)
                reason[span] = masks[node.branch] if fresh else MaskReason.SHARED
                provenance[span], mask[span] = node.provenance, reason[span] == MaskReason.NONE
                if node.provenance is Provenance.SAMPLED:
                    logprobs[span], versions[span] = node.logprobs, node.versions
                    requests[span] = request_ids.setdefault(node.request_id, len(request_ids))
                    turns[node.request_id] = first_turns[node.branch] + node.turn
            key = RowKey(prompt_id, rollout_id, agent_id, number)
            row = Row(key, token_ids, provenance, mask, reason, logprobs, versions, requests, tuple(request_ids),
                      tuple(turns.values()), fork, self.temperature, self._graph.experts(path),
                      support=self._graph.support(path),
                      images=tuple(span for index in path for span in nodes[index].images))  # fmt: skip
            rows.append(row)
        return rows if trained else []

    def _first_turns(self) -> dict[tuple[int, ...], int]:
        """Return by conversation the turns of those before it: all of a conversation come before those of its branches."""
        first_turns, turns = {}, 0
        for trajectory in self._conversations():
            first_turns[trajectory._name] = turns
            turns += trajectory._turns
        return first_turns

    def _conversations(self) -> Iterator[Trajectory]:
        yield self
        for branch in self.branches:
            yield from branch._conversations()

    def to_state(self) -> dict[str, Any]:
        """Return the graph and the tips of all conversations as JSON-able data."""
        nodes = [_node_to_dict(node) for node in self._graph.nodes]
        images = {digest: image.data_url for digest, image in self.images.items()}
        return {"nodes": nodes, "temperature": self.temperature, "images": images, **self._tip_to_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Trajectory:
        """Return the trajectory that `to_state` wrote."""
        graph = _TokenGraph(temperature=state["temperature"])
        graph.images = {digest: Image.from_data_url(url) for digest, url in state.get("images", {}).items()}
        for node in state["nodes"]:
            graph.add(_node_from_dict(node))
        return cls._from_tip(graph, state)

    def _tip_to_dict(self) -> dict[str, Any]:
        branches = [branch._tip_to_dict() for branch in self.branches]
        fork = self._fork and self._fork.value
        tip = {"tip": self._tip, "name": list(self._name), "fork": fork, "turns": self._turns}
        return {**tip, "mask": int(self.mask_reason), "branches": branches}

    @classmethod
    def _from_tip(cls, graph: _TokenGraph, tip: dict[str, Any]) -> Trajectory:
        trajectory = cls()
        trajectory._graph, trajectory._tip, trajectory._name = graph, tip["tip"], tuple(tip["name"])
        trajectory._fork, trajectory._turns = ForkReason(tip["fork"]) if tip["fork"] else None, tip["turns"]
        trajectory.mask_reason = MaskReason(tip["mask"])
        trajectory._before = graph.token_ids(trajectory._tip)
        trajectory.branches = [cls._from_tip(graph, branch) for branch in tip["branches"]]
        return trajectory

    def _extend(self, provenance: Provenance, size: int) -> _Node:
        """Add a node of ``size`` tokens at the tip and return it; the caller fills its arrays."""
        sampled = size if provenance is Provenance.SAMPLED else 0
        end = size if self._tip == _ROOT else self._graph.nodes[self._tip].end + size
        arrays = np.empty(size, np.int32), np.empty(sampled, np.float32), np.empty(sampled, np.int32)
        node = _Node(self._tip, end, provenance, *arrays, branch=self._name, fork=self._fork)
        self._tip = self._graph.add(node)
        return node


def _fault(generation: Generation) -> str | None:
    """Return what makes a generation unfit to be recorded, or None."""
    ids, logprobs, versions = generation.token_ids, generation.logprobs, generation.versions
    if len(logprobs) != len(ids):
        return f"{len(ids)} token ids and {len(logprobs)} log-probabilities"
    if not ids:
        return None
    if generation.support is not None and len(generation.support) != len(ids):
        return f"{len(ids)} token ids and the sampling support of {len(generation.support)}"
    if not generation.request_id:
        return "tokens without a request id"
    if min(ids) < 0 or max(ids) >= _INT32:
        return f"token ids from {min(ids)} to {max(ids)}"
    values = np.array(logprobs, np.float64)
    right = (values >= _LOWEST) & (values <= 0)
    if not right.all():
        return f"a log-probability of {logprobs[right.argmin()]}, not a finite number of at most 0"
    if not versions or versions[0][0] != 0:
        return f"versions {versions}, which do not cover the first token"
    if any(earlier[0] >= later[0] or earlier[1] > later[1] for earlier, later in pairwise(versions)):
        return f"versions {versions} that are not in order"
    if versions[0][1] < 0 or versions[-1][1] >= _INT32:
        return f"versions {versions} that are not policy versions"
    return None


def _node_to_dict(node: _Node) -> dict[str, Any]:
    return {
        "parent": node.parent,
        "end": node.end,
        "provenance": int(node.provenance),
        "token_ids": node.token_ids.tolist(),
        "logprobs": node.logprobs.tolist(),
        "versions": node.versions.tolist(),
        "request_id": node.request_id,
        "turn": node.turn,
        "branch": list(node.branch),
        "fork": node.fork and node.fork.value,
        "experts": experts.to_dict(node.experts),
        "support": encode_support(node.support),
        "images": [[span.start, span.length, span.digest] for span in node.images],
    }


def _node_from_dict(data: dict[str, Any]) -> _Node:
    return _Node(
        data["parent"],
        data["end"],
        Provenance(data["provenance"]),
        np.array(data["token_ids"], np.int32),
        np.array(data["logprobs"], np.float32),
        np.array(data["versions"], np.int32),
        data["request_id"],
        data["turn"],
        tuple(data["branch"]),
        ForkReason(data["fork"]) if data["fork"] else None,
        experts.from_dict(data["experts"]),
        decode_support(data.get("support")),
        tuple(ImageSpan(*span) for span in data.get("images", ())),
    )


def _spans_before(spans: Iterable[ImageSpan], tokens: int) -> list[ImageSpan]:
    """Return the spans that begin in the first ``tokens`` tokens."""
    return [span for span in spans if span.start < tokens]


def _first_other_image(first: Sequence[ImageSpan], second: Sequence[ImageSpan], start: int, end: int) -> int:
    """Return where, from ``start`` to ``end``, an image begins that only one of two sequences of images has; else ``end``."""
    if not first and not second:
        return end
    spans = set(first) ^ {span for span in second if start <= span.start < end}
    return min((span.start for span in spans), default=end)


def _common_prefix(first: NDArray[np.int32], second: NDArray[np.int32]) -> int:
    """Return the number of leading values that two arrays have in common."""
    size = min(len(first), len(second))
    different = first[:size] != second[:size]
    return int(different.argmax()) if different.any() else size
