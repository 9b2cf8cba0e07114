"""Hook of mkdocs: links from docs/ to other files of the repository, such as ../examples/full.yaml.

A site has pages of docs/ only. With CLEAVE_SOURCE_URL, such as https://HOST/OWNER/cleave/blob/main,
these links lead there: .github/workflows/site.yml sets it. Without, only their text stays.
"""

import os
import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)\s]+)\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:  # noqa: ANN401 - mkdocs'
    """Called by mkdocs with each page before it is rendered."""
    return replace_links(markdown, page.file.src_uri, os.environ.get("CLEAVE_SOURCE_URL", ""))


def replace_links(markdown: str, page: str, source_url: str) -> str:
    """`page`: the page's path in docs/; `source_url`: of the repository's files, or empty."""

    def replace(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        path = _resolve(PurePosixPath("docs", page).parent, target)
        if path.parts[:1] == ("docs",):
            return found[0]
        return f"[{text}]({source_url.rstrip('/')}/{path})" if source_url else text

    return _LINK.sub(replace, markdown)


def _resolve(folder: PurePosixPath, target: str) -> PurePosixPath:
    """The target from the repository's root; it must not lead out of it."""
    parts = list(folder.parts)
    for part in PurePosixPath(target).parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return PurePosixPath(*parts)
