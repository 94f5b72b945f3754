"""Write train.jsonl and eval.jsonl: questions, the pages that answer them, and the answer."""

import json
from pathlib import Path
from random import Random
from typing import Any

FOLDER = Path(__file__).parent
LINKS = {"employer": "works for", "founder": "was founded by", "seat": "is based in", "mayor": "is governed by"}
TRAILS = (("employer", "seat"), ("employer", "founder"), ("seat", "mayor"))
ENDINGS = {"employer": "corp", "seat": "burg"}


def make_name(rng: Random, link: str) -> str:
    words = ["".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeo") for _ in range(2)).capitalize() for _ in range(2)]
    return words[0] + ENDINGS[link] if link in ENDINGS else " ".join(words)


def make_row(rng: Random, links: tuple[str, str]) -> dict[str, Any]:
    names = [make_name(rng, "employer" if links[0] == "seat" else "person"), *(make_name(rng, link) for link in links)]
    question = f"What is the {links[1]} of the {links[0]} of {names[0]}?"
    pages = {names[at]: f"{names[at]} {LINKS[link]} {names[at + 1]}." for at, link in enumerate(links)}
    return {"prompt": question, "answer": names[-1], "facts": {"pages": pages}}


if __name__ == "__main__":
    for name, count in (("train.jsonl", 256), ("eval.jsonl", 96)):
        rng = Random(name)
        rows = (make_row(rng, TRAILS[index % len(TRAILS)]) for index in range(count))
        (FOLDER / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
