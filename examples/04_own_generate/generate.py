"""A generate function: the policy answers one small question after another, each in a separate chat."""

import re

from agentrl_envs.search_r1.protocol import PROMPT, STOP, documents, information, parse

from agentrl import Agent, Chat, Message, Rollout, Task, ToolStatus, uses_tools


@uses_tools("search")
async def generate(task: Task, agent: Agent) -> list[Rollout]:
    """Split "What is the mayor of the birthplace of X?": first the birthplace of X, then the mayor of that city.

    Every chat becomes a rollout. All of them have the reward of the last answer.
    """
    name = task.question.rpartition(" of ")[2].removesuffix("?")
    facts = re.findall(r"the (\w+) of", task.question)
    chats: list[Chat] = []
    answer: str | None = None
    for fact in reversed(facts):
        question = f"What is the {fact} of {name}?"
        chat = agent.chat([Message("user", PROMPT.replace("{question}", question))])
        chats.append(chat)
        answer = await answer_by_searching(chat, agent, task.metadata["corpus"])
        if answer is None:
            break
        name = answer
    right = float(answer is not None and [answer] == task.answer)
    return [chat.rollout(right, metrics={"right": right, "chats": float(len(chats))}) for chat in chats]


async def answer_by_searching(chat: Chat, agent: Agent, corpus: str) -> str | None:
    """Return the policy's answer, or None if a limit of ``rollout`` or a turn without a tag ends the chat."""
    while (turn := await chat.sample(stop=STOP)) is not None:
        move = parse(turn.content)
        if move.kind == "answer":
            return move.text
        if move.kind == "invalid":
            return None
        reply = await agent.call("search", {"query": move.text, "topk": 2, "corpus": corpus})
        text = documents(reply.data) if reply.status is ToolStatus.OK else reply.content
        # Added messages are not trained on; the chat records which tokens were sampled.
        chat.add(Message("user", information(text), inline=True))
    return None
