"""Write documents.jsonl, train.jsonl and eval.jsonl: replace them by your own."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from random import Random

from agentrl_tasks.multihop.world import World

FOLDER = Path(__file__).parent


def write(name: str, rows: Iterable[Mapping[str, object]]) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def questions(world: World, name: str, count: int) -> Iterable[Mapping[str, object]]:
    rng = Random(name)
    for i in range(count):
        question = world.question(rng, hops=1 + i % 2)
        yield {"id": f"{name}-{i}", "question": question.text, "golden_answers": [question.answer]}


def documents(world: World) -> list[str]:
    return [f'"{document.title}"\n{document.text}' for document in world.documents]


if __name__ == "__main__":
    train, held_out = World(5, held_out=False, scale=0.2), World(5, held_out=True, scale=0.1)
    contents = documents(train) + documents(held_out)
    write("documents.jsonl", ({"id": str(i), "contents": text} for i, text in enumerate(contents)))
    write("train.jsonl", questions(train, "train", 256))
    write("eval.jsonl", questions(held_out, "eval", 96))
