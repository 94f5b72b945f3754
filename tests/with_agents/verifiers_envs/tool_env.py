"""A taskset of verifiers with a tool, which verifiers serves over MCP."""

import verifiers.v1 as vf
from chat_loop import ChatLoop
from single_turn_env import NumberData, NumberTask


class AddToolset(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, a: int, b: int) -> str:
        """Add two numbers."""
        return str(a + b)


class AddTask(NumberTask):
    @classmethod
    def toolsets(cls, config):
        return [AddToolset(vf.ToolsetConfig())]


class AddTaskset(vf.Taskset[AddTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield AddTask(NumberData(prompt=f"Add {number} and 40.", answer=str(number + 40)), self.config.task)


__all__ = ["AddTaskset", "ChatLoop"]

if __name__ == "__main__":  # in the process of the tool server
    AddToolset.run()
