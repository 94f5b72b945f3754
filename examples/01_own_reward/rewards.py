"""A reward function for the first action of an episode."""

import re

from agentrl import Sample

MOVE = re.compile(r"<think> (?P<thought>[^<]*) </think><search> (?P<name>[^<]*) </search>")


def first_move(sample: Sample) -> dict[str, float]:
    """Half a point for searching for the name in the question, half for thinking of the fact to look up first.

    ``reward.key=score`` selects the reward; the other values are logged as metrics.
    """
    move = MOVE.match(sample.final)
    name = float(move is not None and move["name"] == sample.label)
    thought = float(move is not None and move["thought"] == sample.metadata["first"])
    return {"score": (name + thought) / 2, "right_name": name, "right_thought": thought}
