"""Counts of words that are to be replaced, as Markdown tables: ``python -m tests.structure.words [[NAME=]FOLDER …]``.

Several trees are printed next to each other. Code is the whole text of the Python files under agentrl, envs, tools and
tasks: identifiers (``make_way`` and ``MakeWay`` count as "make way"), docstrings, comments and other strings. Docs are
all Markdown files.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

CODE_FOLDERS = ("agentrl", "benchmarks", "envs", "tools", "tasks")
EMPTY_DOCSTRING_WORDS = 3

PHRASES = {
    "figures": "figures",
    "turns (of a GPU)": "(?:in|by|take|takes|taking|taken|took) turns",
    "make way": "(?:make|makes|making|made) way",
    "away": "away",
    "asleep": "asleep",
    "follow, send, bring weights": r"(?:follow|send|bring)(?:s|ing)? (?:(?:the|its|all|new) )?(?:\w+'s )?(?:new )?weights",
    "flight": "flights?",
    "lane": "lanes?",
    "room": "rooms?",
    "seat": "seats?",
    "asked": "asked",
    "told": "told",
    "hears": "hears?",
    "says": "says",
    "somebody": "somebody",
    "nobody": "nobody",
    "whoever": "whoever",
    "anew": "anew",
    "of its own": "of (?:its|their) own",
    "one that": "one that",
    "by which": "by which",
    "beside": "beside",
}
ORDINARY = {"part": "parts?", "where": "where", "source": "sources?", "show": "shows?", "control": "controls?"}
"""Ordinary English or a term of the field in most places: only some of these are meant."""

IDENTIFIERS = {"figures": "figures", "part": "parts?", "follow": "follow(?:s|ed)?", "asked": "asked", "away": "away"}
MODULES = frozenset({"source", "stack", "session", "collect", "choice", "show", "control"})


def source_files(tree: Path) -> list[Path]:
    """Python files that users of a source tree read."""
    return sorted(path for folder in CODE_FOLDERS for path in (tree / folder).rglob("*.py"))


def pages(tree: Path) -> list[Path]:
    """Markdown pages of a source tree, hidden folders apart."""
    paths = tree.rglob("*.md")
    return sorted(path for path in paths if not any(name.startswith(".") for name in path.relative_to(tree).parts))


def split_words(text: str) -> str:
    """A text on one line: identifiers split at underscores and capitals, comment signs taken out."""
    text = re.sub(r"^\s*#+|_|(?<=[a-z0-9])(?=[A-Z])", " ", text, flags=re.MULTILINE)
    return re.sub(r"\s+", " ", text)


def count(pattern: str, text: str) -> int:
    """How often a phrase is in a text as whole words, in any case."""
    return len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))


def identifiers(source: str) -> str:
    """All names in a Python source, one a line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return "\n".join(token.string for token in tokens if token.type == tokenize.NAME)


def short_docstrings(source: str) -> Iterator[str]:
    """Docstrings of three words or fewer."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text.split()) <= EMPTY_DOCSTRING_WORDS:
                yield text


def counts(tree: Path) -> dict[str, tuple[int, int | None]]:
    """For each row of the table, its counts in code and in docs (None if it has no meaning there)."""
    files = source_files(tree)
    sources = [path.read_text() for path in files]
    code, docs = (split_words("\n".join(texts)) for texts in (sources, [page.read_text() for page in pages(tree)]))
    names = "\n".join(map(split_words, identifiers("\n".join(sources)).split("\n")))
    rows: dict[str, tuple[int, int | None]] = {}
    rows |= {phrase: (count(pattern, code), count(pattern, docs)) for phrase, pattern in PHRASES.items()}
    rows["all of these"] = sum(row[0] for row in rows.values()), sum(row[1] or 0 for row in rows.values())
    rows["docstrings of three words or fewer"] = sum(len([*short_docstrings(source)]) for source in sources), None
    rows["modules named " + ", ".join(sorted(MODULES))] = sum(path.stem in MODULES for path in files), None
    rows |= {f"identifiers with {word}": (count(pattern, names), None) for word, pattern in IDENTIFIERS.items()}
    rows |= {f"{word} (mostly ordinary)": (count(one, code), count(one, docs)) for word, one in ORDINARY.items()}
    return rows


def main(arguments: list[str]) -> None:
    """Print one table with a column for the code and one for the docs of each tree."""
    trees = [argument.rpartition("=") for argument in arguments or ["."]]
    columns = [counts(Path(folder)) for _, _, folder in trees]
    titles = [
        f"{name or Path(folder).resolve().name}: {kind}" for name, _, folder in trees for kind in ("code", "docs")
    ]
    print(f"| | {' | '.join(titles)} |\n|{' --- |' * (len(titles) + 1)}")
    for row in columns[0]:
        cells = ["" if cell is None else str(cell) for column in columns for cell in column[row]]
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1:])
