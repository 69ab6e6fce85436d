"""What is wrapped in other packages stands in docs/architecture.md, and nothing is replaced in any other way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from source_tree import ROOT, SourceFile, source_files

OTHERS = {"accelerate", "builtins", "keras", "logging", "os", "signal", "sys", "threading", "torch", "warnings"}
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What is changed in other packages")[2].partition("\n## ")[0]
NAMES = {"torch_internals.RUN_BACKWARD": "_engine_run_backward", "name": "predict_on_batch"}  # of a loop over a table


def wrapped(file: SourceFile) -> Iterator[str]:
    """The names of the functions that a file wraps."""
    for node in ast.walk(file.tree):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 3
        if is_call and node.func.id in ("Patch", "wrap"):
            name = node.args[1]
            text = name.value if isinstance(name, ast.Constant) else NAMES.get(ast.unparse(name), ast.unparse(name))
            yield str(text)


def owner(node: ast.expr) -> str:
    """What a chain of attributes begins with, such as ``torch`` of ``torch.nn.Module``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def replaced(file: SourceFile) -> Iterator[str]:
    """Assignments to attributes of other packages."""
    for node in ast.walk(file.tree):
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
        )
        for target in targets:
            if isinstance(target, ast.Attribute) and owner(target) in OTHERS:
                yield f"{file.where}:{node.lineno}: {ast.unparse(target)}"
        is_set = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "setattr"
        if is_set and owner(node.args[0]) in OTHERS and ast.unparse(node.args[0]) != "sys.modules[package]":
            yield f"{file.where}:{node.lineno}: {ast.unparse(node)}"


def test_what_is_wrapped_stands_in_the_table() -> None:
    missing, found = [], 0
    for file in source_files():
        path = file.where.partition("/")[2]
        if path in ("core/process_hooks.py", "integrations/keras/wrapping.py"):
            continue
        for name in wrapped(file):
            found += 1
            row = next((row for row in TABLE.splitlines() if name in row and path.rpartition("/")[2] in row), None)
            if row is None:
                missing.append(f"{file.where}: {name}")
    assert found >= 12
    assert not missing, f"list these in docs/architecture.md, with the reason: {missing}"


def test_nothing_is_replaced_in_another_way() -> None:
    wrong = [where for file in source_files() for where in replaced(file)]
    assert not wrong, f"use Patch of core/process_hooks.py: {wrong}"


def test_it_would_be_seen() -> None:
    lines = (
        "torch.nn.Linear.forward = mine",
        "setattr(keras.Model, 'fit', mine)",
        "Patch(torch.nn.Linear, 'forward', 0)",
    )
    file = SourceFile(ROOT / "tfstyle_dist" / "made_up.py", "tfstyle_dist.made_up", ast.parse("\n".join(lines)))
    assert len(list(replaced(file))) == 2
    assert list(wrapped(file)) == ["forward"]
