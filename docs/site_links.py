"""Hook of the site (``mkdocs.yml``): pages outside of ``docs/``, and links to other files of the repository.

On a code host, pages link to READMEs, folders and modules by relative paths. In the site, a README of
`INCLUDED` is a page. Links to other files lead to the repository, if ``repo_url`` is set; otherwise their text stays.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
INCLUDED = (
    "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md", "examples/*/README.md",
    "envs/agentrl_envs/*/README.md", "tools/agentrl_tools/*/README.md", "tasks/agentrl_tasks/*/README.md",
)  # fmt: skip


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside of ``docs/``."""
    for pattern in INCLUDED:
        for path in sorted(ROOT.glob(pattern)):
            files.append(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the page with links as they are in the site."""

    def rewrite(match: re.Match[str]) -> str:
        image, text, link = match.groups()
        target, hash_sign, anchor = link.partition("#")
        if "://" in link or not target:
            return match[0]
        path = Path(os.path.normpath(_repository_path(page.file).parent / target))
        if (ROOT / path / "README.md").is_file():
            path /= "README.md"
        uri = str(path.relative_to("docs")) if path.parts[0] == "docs" else str(path)
        if files.get_file_from_path(uri) is not None:
            return (
                f"{image}[{text}]({os.path.relpath(uri, os.path.dirname(page.file.src_uri) or '.')}{hash_sign}{anchor})"
            )
        if not (ROOT / path).exists():
            return match[0]  # which MkDocs reports
        repository = (config.repo_url or "").rstrip("/")
        return f"[{text}]({repository}/blob/main/{path})" if repository else text

    parts = re.split(r"(^ *```.*?^ *```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(
        part if part.lstrip().startswith("```") else re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", rewrite, part)
        for part in parts
    )


def _repository_path(file: File) -> Path:
    inside_docs = Path(file.abs_src_path or "").is_relative_to(ROOT / "docs")
    return Path("docs", file.src_uri) if inside_docs else Path(file.src_uri)
