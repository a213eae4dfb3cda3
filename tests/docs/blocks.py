"""Every fenced block of the documentation, and the commands of those that are for a shell."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "charts" / "semantide" / "README.md"]
_SEPARATORS = re.compile(r"[();&|]+")
_KEYWORDS = {"do", "then", "else", "{", "!"}
_NO_COMMANDS = {"for", "done", "fi", "}"}


@dataclass(frozen=True)
class Block:
    """One fenced block. ``line`` is that of its fence, from 1; what is indented with a list is dedented."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One program and its arguments, as the shell would hand them over but for what is not known ahead (``$X``)."""

    words: tuple[str, ...]
    line: str

    @property
    def program(self) -> str:
        """Its name without a folder."""
        return self.words[0].rpartition("/")[2]


def blocks_of(page: Path) -> list[Block]:
    """The blocks of one page, in order."""
    found: list[Block] = []
    fence: tuple[str, str, int] | None = None
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = re.match(r"^( *)```(\w*)\s*$", line)
        if fence is None:
            assert match or not line.lstrip().startswith("```"), f"{page.name}:{number}: this fence is not understood: {line}"
            if match:
                fence, lines = (match[1], match[2], number), []
        elif match and not match[2]:
            indent, language, begin = fence
            found.append(Block(page.relative_to(ROOT).as_posix(), begin, language, "\n".join(each.removeprefix(indent) for each in lines) + "\n"))
            fence = None
        else:
            lines.append(line)
    assert fence is None, f"{page.name}: the fence of line {fence[2] if fence else 0} is never closed"
    return found


def all_blocks() -> list[Block]:
    """The blocks of all pages."""
    return [block for page in PAGES for block in blocks_of(page)]


def logical_lines(text: str) -> list[str]:
    """A script in pieces that stand for themselves: quotes, continued lines, here-documents and loops are not torn apart."""
    found: list[str] = []
    lines = iter(text.splitlines())
    for line in lines:
        piece = line
        while piece.endswith("\\") or _open(piece):
            piece += "\n" + next(lines)
        for word in re.findall(r"<<\s*'?(\w+)'?", piece):
            while True:
                more = next(lines)
                piece += "\n" + more
                if more == word:
                    break
        if piece.strip() and not piece.lstrip().startswith("#"):
            found.append(piece)
    return found


def _open(piece: str) -> bool:
    try:
        shlex.split(piece, comments=True)
    except ValueError:
        return True
    return False


def commands(line: str) -> list[Command]:
    """The commands of one logical line, those in ``$(...)`` too."""
    without_documents = re.sub(r"(<<\s*'?(\w+)'?.*?)\n.*?^\2$", r"\1", line, flags=re.DOTALL | re.MULTILINE)
    lexer = shlex.shlex(without_documents.replace("\\\n", " "), posix=True, punctuation_chars="();<>|&")
    lexer.commenters = "#"
    lexer.wordchars += "~-./*?=,:+@$%{}[]!^"
    found: list[list[str]] = [[]]
    target = False
    for token in lexer:
        if _SEPARATORS.fullmatch(token):
            found.append([])
        elif token and set(token) <= set("<>&"):
            target = True
        elif target:
            target = False
        else:
            found[-1].append(token)
    kept = []
    for words in found:
        while words and (words[0] in _KEYWORDS or re.match(r"^\w+=", words[0])):
            words = words[1:]
        if words and words[0] not in _NO_COMMANDS:
            kept.append(Command(tuple(words), line))
    return kept


def script(block: Block) -> list[Command]:
    """All commands of a block."""
    return [command for line in logical_lines(block.text) for command in commands(line)]
