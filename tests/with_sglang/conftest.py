import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "integration"))


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """An interpreter with SGLang: AGENTRL_SGLANG_PYTHON, or that of .venv-sglang."""
    python = Path(os.environ.get("AGENTRL_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"{python} is missing: make test-sglang builds .venv-sglang")
    return python
