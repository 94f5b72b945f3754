"""The folder of SGLang's custom weight loader for changes of weights."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Is on the module path of the SGLang that takes changes."""
LOADER = "agentrl_weight_delta.load"
"""Name of the loader in SGLang, and ``load_format`` of its requests."""
