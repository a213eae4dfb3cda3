"""What mkdocs asks while it builds the site: pages that are made from the code or lie elsewhere in the repository, and links between the two."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import reference  # beside this file; mkdocs puts its folder on the path
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
# Page of the site -> where it lies in the repository.
ELSEWHERE = {"index.md": "README.md", "chart.md": "charts/semantide/README.md"}
MADE = {"rest.md": reference.rest, "commands.md": reference.commands, "python.md": reference.python_client}


def on_files(files: Any, config: Any) -> Any:
    """Add what lies outside of the folder."""
    for page, place in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / place).read_text()))
    for page, make in MADE.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links go to pages of the site where they can; those to other files of the repository keep their words alone."""
    source = ELSEWHERE.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    pages = {place: name for name, place in ELSEWHERE.items()}

    def lead(match: re.Match[str]) -> str:
        picture, words, target, anchor = match.groups(default="")
        if ":" in target or not target:
            return match[0]
        path = ((ROOT / source).parent / target).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        place = path.relative_to(ROOT).as_posix()
        if place in pages:
            return f"{picture}[{words}]({pages[place]}{anchor})"
        if place.startswith("docs/"):
            return f"{picture}[{words}]({place.removeprefix('docs/')}{anchor})"
        return f"{words} (`{place}`)"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)", lead, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """A page asks no other site for anything.

    Raises: PluginError.
    """
    asked = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?://[^\"\s>]+)", output)
    if asked:
        raise PluginError(f"{page.file.src_uri} would ask other sites for {', '.join(asked)}: keep the file in docs/")
    return output
