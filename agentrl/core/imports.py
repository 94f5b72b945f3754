"""From ``path/to/file.py:name`` or ``package.module:name`` to the Python object."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.core.errors import ConfigError

_LIBRARIES = (str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib") + os.sep)
"""Folders of agentrl and of Python's own modules."""


def is_reference(name: str) -> bool:
    """Return whether ``name`` is a reference to an object in a file or module, and not a registered name."""
    return ":" in name


def load_object(reference: str, key: str) -> Any:
    """Return what ``path/to/file.py:name`` or ``package.module:name`` refers to.

    The current directory can be imported from, as with ``python -m``, and so can the folder of a file.

    Args:
        reference: a file ending in ``.py``, or a module, and behind the colon a name in it (``Class.method`` too).
        key: the configuration key that holds ``reference``, for messages.

    Raises:
        ConfigError: the file or module does not exist, fails, or has no such name; the message has what was tried.

    """
    where, colon, name = reference.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{key}={reference}: write path/to/file.py:name or package.module:name")
    module = _from_file(where, reference, key) if where.endswith(".py") else _from_module(where, reference, key)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{key}={reference}: {where} has no {name!r}{_what_it_has(module, name)}")
        found = getattr(found, part)
    return found


def _from_file(file: str, reference: str, key: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        others = sorted(other.name for other in path.parent.glob("*.py")) if path.parent.is_dir() else []
        there = f"the Python files there: {', '.join(others)}" if others else "there are no Python files there either"
        start = "" if Path(file).is_absolute() else " (a relative path starts in the folder where the command runs)"
        raise ConfigError(f"{key}={reference}: there is no file {path}; {there}{start}")
    _importable(path.parent)
    return _load_file(path, reference, key)


def _load_file(path: Path, reference: str, key: str) -> ModuleType:
    name = f"agentrl_user_{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up while it is being made
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"{key}={reference}: {path} fails: {describe(error)}") from error
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_module(name: str, reference: str, key: str) -> ModuleType:
    _importable(Path.cwd())
    importlib.invalidate_caches()  # a file written since Python last looked there
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{key}={reference}: importing {name} fails: {describe(error)}") from error
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(
            f"{key}={reference}: there is no module {error.name!r}; looked for {file} in {Path.cwd()} and for an "
            f"installed package. A file elsewhere is named by its path, such as path/to/{file.name}:score"
        ) from None
    except Exception as error:
        raise ConfigError(f"{key}={reference}: importing {name} fails: {describe(error)}") from error


def _importable(folder: Path) -> None:
    """Put a folder first on ``sys.path``, as Python does for a script's own; a console script lacks it."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _what_it_has(module: ModuleType, name: str) -> str:
    """Return the nearest public name and all that a module itself defines, or what it imports if it defines nothing."""
    public = {each for each, value in vars(module).items() if not each.startswith("_") and not inspect.ismodule(value)}
    own = sorted(public - _imported(module))
    if not own:
        imported = f", and imports: {', '.join(sorted(public))}" if public else ""
        return f"; it has: nothing of its own{imported}"
    close = difflib.get_close_matches(name, own, n=1)
    return f"{f'. Did you mean {close[0]!r}? It' if close else '; it'} has: {', '.join(own)}"


def _imported(module: ModuleType) -> set[str]:
    """Return the names that import statements at any depth of a module's source bind; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return set()
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name.partition(".")[0] for node in statements for alias in node.names}


def describe(error: BaseException) -> str:
    """Return an exception in one line: class, message, and the author's line where it arose (`place_of`).

    Example: ``ValueError: no number in 'abc' (my_rewards.py:12)``.
    """
    message = str(error.msg if isinstance(error, SyntaxError) else error)
    file, line = place_of(error)
    place = f" ({Path(file).name}:{line})" if file else ""
    return f"{type(error).__name__}: {' '.join(message.split()) or 'no message'}{place}"


def place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the innermost call outside agentrl, Python and installed packages, or of the innermost one.

    The file is empty if the exception was not raised.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return error.filename, error.lineno or 0
    frames = traceback.extract_tb(error.__traceback__)
    frame = next(
        (frame for frame in reversed(frames) if not _is_library(frame.filename)), frames[-1] if frames else None
    )
    return (frame.filename, frame.lineno or 0) if frame is not None else ("", 0)


def _is_library(file: str) -> bool:
    installed = {"site-packages", "dist-packages"} & {*Path(file).parts}
    return bool(installed) or file.startswith(("<", *_LIBRARIES))
