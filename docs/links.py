"""Links of the site: what lies outside of `docs/` is on GitHub a link, and in the site the file's path."""

from __future__ import annotations

import posixpath
import re
from typing import Any

LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>\.\./[^)#\s]*)(?:#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Replace links to files of the repository that are no pages; called by mkdocs for each page."""
    folder = posixpath.dirname(page.file.src_uri)
    return LINK.sub(lambda link: _in_site(link, folder), markdown)


def _in_site(link: re.Match[str], folder: str) -> str:
    path = posixpath.normpath(posixpath.join("docs", folder, link["target"]))
    if path.startswith("docs/"):
        return link[0]
    return link["text"] if link["text"].strip("`") == path else f"{link['text']} (`{path}`)"
