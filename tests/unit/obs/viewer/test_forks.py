"""Forks of a rollout with several rows, in the terminal and in the page."""

import json
import struct
import zlib

from rich.console import Console

from agentrl.core.types import FinishReason, ForkReason, Generation, Rollout, StopReason
from agentrl.episode.trajectory import Trajectory
from agentrl.obs.viewer.page_data import Vocabulary, pack_rollout
from agentrl.obs.viewer.run_files import Entry
from agentrl.obs.viewer.terminal import rollout_view, tokens_table


def rollout() -> Rollout:
    talk = Trajectory()
    for number, reason in enumerate((None, ForkReason.CONTEXT, ForkReason.THINKING)):
        talk.extend_to([number, 5], fork=reason)
        talk.append_sampled(Generation((7,), (-0.5,), FinishReason.STOP, ((0, 1),), 0, f"r/{number}"))
    return Rollout("t", "r", talk.rows("t", "r"), 0.0, StopReason.TERMINATED, sampled_tokens=3)


def shown(draw: object) -> str:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        console.print(draw)
    return captured.get()


def test_the_terminal_shows_why_rows_fork() -> None:
    entry = Entry(1, rollout())

    def decode(ids: object) -> list[str]:
        return ["x" for _ in ids]

    for text in (shown(rollout_view(entry, decode)), shown(tokens_table(entry, decode))):
        for name in ("main 0", "main 1 · context", "main 2 · thinking"):
            assert name in text, text
    text = shown(rollout_view(entry, decode))
    assert "main 0 ·" not in text


def test_the_page_knows_why_rows_fork() -> None:
    packed = zlib.decompress(pack_rollout(rollout(), Vocabulary()))
    (size,) = struct.unpack("<I", packed[:4])
    header = json.loads(packed[4 : 4 + size])
    assert [row["fork"] for row in header["rows"]] == [None, "context", "thinking"]
