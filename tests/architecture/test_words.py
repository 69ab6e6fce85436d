"""One noun for one thing: words that meant several things are gone from the names of the package."""

from __future__ import annotations

import ast
import re

from source_tree import source_files

GONE = {
    "abandon": "abort",
    "board": "versioned page",
    "carrier": "connection thread",
    "door": "listener",
    "farewell": "goodbye",
    "forgive": "reconnect",
    "hello": "handshake",
    "lane": "transport, bucket or route, whichever is meant",
    "lending": "lease",
    "meet": "barrier",
    "meeting": "rendezvous of processes; barrier of replicas and ranks",
    "patience": "grace period",
    "together": "coalesced",
    "visit": "session",
    "visitor": "session",
}
"""What was said, and the field's word."""

MEANT = {
    "tfstyle_dist.integrations.keras.tensorboard: TensorBoard",
    "tfstyle_dist_kernels.cpu.cpu_kernel: lanes",
}
"""Names in which such a word is the field's own."""


def words_of(name: str) -> set[str]:
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {form for word in snake for form in (word, word.removesuffix("s"), word.removesuffix("ed"))}


def test_the_words_are_gone() -> None:
    found = []
    for file in source_files():
        if words_of(file.name.rpartition(".")[2]) & GONE.keys() and file.name not in MEANT:
            found.append(file.name)
        for node in ast.walk(file.tree):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            where = f"{file.name}: {node.name}"
            if words_of(node.name) & GONE.keys() and where not in MEANT:
                found.append(where)
    assert not found, f"say it with the field's word: {found}; see GONE"


def test_it_would_be_seen() -> None:
    assert words_of("LaneSums") & GONE.keys() == {"lane"}
    assert words_of("test_meetings") & GONE.keys() == {"meeting"}
