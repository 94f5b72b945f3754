"""Write train.jsonl and eval.jsonl: questions, the name in each, and the fact to look up first."""

import json
from pathlib import Path
from random import Random

from agentrl_tasks.multihop.world import World

FOLDER = Path(__file__).parent


def write(name: str, world: World, count: int) -> None:
    rng = Random(name)
    questions = [world.question(rng, hops=1 + i % 3) for i in range(count)]
    rows = (
        {"prompt": f"Question: {question.text}\n", "name": question.path[0], "facts": {"first": question.relations[0]}}
        for question in questions
    )
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write("train.jsonl", World(11, held_out=False), 256)
    write("eval.jsonl", World(11, held_out=True), 96)
