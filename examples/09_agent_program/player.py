"""A player that is started once a game: it requests what it reads, asks the model, and posts its moves.

It knows an endpoint of OpenAI, and two requests of the gateway; it needs the standard library alone.
"""

import json
import os
import urllib.request
from typing import Any


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to a request."""
    headers = {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def ask(messages: list[dict[str, str]]) -> str:
    """Return the text of the model's next message."""
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages}
    reply = post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body)
    text: str = reply["choices"][0]["message"]["content"]
    return text


def main() -> None:
    """Play until the game is over."""
    session = f"{os.environ['AGENTRL_SESSION_URL']}/session"
    while not (observation := post(f"{session}/observe", {"wait_s": 30}))["over"]:
        if observation["turn"] is not None:  # else it was another player's turn for 30 seconds
            move = ask(observation["messages"])
            post(f"{session}/move", {"turn": observation["turn"], "text": move})


if __name__ == "__main__":
    main()
