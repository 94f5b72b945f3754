"""What a Dockerfile needs of its builder: instructions that BuildKit alone has, and the images that it begins with."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from agentrl.core.errors import ConfigError

_DIRECTIVE = re.compile(r"#\s*syntax\s*=\s*(\S+)\s*$", re.IGNORECASE)
_OWN_FRONTEND = re.compile(r"(docker\.io/)?docker/dockerfile(:[\w.-]+)?(@\S+)?")
"""Versions of the frontend that BuildKit has built in."""
_FLAGS = {
    "RUN": ("--mount", "--network", "--security", "--device"),
    "COPY": ("--chmod", "--link", "--parents", "--exclude"),
    "ADD": ("--chmod", "--link", "--checksum", "--keep-git-dir", "--exclude"),
}
_HEREDOC = re.compile(r"(?:^|\s)<<-?[\"']?[A-Za-z_]")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


@dataclass(frozen=True, slots=True)
class Dockerfile:
    """A Dockerfile.

    Example: ``Dockerfile("FROM debian:12\\nRUN --mount=type=cache,target=/c make\\n").needs_buildkit == "RUN --mount"``.
    """

    text: str

    @property
    def needs_buildkit(self) -> str | None:
        """The first instruction that the classic builder does not have; None if it has all."""
        for name, words, line in self._instructions():
            for word in words:
                if not word.startswith("--"):
                    break
                if (flag := word.partition("=")[0]) in _FLAGS.get(name, ()):
                    return f"{name} {flag}"
            if name in _FLAGS and _HEREDOC.search(line):
                return f"{name} <<"
        return None

    def without_frontend(self) -> str:
        """Return the text without a line that names a frontend, for the one that the daemon has.

        Raises:
            ConfigError: it names one that is not Docker's own.
        """
        lines = self.text.splitlines(keepends=True)
        for number, line in enumerate(lines):
            if not line.startswith("#"):
                break
            if (match := _DIRECTIVE.match(line)) is None:
                continue
            if _OWN_FRONTEND.fullmatch(match[1]) is None:
                raise ConfigError(
                    f"# syntax={match[1]}: only docker/dockerfile is supported, in the daemon's version: build the image with "
                    "`docker buildx build`, and name it in place of the Dockerfile"
                )
            lines[number] = "#\n"
        return "".join(lines)

    def base_images(self, arguments: Mapping[str, str]) -> list[str]:
        """Return the images that it begins with or copies from, in order.

        Args:
            arguments: of the build, which take the place of defaults.
        """
        stages = self._stages(arguments)
        images = [image for image, _ in stages]
        for name, words, _ in self._instructions():
            if name in ("COPY", "RUN"):
                options = [
                    option for word in words if word.startswith("--") for option in word.removeprefix("--").split(",")
                ]
                images += [option.removeprefix("from=") for option in options if option.startswith("from=")]
        names = {"scratch", *(name for _, name in stages)}
        return [image for image in dict.fromkeys(images) if image.lower() not in names and not image.isdecimal()]

    def last_base(self, arguments: Mapping[str, str]) -> str | None:
        """Return the image whose layers the built image has: that of the last stage; None if it begins from scratch.

        Args:
            arguments: see `base_images`.
        """
        bases: dict[str, str] = {}
        base = "scratch"
        for image, name in self._stages(arguments):
            base = bases[name] = bases.get(image.lower(), image)
        return None if base.lower() == "scratch" else base

    def _stages(self, arguments: Mapping[str, str]) -> list[tuple[str, str]]:
        """Return the image or stage that each stage begins with, and the stage's name in lower case, empty without one."""
        values: dict[str, str] = {}
        stages: list[tuple[str, str]] = []
        for name, words, _ in self._instructions():
            if name == "ARG" and not stages:
                key, equal, default = words[0].partition("=")
                if key in arguments or equal:
                    values[key] = arguments.get(key, default.strip("\"'"))
            elif name == "FROM":
                image, *alias = [word for word in words if not word.startswith("--")]
                stages.append((_expand(image, values), alias[1].lower() if len(alias) == 2 else ""))
        return stages

    def _instructions(self) -> Iterator[tuple[str, list[str], str]]:
        """Yield each instruction with its words, and as one line."""
        line = ""
        for text in self.text.splitlines():
            if text.lstrip().startswith("#") or (not line and not text.strip()):
                continue
            line += text.rstrip()
            if line.endswith("\\"):
                line = f"{line[:-1]} "
                continue
            name, *words = line.split()
            yield name.upper(), words, line
            line = ""
        if line.strip():
            name, *words = line.split()
            yield name.upper(), words, line


def _expand(text: str, values: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2]) or match[3] or "", text)
