"""An environment of verifiers with two turns: the user asks again, and the reward is for the second answer."""

import verifiers.v1 as vf
from chat_loop import ChatLoop
from single_turn_env import NumberTask, NumberTaskset


class AskAgainConfig(vf.EnvConfig):
    speaker: vf.AgentConfig = vf.AgentConfig()


class AskAgainEnv(vf.Env[AskAgainConfig]):
    async def run(self, task: NumberTask, agents: vf.Agents) -> None:
        async with agents.speaker.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("And again?")


class AskAgainTaskset(NumberTaskset):
    pass


__all__ = ["AskAgainEnv", "AskAgainTaskset", "ChatLoop"]
