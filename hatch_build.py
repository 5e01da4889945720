"""The description on a package index: README.md with every link and picture made absolute.

In the repository links are relative, so that they lead to the files of the same commit. On a package index
they lead to the files of the released version.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def absolute(text: str, *, repository: str, version: str) -> str:
    """Make the relative links and pictures of a page absolute.

    Args:
        text: Markdown.
        repository: its address.
        version: of the release, whose tag the links name.

    Returns:
        Markdown.
    """

    def link(match: re.Match[str]) -> str:
        if re.match(r"[a-z]+:", match["target"]):
            return match[0]
        kind = "raw" if match["picture"] else "blob"
        address = f"{repository.rstrip('/')}/{kind}/v{version}/{match['target'].removeprefix('./')}"
        return f"{match['picture']}[{match['text']}]({address}{match['anchor'] or ''})"

    return _LINK.sub(link, text)


class CustomMetadataHook(MetadataHookInterface):
    """Set the description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Read README.md; the repository's address and the version are known by then."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, repository=metadata["urls"]["Repository"], version=metadata["version"]),
        }
