"""The folder of SGLang's custom weight loaders: of changes of weights, of whole weights, and a probe of the way to the sender."""

from pathlib import Path

FOLDER = Path(__file__).parent
"""Is on the module path of the SGLang that uses them."""
LOADER = "agentrl_weight_loaders.load_changes"
"""Name of the loader of changes in SGLang, and ``load_format`` of its requests."""
BUCKET_LOADER = "agentrl_weight_loaders.load_bucket"
"""That of weights whose body only the first tensor-parallel rank of an engine receives."""
PROBE_LOADER = "agentrl_weight_loaders.try_fetch"
"""That of a request that loads nothing: the engine tries to fetch a payload from the sender."""
LOADERS = (LOADER, BUCKET_LOADER, PROBE_LOADER)
"""Names of all loaders."""
