"""A rollout in which nothing is wrong.

It has three rows; ``p q`` prompts, ``a b c d`` sampled, ``o u`` observed::

    row 0           p p | a0 a0 a0 | o o | b1 b1
    row 1 context   q   | d3
    row 2 branch    p p | a0 a0 a0 | u   | c2 c2      a0 is shared
"""

from agentrl.core.types import FinishReason, ForkReason, Generation, Rollout, StopReason, Turn
from agentrl.episode.trajectory import Trajectory


def said(ids, request, version=0):
    return Generation(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, ((0, version),), 0, request)


def good(rollout_id="r"):
    main_talk = Trajectory()
    main_talk.extend_to([1, 2])
    main_talk.append_sampled(said([3, 4, 0], "r/0", version=1))
    side = main_talk.branch()
    main_talk.extend_to([1, 2, 3, 4, 0, 7, 7], added=2)
    main_talk.append_sampled(Generation((5, 0), (-0.5, -0.25), FinishReason.STOP, ((0, 1), (1, 2)), 0, "r/1"))
    side.extend_to([1, 2, 3, 4, 0, 8], added=1)
    side.append_sampled(said([6, 0], "r/branch-0/0", version=2))
    main_talk.extend_to([9], fork=ForkReason.CONTEXT)
    main_talk.append_sampled(said([5], "r/2", version=3))
    rows = main_talk.rows("task", rollout_id)
    turns = [Turn(text, "", FinishReason.STOP) for text in ("cd", "e", "e", "f")]
    return Rollout(
        "task",
        rollout_id,
        rows,
        0.5,
        StopReason.TERMINATED,
        turns=turns,
        prompt="ab",
        sampled_tokens=main_talk.sampled_tokens,
    )
