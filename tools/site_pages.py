"""The hook of mkdocs.yml: pages of the site that are placed outside docs/, and links between them.

READMEs, changelogs and CONTRIBUTING.md stay where GitHub and PyPI show them, and are pages of the
site at the same path. Links of all pages are those of the repository: to a page they become links
of the site; to another file, which the site does not have, they become text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

__all__ = [
    "on_files", "on_page_markdown", "on_post_page", "on_post_template",
    "pages_outside_docs", "search_boost", "site_links",
]  # fmt: skip

# What the theme loads for the search of a site that is opened from files, and its replacement.
_REMOTE_SHIM = "https://unpkg.com/iframe-worker/shim"
_SHIM = "assets/iframe-worker.js"

# An inline link or a picture whose target is a file: no scheme, and not only an anchor. The target
# has a dot or a slash, which `Shard(0)` behind a bracket in code has not.
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()#\s:]*[./][^()#\s:]*)(#[^)\s]*)?\)")
_BLOCK = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)


# How search ranks a page beside others, by the beginning or the end of its path.
_FIRST, _LAST = ("tasks/", "tutorials/"), ("adr/", "CHANGELOG.md", "api.md")


def pages_outside_docs(root: Path) -> list[Path]:
    """Returns the pages outside docs/, as paths from the root of the repository."""
    found = [
        root / "CONTRIBUTING.md",
        *root.glob("packages/*/README.md"),
        *root.glob("packages/*/CHANGELOG.md"),
        *root.glob("integration/docs/*.png"),
        root / "integration" / "README.md",
        root / "testkit" / "README.md",
    ]
    return [path.relative_to(root) for path in sorted(found)]


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages outside docs/ to those that mkdocs found in it."""
    root = Path(config.docs_dir).parent
    for path in pages_outside_docs(root):
        file = File.generated(config, str(path), abs_src_path=str(root / path))
        files.append(file)
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites a page's links to files of the repository into links of the site, and ranks it.

    Raises:
        PluginError: a link's target does not exist.
    """
    root = Path(config.docs_dir).parent
    source = Path(str(page.file.abs_src_path)).relative_to(root)
    page.meta["search"] = {"boost": search_boost(page.file.src_uri)}
    known = {file.src_uri for file in files}
    try:
        return site_links(markdown, source=source, uri=page.file.src_uri, known=known, root=root)
    except ValueError as error:
        raise PluginError(str(error)) from error


def search_boost(uri: str) -> float:
    """Returns the factor of a page's rank in search: what to do precedes decisions and changes."""
    if uri.startswith(_FIRST):
        return 2.0
    return 0.5 if uri.startswith(_LAST) or uri.endswith(_LAST) else 1.0


def site_links(markdown: str, *, source: Path, uri: str, known: set[str], root: Path) -> str:
    """Rewrites the links of a page.

    Args:
        markdown: text of the page.
        source: path of the page from the root of the repository.
        uri: path of the page in the site's sources.
        known: paths of all files in the site's sources.
        root: the repository.

    Raises:
        ValueError: a link's target is neither a file of the repository nor of the site.
    """

    def rewrite(link: re.Match[str]) -> str:
        picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = os.path.normpath(source.parent / target)
        if not (root / path).exists():
            raise ValueError(
                f"{source}: expected the target of a link to be a file of the repository, got "
                f"{target}; correct its path"
            )
        pages = [path.removeprefix("docs/")]
        if (root / path).is_dir():
            pages = [f"{pages[0]}/{name}" for name in ("README.md", "index.md")]
        found = next((page for page in pages if page in known), None)
        if found is None:
            return str(text)
        return f"{picture}[{text}]({posixpath.relpath(found, posixpath.dirname(uri))}{anchor})"

    # Code is at odd indices. A link's text may contain code, but code does not contain links.
    return "".join(
        part if number % 2 else _LINK.sub(rewrite, part)
        for number, part in enumerate(_BLOCK.split(markdown))
    )


def on_post_page(output: str, *, page: Page, config: MkDocsConfig) -> str:
    """Replaces the script that the theme loads from another host, so search needs no network."""
    return output.replace(
        _REMOTE_SHIM, posixpath.relpath(_SHIM, posixpath.dirname(page.url) or ".")
    )


def on_post_template(output: str, *, template_name: str, config: MkDocsConfig) -> str:
    """Replaces it in pages that are made from templates, such as 404.html."""
    return output.replace(_REMOTE_SHIM, _SHIM)
