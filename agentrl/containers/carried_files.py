"""What of an agent's files is carried into the machine of the tests, and what is not: code that tools load by themselves.

Files are compared with those of a machine in which no agent has worked. Carried are regular files, folders, and symbolic links
that stay below what is carried. Not carried, unless the task names the file itself as an artifact:

- code and settings that tools load unasked: ``conftest.py``, ``sitecustomize.py``, ``*.pth``, settings of pytest, hooks and
  settings of git, start files of shells, caches of byte code;
- modules that Python would take for its own or for a test tool's, where it looks first: in folders that are no packages;
- what is installed: ``site-packages``, ``node_modules``, programs of virtual environments, and folders on the search paths.
"""

from __future__ import annotations

import configparser
import fnmatch
import io
import posixpath
import sys
import tarfile
import tomllib
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.containers.archives import Download

MOST_LINKS = 40
"""Symbolic links on a path, as in Linux."""
MOST_LINK_STEPS = 1_000_000
"""Folders that are passed to follow all links of an agent; links after that are refused."""
SETTINGS_BYTES = 2**16
"""Largest size of a file with settings of pytest among others; larger ones are taken for changed settings."""
_LOADED_FILES = """
conftest.py sitecustomize.py usercustomize.py *.pth *.pyc *.pyo *.egg-link pytest.ini .pytest.ini tox.ini noxfile.py .coveragerc
.pdbrc .pythonrc .pythonstartup pyvenv.cfg
.bashrc .bash_profile .bash_login .bash_logout .profile .zshrc .zshenv .zprofile .inputrc .envrc
.gitconfig .gitattributes .npmrc .yarnrc .yarnrc.yml .mocharc.* jest.config.* vitest.config.* babel.config.* .babelrc*
.bazelrc .curlrc .wgetrc .netrc .gdbinit .lldbinit .vimrc .exrc .Rprofile .perltidyrc .proverc .irbrc .rspec
"""
LOADED_FILES = tuple(_LOADED_FILES.split())
"""Names of files that shells, interpreters and test tools read, and mostly run, without an explicit option."""
INSTALLED_FOLDERS = frozenset(["site-packages", "dist-packages", "node_modules", "__pycache__", ".pytest_cache"])
"""Folders of installed code and of caches."""
_TEST_TOOLS = """
pytest _pytest py pluggy iniconfig packaging exceptiongroup tomli pygments nose nose2 hypothesis coverage xdist numpy
pandas requests yaml attr attrs colorama setuptools pkg_resources pip
"""
TEST_TOOLS = frozenset(_TEST_TOOLS.split())
"""Modules, besides those of the standard library, that tests import before they read the agent's code."""
_GIT_FILES = frozenset(["config", "config.worktree"])
_PYTHON_ENDINGS = (".py", ".so", ".pyd")


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, folder or symbolic link."""

    kind: Literal["file", "folder", "link"]
    """What it is."""
    mode: int = 0o644
    """Permissions, without set-user-id."""
    content: bytes = b""
    """Content, if it is a file."""
    target: str = ""
    """Target, if it is a link."""


Tree = Mapping[str, Entry]
"""Entries by absolute path."""


@dataclass(frozen=True, slots=True)
class Changes:
    """What an agent has changed, as far as it is carried."""

    entries: Tree
    """To write, over what is there."""
    removed: tuple[str, ...]
    """Paths to remove first, with all that is below."""
    refused: Mapping[str, str]
    """Paths that are not carried, with the reason."""

    def archive(self, user: int, group: int) -> bytes:
        """Return the entries as a tar archive for the folder ``/``.

        Args:
            user: owner of everything.
            group: likewise.
        """
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for path, entry in sorted(self.entries.items()):
                member = tarfile.TarInfo(path.lstrip("/"))
                member.mode, member.uid, member.gid = entry.mode, user, group
                if entry.kind == "folder":
                    member.type = tarfile.DIRTYPE
                elif entry.kind == "link":
                    member.type, member.linkname = tarfile.SYMTYPE, entry.target
                member.size = len(entry.content)
                archive.addfile(member, io.BytesIO(entry.content))
        return buffer.getvalue()


LEADS_OUT = Entry("link", 0o777, target="/")
"""Stands for a link that leads out of a download, and for what is neither file nor folder."""


def read_tree(download: Download, path: str) -> dict[str, Entry]:
    """Return the entries of what was downloaded from ``path``, by absolute path."""
    parent = posixpath.dirname(path)
    tree = {posixpath.normpath(posixpath.join(parent, name)): LEADS_OUT for name in download.left_out}
    with tarfile.open(fileobj=io.BytesIO(download.tar)) as archive:
        for member in archive:
            name = posixpath.normpath(posixpath.join(parent, member.name))
            mode = member.mode & 0o777
            if member.isdir():
                tree[name] = Entry("folder", mode)
            elif member.issym():
                tree[name] = Entry("link", 0o777, target=member.linkname)
            else:
                file = archive.extractfile(member)
                assert file is not None, "a download has regular files, folders and links"
                tree[name] = Entry("file", mode, file.read())
    return tree


def without(tree: Tree, root: str, patterns: Sequence[str]) -> dict[str, Entry]:
    """Return a tree without the paths that fit a pattern, by name or relative to ``root``, and what is below them."""
    return {path: entry for path, entry in tree.items() if not _is_excluded(posixpath.relpath(path, root), patterns)}


def _is_excluded(path: str, patterns: Sequence[str]) -> bool:
    pieces = path.split("/")
    prefixes = ["/".join(pieces[:end]) for end in range(1, len(pieces) + 1)]
    return any(
        fnmatch.fnmatchcase(prefix, pattern) or fnmatch.fnmatchcase(posixpath.basename(prefix), pattern)
        for prefix in prefixes
        for pattern in patterns
    )


def find_changes(
    agent: Tree, clean: Tree, roots: Sequence[str], *, named: Collection[str] = (), search_folders: Iterable[str] = ()
) -> Changes:
    """Return what an agent has changed below ``roots``, and what of it is not carried.

    Args:
        agent: of the agent's machine.
        clean: of a machine in which no agent has worked.
        roots: what is carried, by absolute path.
        named: files that the task names itself; they are carried whatever they are called.
        search_folders: folders of the clean machine in which programs, modules and libraries are looked for.
    """
    rules = _Rules(agent, clean, frozenset(named), frozenset(search_folders))
    refused: dict[str, str] = {}
    entries: dict[str, Entry] = {}
    for path, entry in agent.items():
        if entry == clean.get(path):
            continue
        reason = rules.refusal(path)
        if reason:
            refused[path] = reason
        else:
            entries[path] = entry
    removed: dict[str, None] = {}
    for path in sorted(clean):
        if path in agent and (path not in entries or clean[path].kind == entries[path].kind != "link"):
            continue
        if (path in agent or not rules.refusal(path)) and _first_above(path, removed) is None:
            removed[path] = None
    links = _Links(
        {path: entry for path, entry in clean.items() if _first_above(path, removed) is None} | entries, roots
    )
    for path in [path for path, entry in entries.items() if entry.kind == "link"]:
        if not links.stay_below(path):
            refused[path] = "the link leads out of what is carried"
            del entries[path]
    directly_refused = dict(refused)
    for path in list(entries):
        if (blocked := _first_above(path, directly_refused)) is not None:
            refused[path] = f"{blocked} is not carried"
            del entries[path]
    return Changes(entries, tuple(removed), refused)


def _first_above(path: str, folders: Container[str]) -> str | None:
    """Return the path itself or the nearest folder above it that is one of ``folders``."""
    while path:
        if path in folders:
            return path
        path = path.rpartition("/")[0]
    return None


def _is_below(path: str, folders: Iterable[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder.rstrip('/')}/") for folder in folders)


class _Links:
    """Follows an agent's links in the tree as it will be."""

    def __init__(self, tree: Tree, roots: Sequence[str]) -> None:
        self._tree = tree
        self._roots = roots
        self._steps_left = MOST_LINK_STEPS

    def stay_below(self, path: str) -> bool:
        """Return whether a link's path stays below the roots, whatever links it passes."""
        links = 0
        target = self._tree[path].target
        folder, pieces = posixpath.dirname(path), target.split("/")[::-1]
        if target.startswith("/"):
            folder = ""
        while pieces:
            self._steps_left -= 1
            if self._steps_left < 0:
                return False
            piece = pieces.pop()
            if piece in ("", "."):
                continue
            folder = posixpath.dirname(folder) if piece == ".." else f"{folder}/{piece}"
            entry = self._tree.get(folder)
            if entry is not None and entry.kind == "link":
                links += 1
                if links > MOST_LINKS:
                    return False
                pieces += entry.target.split("/")[::-1]
                folder = "" if entry.target.startswith("/") else posixpath.dirname(folder)
            if not _is_below(folder, self._roots) and not self._is_above(folder, pieces):
                return False
        return _is_below(folder, self._roots)

    def _is_above(self, folder: str, pieces: Sequence[str]) -> bool:
        """Return whether an absolute path is on its way down to a root."""
        return ".." not in pieces and any(root.startswith(f"{folder}/") for root in self._roots)


class _Rules:
    """What is not carried; see the module's docstring."""

    def __init__(self, agent: Tree, clean: Tree, named: frozenset[str], search_folders: frozenset[str]) -> None:
        self._agent, self._clean = agent, clean
        self._named, self._search_folders = named, search_folders
        self._modules = frozenset(sys.stdlib_module_names) | TEST_TOOLS
        self._environments = {posixpath.dirname(path) for path in clean if path.endswith("/pyvenv.cfg")}
        self._bare_repositories = {
            posixpath.dirname(path)
            for path in (*agent, *clean)
            if path.endswith("/HEAD")
            and all(self._is_there(f"{posixpath.dirname(path)}/{part}") for part in ("objects", "refs"))
        }
        self._code_folders: set[str] = set()
        """Folders with modules of Python, at any depth."""
        for path in (*agent, *clean):
            if path.endswith(_PYTHON_ENDINGS):
                while (path := path.rpartition("/")[0]) and path not in self._code_folders:
                    self._code_folders.add(path)
        self._shadowing: dict[str, bool] = {"": False}
        """Results of `_shadows` for folders."""

    def refusal(self, path: str) -> str:
        """Return why a path that differs is not carried; empty: it is."""
        if path in self._named:
            return ""
        folder, name = posixpath.split(path)
        pieces = path.split("/")
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in LOADED_FILES):
            return "tools load it by themselves"
        if INSTALLED_FOLDERS.intersection(pieces):
            return "it belongs to what is installed, or to a cache"
        if _is_below(folder, self._search_folders):
            return "programs or modules are looked for in its folder"
        if any(_is_below(path, [f"{environment}/bin"]) for environment in self._environments):
            return "it belongs to a virtual environment"
        if self._is_of_git(path, pieces):
            return "git runs what it names"
        if name == "entry_points.txt":
            return "it registers plugins"
        if self._changes_pytest(path, name):
            return "it changes settings of pytest"
        return "Python would take it for a module of its own or of a test tool" if self._shadows(path) else ""

    def _is_of_git(self, path: str, pieces: Sequence[str]) -> bool:
        name = pieces[-1]
        if ".git" in pieces:
            inner = pieces[pieces.index(".git") + 1 :]
            return "hooks" in inner[:-1] or (inner[-1] in _GIT_FILES if inner else self._is_file(path))
        # A bare repository in any folder is one for git.
        folder = posixpath.dirname(path)
        while (bare := _first_above(folder, self._bare_repositories)) is not None:
            if name in _GIT_FILES or path.startswith(f"{bare}/hooks/"):
                return True
            folder = posixpath.dirname(bare)
        return False

    def _is_there(self, path: str) -> bool:
        return path in self._agent or path in self._clean

    def _is_file(self, path: str) -> bool:
        entry = self._agent.get(path)
        return entry is not None and entry.kind != "folder"

    def _changes_pytest(self, path: str, name: str) -> bool:
        if name not in ("pyproject.toml", "setup.cfg"):
            return False
        return _pytest_settings(name, self._agent.get(path)) != _pytest_settings(name, self._clean.get(path))

    def _shadows(self, path: str) -> bool:
        """Return whether a path, or a folder above it, is a module with a name that tests import first."""
        folders = []
        folder = path.rpartition("/")[0]
        while folder not in self._shadowing:
            folders.append(folder)
            folder = folder.rpartition("/")[0]
        for inner in reversed(folders):
            self._shadowing[inner] = self._shadowing[folder] or self._is_shadow(inner, is_folder=True)
            folder = inner
        return self._shadowing[folder] or self._is_shadow(path, is_folder=False)

    def _is_shadow(self, path: str, *, is_folder: bool) -> bool:
        folder, name = posixpath.split(path)
        if name.split(".")[0] not in self._modules:
            return False
        if is_folder or (self._agent.get(path) or self._clean[path]).kind == "folder":
            if path not in self._code_folders:
                return False
        elif not name.endswith(_PYTHON_ENDINGS):
            return False
        return not self._is_there(f"{folder}/__init__.py")


def _pytest_settings(name: str, entry: Entry | None) -> object:
    """Return what a file says to pytest; a file that cannot be read says something else than any other."""
    if entry is None:
        return None
    if len(entry.content) > SETTINGS_BYTES:
        return entry
    try:
        text = entry.content.decode()
        if name == "pyproject.toml":
            tools = tomllib.loads(text).get("tool", {})
            return tools.get("pytest") if isinstance(tools, dict) else entry
        parser = configparser.ConfigParser(interpolation=None)
        parser.read_string(text)
        return dict(parser["tool:pytest"]) if "tool:pytest" in parser else None
    except (ValueError, RecursionError, configparser.Error):
        return None if b"pytest" not in entry.content else entry
