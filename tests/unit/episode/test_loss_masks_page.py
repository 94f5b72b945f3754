"""The rows in docs/explanation/loss_masks.md are those of the example episode."""

import importlib.util
from pathlib import Path

from agentrl.core.types import ForkReason

DOCS = Path(__file__).parents[3] / "docs"


def load():
    spec = importlib.util.spec_from_file_location("make_loss_masks", DOCS / "make_loss_masks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_the_rows_of_the_episode():
    maker = load()
    assert maker.page() == (DOCS / "explanation" / "loss_masks.md").read_text(encoding="utf-8"), (
        "run python docs/make_loss_masks.py"
    )
    first, second = maker.run_episode()
    assert (first.fork, second.fork) == (None, ForkReason.THINKING)
