import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "integration"), str(ROOT / "tests" / "with_browser")]

from agentrl.core.errors import UserError  # noqa: E402
from agentrl.models.resolve import resolve_model  # noqa: E402
from benchmarks.viewer import find_browser  # noqa: E402


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """A Chromium of this machine: make browser installs Debian's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    try:
        path = find_browser()
    except UserError as error:
        pytest.skip(f"{error}; make browser installs one")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """That of the shipped policy."""
    return Tokenizer.from_file(str(resolve_model("multihop-warm") / "tokenizer.json"))
