"""A reward function: what a good first move is worth."""

import re

from agentrl import Sample

MOVE = re.compile(r"<think> (?P<thought>[^<]*) </think><search> (?P<name>[^<]*) </search>")


def first_move(sample: Sample) -> dict[str, float]:
    """Half for searching for whom the question names, half for thinking of the fact to find out first.

    ``reward.key=score`` makes one of the figures the reward; the others are logged.
    """
    said = MOVE.match(sample.final)
    name = float(said is not None and said["name"] == sample.label)
    thought = float(said is not None and said["thought"] == sample.metadata["first"])
    return {"score": (name + thought) / 2, "right_name": name, "right_thought": thought}
