"""Layers of multi-token prediction in a Hugging Face folder (``num_nextn_predict_layers`` in its ``config.json``).

Engines draft tokens with them. They are not trained, and copied unchanged.
"""

from __future__ import annotations

import re
from pathlib import Path

from agentrl.models.weight_files import WeightFiles
from agentrl.models.weight_writer import WeightWriter

FOLDER = "draft_layers"
"""Of the layers next to a distributed checkpoint."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class DraftLayers:
    """The weights of the layers that follow those of the model.

    Args:
        folder: of a model, or of what `save` wrote.
        layers: of the model, without these.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: a file is damaged.
    """

    def __init__(self, folder: Path, layers: int, key: str) -> None:
        self._files = WeightFiles(folder, key)
        matches = ((_LAYER.match(spec.name), spec) for spec in self._files.specs())
        self.specs = [spec for match, spec in matches if match is not None and int(match[1]) >= layers]

    def write(self, writer: WeightWriter) -> None:
        """Write the weights, which are among those of ``writer``."""
        for spec in self.specs:
            writer.write(spec.name, self._files.read(spec.name, ()))

    def save(self, out: Path) -> None:
        """Write the weights into the folder `FOLDER` in ``out``; none if there are none."""
        if self.specs:
            (out / FOLDER).mkdir()
            writer = WeightWriter(out / FOLDER, self.specs)
            writer.create()
            self.write(writer)
