"""A player that is started for each of its moves: it prints the answer of a model to its standard input.

Nothing in it is of agentrl.
"""

import json
import os
import sys
import urllib.request

body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": sys.stdin.read()}]}
request = urllib.request.Request(
    f"{os.environ['OPENAI_BASE_URL']}/chat/completions",
    json.dumps(body).encode(),
    {"authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "content-type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    sys.stdout.write(json.load(response)["choices"][0]["message"]["content"])
