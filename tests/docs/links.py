"""Links of the built site."""

from __future__ import annotations

import html
import re
from pathlib import Path


def page_names(site: Path) -> list[str]:
    """Return the relative addresses of all pages of a site."""
    return sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if file.name != "404.html")


def broken_links(site: Path) -> list[str]:
    """Return the links to a missing page, file or anchor."""
    texts = {
        file: file.read_text(encoding="utf-8") for file in site.rglob("*.html") if file.name != "404.html"
    }
    anchors = {file: set(re.findall(r'\bid="([^"]+)"', text)) for file, text in texts.items()}
    broken: list[str] = []
    for file, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]*)"', text)):
            target, _, anchor = html.unescape(link).partition("#")
            if "://" in target or target.startswith(("mailto:", "data:", "javascript:")):
                continue
            path = (file.parent / target.partition("?")[0]).resolve() if target else file
            path = path / "index.html" if path.is_dir() else path
            if not path.is_file() or (anchor and path in anchors and anchor not in anchors[path]):
                broken.append(f"{file.relative_to(site)}: {link}")
    return sorted(broken)
