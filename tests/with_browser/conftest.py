import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))

from agentrl.core.errors import UserError  # noqa: E402
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
