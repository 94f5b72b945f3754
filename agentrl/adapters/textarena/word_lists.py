"""Word lists of TextArena's games: read once a process, and on request those of agentrl in place of downloads.

A game builds its dictionary from files for each episode, which takes most of a second and, without the data of NLTK, a
download. What a file holds does not change, so that here each is read once.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Protocol

from agentrl.core.errors import ConfigError, unknown_name

SOURCES = ("nltk", "bundled")
FOLDER = Path(__file__).parent / "nltk_data"
"""The bundled lists, in the layout of NLTK's data."""
_WORDS = {"nltk", "words", "EnglishDictionary"}
"""What a module of a game of words imports."""
_LOCK = threading.Lock()
_source: str | None = None
"""Source of the words of the games that this process has made."""
_cached: set[ModuleType] = set()


def use_word_lists(source: str) -> None:
    """Let the games of words that this process makes from now on take their lists from a source, one of `SOURCES`.

    Raises:
        UnknownNameError: there is no such source.
    """
    if source not in SOURCES:
        raise unknown_name("word list", source, SOURCES, "env.options.word_lists")
    if source == "bundled":
        with _LOCK:
            _use_bundled()


def read_words_once(game: str) -> None:
    """Import the module of a game, if it is known, and let dictionaries read each file once, also that of the first game."""
    from textarena.envs.registration import ENV_REGISTRY

    entry_point = getattr(ENV_REGISTRY.get(game), "entry_point", None)
    if isinstance(entry_point, str):
        import_module(entry_point.partition(":")[0])
    _cache_dictionaries()


def note_words(game: object, source: str) -> None:
    """Note that a game of this process was made with a source, if it is a game of words.

    Raises:
        ConfigError: another game has other lists: NLTK reads them once a process.
    """
    global _source
    if not _WORDS & vars(sys.modules[type(game).__module__]).keys():
        return
    with _LOCK:
        if _source is not None and _source != source:
            raise ConfigError(
                f"env.options.word_lists={source}: another game of this process has {_source}, and NLTK reads its lists once a "
                "process; use one of them for all"
            )
        _source = source


def _use_bundled() -> None:
    """Set NLTK's data to the bundled folder before a game looks for it, and let it download nothing."""
    import nltk

    if str(FOLDER) in nltk.data.path:
        return
    nltk.data.path.insert(0, str(FOLDER))
    nltk.download = lambda *_args, **_kwargs: True


def _cache_dictionaries() -> None:
    module = sys.modules.get("textarena.envs.utils.word_lists")
    if module is None or module in _cached:
        return
    with _LOCK:
        if module not in _cached:
            for name in ("_load_dic", "_load_nltk"):
                setattr(module.EnglishDictionary, name, _read_once(getattr(module.EnglishDictionary, name)))
            _cached.add(module)


class _Dictionary(Protocol):
    """What of an ``EnglishDictionary`` chooses among the words of a file."""

    keep_proper_nouns: bool
    keep_non_alpha: bool


def _read_once(load: Callable[..., set[str]]) -> Callable[..., set[str]]:
    """Return a method of dictionaries that reads each file once for the options that choose among its words."""
    sets: dict[tuple[object, ...], set[str]] = {}

    @wraps(load)
    def load_words(dictionary: _Dictionary, *arguments: object, **options: object) -> set[str]:
        flags = dictionary.keep_proper_nouns, dictionary.keep_non_alpha
        key = (*flags, *arguments, *sorted(options.items()))
        if key not in sets:
            sets[key] = load(dictionary, *arguments, **options)
        return sets[key]

    return load_words
