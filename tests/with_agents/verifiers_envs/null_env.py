"""A taskset of verifiers without an agent of its own: verifiers' harness plays it, as a program of its own."""

import verifiers.v1 as vf
from single_turn_env import NumberData, NumberTask


class PlainTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for number in range(8):
            yield NumberTask(NumberData(prompt=f"Say {number}.", answer=str(number)), self.config.task)


__all__ = ["PlainTaskset"]
