"""An agent that knows only an endpoint of OpenAI: it looks up what the model searches for, and writes the answer to a file.

Nothing in it is of agentrl. The variables are those of every client of OpenAI.
"""

import json
import os
import re
import urllib.request
from pathlib import Path

TURNS = 4


def ask(messages: list[dict[str, str]]) -> dict[str, str]:
    """Return the model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "stop": ["</search>", "</answer>"]}
    request = urllib.request.Request(
        f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
        json.dumps(body).encode(),
        {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        message: dict[str, str] = json.load(response)["choices"][0]["message"]
    return message


def main() -> None:
    """Search until the model answers."""
    pages = json.loads(Path(os.environ["AGENTRL_TASK"]).read_text())["metadata"]["pages"]
    messages = [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]
    for _ in range(TURNS):
        message = ask(messages)
        move = re.search(r"<(search|answer)> *([^<]*)", message["content"])
        if move is None:
            return
        name = move[2].strip()
        if move[1] == "answer":
            Path("answer.txt").write_text(name)
            return
        with Path("searches.txt").open("a") as file:
            file.write(f"{name}\n")
        page = pages.get(name, "There is no such page.")
        messages += [message, {"role": "user", "content": f"<information>{page}</information>"}]


if __name__ == "__main__":
    main()
