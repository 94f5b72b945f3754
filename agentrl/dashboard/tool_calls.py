"""The tool calls in what a policy sampled, read by the run's chat format as the run has read them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson

from agentrl.config.layers import load_layers, saved_layers
from agentrl.core.errors import AgentrlError
from agentrl.core.extras import missing_extra_error
from agentrl.core.types import Provenance, Rollout, ToolCall
from agentrl.dashboard.token_decoder import tokenizer_folder
from agentrl.obs.viewer.run_files import RunFiles

if TYPE_CHECKING:
    from agentrl.render.renderer import ChatRenderer


def load_format(folder: Path) -> ChatRenderer | str:
    """Return the chat format of a run, or the reason why it is not known. No code of the model's folder is run."""
    try:
        from agentrl.render.registry import load_renderer

        config = load_layers(saved_layers(folder))
        tokenizer_path = tokenizer_folder(RunFiles(folder, folder, {}, {"model": {"path": config.model.path}}))
        if isinstance(tokenizer_path, str):
            return tokenizer_path
        return load_renderer(tokenizer_path, config.render, trust_remote_code=False)
    except AgentrlError as error:
        return str(error)
    except ModuleNotFoundError as error:
        if (extra_error := missing_extra_error(error, "the tool calls")) is None:
            raise
        return str(extra_error)


def rollout_calls(rollout: Rollout, chat_format: ChatRenderer) -> list[dict[str, object]]:
    """Return the tool calls in the sampled turns of a rollout.

    Returns:
        ``{"row", "turn", "name", "arguments", "fault"}`` for each; turns of a row are counted from 1.
    """
    calls = []
    for row_index, row in enumerate(rollout.rows):
        sampled = row.provenance == Provenance.SAMPLED
        bounds = np.flatnonzero(np.diff(sampled, prepend=False, append=False)).tolist()
        for turn, (first, stop) in enumerate(list(pairwise(bounds))[::2], 1):
            ids = row.token_ids.tolist()
            message = chat_format.parse(ids[first:stop], rollout.tools, prompt_ids=ids[:first])
            calls += [{"row": row_index, "turn": turn, **_call(call)} for call in message.tool_calls]
    return calls


def _call(call: ToolCall) -> dict[str, object]:
    arguments = orjson.dumps(dict(call.arguments), default=str).decode()
    return {"name": call.name, "arguments": arguments, "fault": call.fault}
