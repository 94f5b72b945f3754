"""An agent on OpenAI's Agents SDK with a shell, for ``rollout.agent.harness=openai_agents``; the prompt is the standard input."""

import asyncio
import os
import sys

import agents

_OUTPUT_CHARACTERS = 20_000


async def shell(command: str) -> str:
    """Run a command in bash and return its output.

    Args:
        command: The command.
    """
    process = await asyncio.create_subprocess_exec(
        "bash",
        "-c",
        command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode(errors="replace")
    if len(output) > _OUTPUT_CHARACTERS:
        half = _OUTPUT_CHARACTERS // 2
        output = f"{output[:half]}\n[{len(output) - 2 * half} characters are left out]\n{output[-half:]}"
    return output if process.returncode == 0 else f"{output}\nexit status {process.returncode}"


def main() -> None:
    """Answer the prompt."""
    agent = agents.Agent(
        name="agent",
        instructions="You solve tasks with a shell. Commands run in the current folder.",
        model=os.environ["OPENAI_MODEL"],
        tools=[agents.function_tool(shell)],
    )
    # The run's limits end the episode.
    agents.Runner.run_sync(agent, sys.stdin.read(), max_turns=sys.maxsize)


if __name__ == "__main__":
    main()
