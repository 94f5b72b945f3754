"""Word lists of TextArena's games: read once a process, and on request those of agentrl in place of downloads.

A game makes its dictionary anew, from files, for each episode, which takes most of a second and, without the data of NLTK, a
download. What a file holds does not change, so that here each is read once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import ConfigError, unknown_name

SOURCES = ("nltk", "bundled")
FOLDER = Path(__file__).parent / "nltk_data"
"""The bundled lists, in the layout of NLTK's data."""
_LOCK = threading.Lock()
_source: str | None = None
_cached: set[ModuleType] = set()


def use_word_lists(source: str) -> None:
    """Let the games of this process take their word lists from a source, one of `SOURCES`.

    Raises:
        UnknownNameError: there is no such source.
        ConfigError: a game of this process has another one: NLTK's data belong to the process.
    """
    global _source
    if source not in SOURCES:
        raise unknown_name("word list", source, SOURCES, "env.options.word_lists")
    with _LOCK:
        if _source is None:
            if source == "bundled":
                _use_bundled()
        elif _source != source:
            raise ConfigError(
                f"env.options.word_lists={source}: another environment of this process has {_source}, and NLTK's data belong to "
                "the process; use one of them"
            )
        _source = source


def _use_bundled() -> None:
    """Set NLTK's data to the bundled folder before a game looks for it, and let it download nothing."""
    import nltk

    nltk.data.path.insert(0, str(FOLDER))
    nltk.download = lambda *_args, **_kwargs: True


def cache_dictionaries() -> None:
    """Let dictionaries of games read each file once, from the first game on that has imported them."""
    module = sys.modules.get("textarena.envs.utils.word_lists")
    if module is None or module in _cached:
        return
    with _LOCK:
        if module not in _cached:
            for name in ("_load_dic", "_load_nltk"):
                setattr(module.EnglishDictionary, name, _read_once(getattr(module.EnglishDictionary, name)))
            _cached.add(module)


def _read_once(load: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Return a method of dictionaries that reads each file once for the options that choose among its words."""
    sets: dict[tuple[Any, ...], set[str]] = {}

    @wraps(load)
    def cached(dictionary: Any, *arguments: Any, **options: Any) -> set[str]:
        flags = dictionary.keep_proper_nouns, dictionary.keep_non_alpha
        key = (*flags, *arguments, *sorted(options.items()))
        if key not in sets:
            sets[key] = load(dictionary, *arguments, **options)
        return sets[key]

    return cached
