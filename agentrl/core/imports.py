"""From ``path/to/file.py:name`` or ``package.module:name`` to the Python object."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from agentrl.core.errors import ConfigError
from agentrl.core.user_code import describe, is_library, user_code

PYTHON = "python"
"""What stands for the module in references to objects that only this process has: ``python:reward.function``."""
_python_objects: dict[str, object] = {}
"""Such objects by the configuration key that holds them."""
_importing: list[Path] = []
"""Files whose code runs now, to be imported."""
_FILE_MODULES = "agentrl_user_"
"""Prefix of the names of modules that are loaded from files."""


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
    location, colon, name = reference.rpartition(":")
    if not colon or not location or not name:
        raise ConfigError(f"{key}={reference}: write path/to/file.py:name or package.module:name")
    if location == PYTHON:
        return _python_object(reference, key, name)
    module = load_module(location, f"{key}={reference}")
    target: Any = module
    for attribute in name.split("."):
        if not hasattr(target, attribute):
            raise ConfigError(f"{key}={reference}: {location} has no {name!r}{_describe_names(module, name)}")
        target = getattr(target, attribute)
    return target


def load_function(reference: str, key: str, *parameters: str, is_async: bool = False) -> Callable[..., Any]:
    """Return a function of the user.

    Args:
        reference: as in `load_object`.
        key: the configuration key that holds it, for messages.
        parameters: names of the arguments that it is called with.
        is_async: whether it must be a coroutine function; else it must be none.

    Raises:
        ConfigError: it does not exist, is no such function, or does not take the arguments.
    """
    function = load_object(reference, key)
    form = f"{'async ' if is_async else ''}def {reference.rpartition(':')[2]}({', '.join(parameters)})"
    if not callable(function):
        raise ConfigError(f"{key}={reference} is {function!r:.100}, and no function; write {form}")
    called = function if inspect.isroutine(function) else type(function).__call__
    if inspect.isclass(function) or inspect.iscoroutinefunction(called) != is_async:
        kind = "a class" if inspect.isclass(function) else "no coroutine" if is_async else "a coroutine"
        raise ConfigError(f"{key}={reference} is {kind}; write {form}")
    try:
        inspect.signature(function).bind(*parameters)
    except TypeError as error:
        raise ConfigError(f"{key}={reference} must take {len(parameters)} arguments, {form}: {error}") from None
    return cast("Callable[..., Any]", function)


@contextmanager
def python_objects(objects: Mapping[str, object]) -> Iterator[None]:
    """Let ``python:KEY`` refer to an object of this process in the body, by the configuration key that holds it."""
    outer_objects = dict(_python_objects)
    _python_objects.update(objects)
    try:
        yield
    finally:
        _python_objects.clear()
        _python_objects.update(outer_objects)


def has_python_objects() -> bool:
    """Return whether there are objects that only this process has; see `python_objects`."""
    return bool(_python_objects)


def _python_object(reference: str, key: str, name: str) -> object:
    if name not in _python_objects:
        raise ConfigError(
            f"{key}={reference} is an object of the Python process that began the run, such as a class of a notebook's cell. "
            f"Only Python can resume it: agentrl.train(resume=…, …) with the object as {name}"
        )
    return _python_objects[name]


def python_source(reference: str) -> str:
    """Return the source text of the object of ``python:KEY``; empty if it has none, or for another reference."""
    location, _, name = reference.rpartition(":")
    if location != PYTHON or name not in _python_objects:
        return ""
    try:
        return inspect.getsource(cast("Any", _python_objects[name]))
    except (OSError, TypeError):
        return ""


def source_file(reference: str) -> Path | None:
    """Return the file with the code of a reference; None if there is none. Packages around a module are imported."""
    location = reference.rpartition(":")[0]
    if location.endswith(".py"):
        return Path(location).expanduser()
    _prepend_to_sys_path(os.getcwd())
    try:
        spec = importlib.util.find_spec(location)
    except (ImportError, ValueError, AttributeError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def imported_files(file: Path) -> dict[str, Path]:
    """Return a source file, and the modules of its project that it imports, also indirectly, by their paths in the project.

    The project is the folder of the file, the one around its outermost package, and the current directory. Installed packages
    and Python's own modules are left out. Statements are read and nothing is imported, so that a module whose name the code
    computes is not among the files.
    """
    file = file.resolve()
    package = file.parent
    while (package / "__init__.py").is_file():
        package = package.parent
    folders = list(dict.fromkeys((package, file.parent, Path.cwd())))
    files, pending = {str(file.relative_to(package)): file}, [file]
    while pending:
        path = pending.pop()
        for folder, module in _project_imports(path, folders):
            for source in _sources(folder, module):
                if source not in files.values() and not is_library(str(source)):
                    home = next((folder for folder in folders if source.is_relative_to(folder)), source.parent)
                    files[str(source.relative_to(home))] = source
                    pending.append(source)
    return files


def _project_imports(path: Path, folders: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder and the parts of a module's name that a file may import from it."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # its import reports it
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules, starts = [alias.name for alias in node.names], folders
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            modules = [f"{module}.{alias.name}".strip(".") for alias in node.names]
            starts = [path.parents[node.level - 1]] if node.level else folders
        else:
            continue
        yield from ((folder, name.split(".")) for name in modules for folder in starts)


def _sources(folder: Path, module: list[str]) -> Iterator[Path]:
    """Yield the files of a module and of the packages around it. The last part may be a name in a module."""
    for count in range(1, len(module) + 1):
        path = folder.joinpath(*module[:count])
        yield from (source for source in (path.with_name(f"{path.name}.py"), path / "__init__.py") if source.is_file())


def load_module(location: str, setting: str) -> ModuleType:
    """Return the module of a file ending in ``.py``, or of a name; ``setting`` is for messages.

    Raises:
        ConfigError: it does not exist, or fails.
    """
    return _load_from_file(location, setting) if location.endswith(".py") else _load_from_module(location, setting)


def is_loaded_file(module: str) -> bool:
    """Return whether `load_module` has loaded a module of this name from a file, so that only its path can be imported."""
    return module.startswith(_FILE_MODULES)


def _load_from_file(file: str, setting: str) -> ModuleType:
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        siblings = sorted(sibling.name for sibling in path.parent.glob("*.py")) if path.parent.is_dir() else []
        hint = (
            f"the Python files there: {', '.join(siblings)}" if siblings else "there are no Python files there either"
        )
        relative_hint = (
            "" if Path(file).is_absolute() else " (a relative path starts in the folder where the command runs)"
        )
        raise ConfigError(f"{setting}: there is no file {path}; {hint}{relative_hint}")
    _prepend_to_sys_path(str(path.parent))
    return _execute_file(path, setting)


def _execute_file(path: Path, setting: str) -> ModuleType:
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    if main is not None and main_file is not None and path == Path(main_file).resolve():
        return main  # the script that this process runs: once is enough
    name = f"{_FILE_MODULES}{path.stem}_{abs(hash(str(path))):x}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    _importing.append(path)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up while it is being made
    try:
        with user_code(lambda error: ConfigError(f"{setting}: {path} fails: {describe(error)}")):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        _importing.remove(path)
    return module


def importing_file() -> Path | None:
    """Return the file that agentrl is importing; a script that trains there would begin a run in each process that imports it."""
    return _importing[-1] if _importing else None


def _load_from_module(name: str, setting: str) -> ModuleType:
    _prepend_to_sys_path(os.getcwd())
    if name not in sys.modules:  # an environment is looked up once an episode
        importlib.invalidate_caches()  # a file written since Python last looked there
    call = f"{setting}: importing {name}"
    try:
        with importing(call):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigError(f"{call} fails: {describe(error)}") from error
        file = Path(*name.split(".")).with_suffix(".py")
        raise ConfigError(
            f"{setting}: there is no module {error.name!r}; looked for {file} in {Path.cwd()} and for an "
            f"installed package. A file elsewhere is named by its path, such as path/to/{file.name}:score"
        ) from None


def importing(call: str) -> AbstractContextManager[None]:
    """Raise a `ConfigError` "``call`` fails: …" in place of what the user's module in the body raises. A module that does
    not exist is a `ModuleNotFoundError`.
    """

    def failure(error: BaseException) -> Exception:
        return error if isinstance(error, ModuleNotFoundError) else ConfigError(f"{call} fails: {describe(error)}")

    return user_code(failure)


def _prepend_to_sys_path(folder: str) -> None:
    """Put a folder first on ``sys.path``: a console script, unlike ``python script.py``, does not."""
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _describe_names(module: ModuleType, name: str) -> str:
    """Return the names that a module defines, the one nearest to ``name`` first; if it defines none, what it imports."""
    public = {
        public_name
        for public_name, value in vars(module).items()
        if not public_name.startswith("_") and not inspect.ismodule(value)
    }
    defined = sorted(public - _imported_names(module))
    if not defined:
        imported = f", and imports: {', '.join(sorted(public))}" if public else ""
        return f"; it has: nothing of its own{imported}"
    close = difflib.get_close_matches(name, defined, n=1)
    return f"{f'. Did you mean {close[0]!r}? It' if close else '; it'} has: {', '.join(defined)}"


def _imported_names(module: ModuleType) -> set[str]:
    """Return the names that import statements at any depth of a module's source bind; none without a source."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return set()
    statements = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name.partition(".")[0] for node in statements for alias in node.names}
