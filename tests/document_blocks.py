"""The code blocks of README.md and docs/, each with the comment above it that says who runs it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
DOCUMENTS = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
_COMMENT = r"(?:<!-- (?P<comment>[^\n]*) -->\n)?"
_BLOCK = re.compile(rf"^{_COMMENT}```(?P<language>\w+)\n(?P<source>.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        document: the file.
        line: of the opening fence, from 1.
        language: ``python`` or ``bash``.
        source: the code.
        comment: the HTML comment on the line before, or an empty text.
    """

    document: Path
    line: int
    language: str
    source: str
    comment: str

    @property
    def run_by(self) -> str:
        """The test that runs it: ``tests/test_x.py::test_name``; or an empty text."""
        return self.comment.removeprefix("run by ") if self.comment.startswith("run by ") else ""

    @property
    def reason(self) -> str:
        """Why nobody runs it; or an empty text."""
        return self.comment.removeprefix("not run: ") if self.comment.startswith("not run: ") else ""

    @property
    def place(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks_of(document: Path) -> list[Block]:
    """The blocks of Python and of shell commands in one document."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(
            document,
            text.count("\n", 0, found.start("language")) + 1,
            found["language"],
            found["source"],
            found["comment"] or "",
        )
        for found in _BLOCK.finditer(text)
        if found["language"] in ("python", "bash", "sh", "console")
    ]
