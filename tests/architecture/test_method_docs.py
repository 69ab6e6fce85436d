"""Every public method says what it does, or overrides one that says it: then ``help`` and editors show that text."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from source_tree import source_files


@cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """All classes of the package and of the kernels by name."""
    found = defaultdict(list)
    for file in source_files():
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


def ancestors(kind: ast.ClassDef, seen: set[int]) -> Iterator[ast.ClassDef]:
    """The classes that it derives from, of those in this repository."""
    for base in kind.bases:
        base = base.value if isinstance(base, ast.Subscript) else base
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        for found in classes().get(name, ()):
            if id(found) not in seen:
                seen.add(id(found))
                yield found
                yield from ancestors(found, seen)


def says_nothing(kind: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    """The public methods without a text of their own or of a class above."""
    for method in kind.body:
        if not isinstance(method, ast.FunctionDef) or method.name.startswith("_") or ast.get_docstring(method):
            continue
        if any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in method.decorator_list):
            continue
        above = (m for c in ancestors(kind, set()) for m in c.body if isinstance(m, ast.FunctionDef))
        if not any(m.name == method.name and ast.get_docstring(m) for m in above):
            yield method


def test_every_public_method_is_documented() -> None:
    missing = [
        f"{kind.name}.{method.name}"
        for file in source_files()
        for kind in file.tree.body
        if isinstance(kind, ast.ClassDef) and not kind.name.startswith("_")
        for method in says_nothing(kind)
    ]
    assert not missing, f"say what these do: {missing}"


def test_it_would_be_seen() -> None:
    kind = ast.parse("class A(Leaf):\n    def load(self): ...\n    def other(self): ...").body[0]
    assert isinstance(kind, ast.ClassDef)
    assert [method.name for method in says_nothing(kind)] == ["other"]
