"""A fake engine that joins weights as SGLang's loaders do."""

from __future__ import annotations

from collections.abc import Collection

SIBLINGS = {"q_a_proj": "kv_a_proj_with_mqa", "g_proj": "kv_a_proj_with_mqa", "wq_a": "wkv", "wgate": "wkv"}
"""By module, one that SGLang joins with it within a call of ``load_weights`` (0.5.17 and 0.5.23)."""


class JoiningEngine:
    """Loads weights as SGLang's loaders with a fused parameter do: a half without the other of the model is dropped."""

    def __init__(self, model: Collection[str]) -> None:
        self.model = frozenset(model)
        self.names: set[str] = set()

    def load_weights(self, names: Collection[str]) -> None:
        names = frozenset(names)
        for name in names:
            module, _, last = name.rpartition(".")
            parent, _, module = module.rpartition(".")
            siblings = {b if module == a else a for a, b in SIBLINGS.items() if module in (a, b)}
            if {f"{parent}.{sibling}.{last}" for sibling in siblings}.intersection(self.model).issubset(names):
                self.names.add(name)
