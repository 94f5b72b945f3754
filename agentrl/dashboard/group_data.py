"""The rollouts of a group for the view that `agentrl.obs.viewer` draws: their index, and the packed tokens of each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout
from agentrl.dashboard.rollout_index import FileKey
from agentrl.dashboard.runs import DashboardRun
from agentrl.dashboard.tool_calls import rollout_calls
from agentrl.obs.rollout_headers import read_rollout
from agentrl.obs.rollouts import read_advantages
from agentrl.obs.viewer.page import vocabulary_data
from agentrl.obs.viewer.page_data import Index, Vocabulary, finite, pack_rollout
from agentrl.obs.viewer.run_files import Entry


class TokenIds(Vocabulary):
    """A vocabulary whose numbers are the tokenizer's ids: rollouts are compared though each comes with its own texts."""

    def number(self, ids_T: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return the ids, ``[T]``."""
        super().number(ids_T)
        return ids_T.astype(np.uint32)


def group_index(run: DashboardRun, key: FileKey, prompt_id: str) -> dict[str, object]:
    """Return the index of a group's rollouts (see `Index.data`), and where each is in its file.

    Returns:
        The index, with ``places``: ``[[start, end], …]``, and ``damaged``: ids of rollouts whose checksum is wrong.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = run.rollouts.path(key)
    advantages = read_advantages(path.parent, key.step) if key.kind == "train" else {}
    index, places, damaged = Index(), [], []
    for start, end in run.rollouts.starts_of_group(key, prompt_id):
        scan = read_rollout(path, start, end)
        if isinstance(scan.rollout, Rollout):
            index.add(Entry(key.step, scan.rollout, advantages.get(scan.rollout.rollout_id)), 0)
            places.append((start, end))
            damaged += [scan.rollout.rollout_id] if scan.damaged else []
    data: dict[str, object] = finite({**index.data(), "places": places, "damaged": damaged})
    return data


def rollout_tokens(run: DashboardRun, key: FileKey, start: int, end: int) -> tuple[bytes, dict[str, object]]:
    """Return a rollout's packed tokens (see `pack_rollout`), and the texts of its tokens.

    Raises:
        ConfigError: the file cannot be read, or has no rollout there.
    """
    scan = read_rollout(run.rollouts.path(key), start, end)
    if isinstance(scan.rollout, str):
        raise ConfigError(f"step {key.step}, byte {start}: {scan.rollout}")
    vocabulary = TokenIds()
    packed = pack_rollout(scan.rollout, vocabulary, with_images=True)
    return packed, vocabulary_data(vocabulary.ids, run.decode())


def read_calls(run: DashboardRun, key: FileKey, start: int, end: int) -> dict[str, object]:
    """Return the tool calls of a rollout, or in ``why`` the reason why they are not known.

    Returns:
        ``{"calls": [{"row", "turn", "name", "arguments", "fault"}], "why"}``; turns of a row are counted from 1.

    Raises:
        ConfigError: the file cannot be read, or has no rollout there.
    """
    rollout = read_rollout(run.rollouts.path(key), start, end).rollout
    if isinstance(rollout, str):
        raise ConfigError(f"step {key.step}, byte {start}: {rollout}")
    chat_format = run.chat_format()
    if isinstance(chat_format, str):
        return {"calls": [], "why": chat_format}
    return {"calls": rollout_calls(rollout, chat_format), "why": ""}
