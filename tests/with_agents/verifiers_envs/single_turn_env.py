"""A taskset of verifiers: say a number. Its agent is a chat loop in the worker's process."""

import verifiers.v1 as vf
from chat_loop import ChatLoop


class NumberData(vf.TaskData):
    answer: str


class NumberTask(vf.Task[NumberData]):
    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        if "boom" in trace.last_reply:
            raise RuntimeError("the reward function broke")
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class NumberTaskset(vf.Taskset[NumberTask, vf.TasksetConfig]):
    def load(self):
        for number in range(70):
            yield NumberTask(NumberData(prompt=f"Say {number}.", answer=str(number)), self.config.task)


__all__ = ["ChatLoop", "NumberTaskset"]
