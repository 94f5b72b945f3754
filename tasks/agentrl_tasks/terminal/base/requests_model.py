"""A model class of mini-swe-agent that requests turns at ``OPENAI_BASE_URL``.

Its own class for such addresses imports litellm, which takes several seconds of CPU time at each start.
"""

import os
from typing import Any

from minisweagent.models.openrouter_model import OpenRouterModel


class RequestsModel(OpenRouterModel):  # type: ignore[misc]
    """The class for OpenRouter, with another address and key."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self._api_url = f"{os.environ['OPENAI_BASE_URL']}/chat/completions"
        self._api_key = os.environ["OPENAI_API_KEY"]
