"""An application that is the agent of a run of ``examples/09_agent_program``, whose questions it knows.

``page_application.py URL THREADS [halt]`` runs in the folder of the example. Each thread plays episodes until the run is over;
with ``halt`` it plays one turn, says so, and does nothing from there on.
"""

import json
import re
import sys
import threading
import time
from pathlib import Path

import httpx

from agentrl.gateway.client import AgentClient, AgentSession

TURNS = 4
ANSWERS = {
    question["prompt"]: question["answer"]
    for name in ("train.jsonl", "eval.jsonl")
    for question in map(json.loads, Path(name).read_text().splitlines())
}


def ask(session: AgentSession, messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the policy's next message."""
    body = {"model": session.model, "messages": messages, "stop": ["</search>", "</answer>"]}
    response = httpx.post(f"{session.session_url}/chat/completions", json=body, timeout=120, verify=False)
    response.raise_for_status()
    message: dict[str, str] = response.json()["choices"][0]["message"]
    return message


def play(session: AgentSession, *, halts: bool) -> None:
    """Search until the policy answers, and give the reward: a quarter for each page, half for the right answer."""
    facts, question = session.task["metadata"], session.task["prompt"][-1]["content"]
    messages, searches, answer = [{"role": "user", "content": session.prompt}], [], ""
    for _ in range(TURNS):
        message = ask(session, messages)
        if halts:
            print(session.id, flush=True)
            time.sleep(10_000)
        move = re.search(r"<(search|answer)> *([^<]*)", message["content"])
        if move is None or move[1] == "answer":
            answer = move[2].strip() if move else ""
            break
        searches.append(move[2].strip())
        page = facts["pages"].get(searches[-1], "There is no such page.")
        messages += [message, {"role": "user", "content": f"<information>{page}</information>"}]
    pages = sum(page in searches for page in facts["pages"])
    right = float(answer == ANSWERS[question])
    session.end(pages / 4 + right / 2, metrics={"pages": float(pages), "right": right})


def play_all(client: AgentClient, *, halts: bool) -> None:
    """Play episodes until the run is over."""
    while (session := client.start()) is not None:
        try:
            with session:
                play(session, halts=halts)
        except httpx.HTTPError as error:  # the run was killed, or has ended the session
            print(session.id, error, file=sys.stderr)


def main() -> None:
    """Play with several threads."""
    client = AgentClient(sys.argv[1], patience_s=240)
    words = {"halts": sys.argv[3:] == ["halt"]}
    threads = [threading.Thread(target=play_all, args=(client,), kwargs=words) for _ in range(int(sys.argv[2]))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
