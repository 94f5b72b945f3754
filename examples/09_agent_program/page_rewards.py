"""The reward of what the agent left in its folder."""

from pathlib import Path

from agentrl import Sample


def score(sample: Sample) -> dict[str, float]:
    """A quarter for each page that was found, half for the right answer."""
    folder = Path(sample.metadata["agent_folder"])
    searches = (folder / "searches.txt").read_text().splitlines() if (folder / "searches.txt").is_file() else []
    answer = (folder / "answer.txt").read_text() if (folder / "answer.txt").is_file() else None
    pages = sum(page in searches for page in sample.metadata["pages"])
    right = float(answer == sample.label)
    return {"score": pages / 4 + right / 2, "pages": float(pages), "right": right}
