"""What is wrapped in other packages stands in docs/architecture.md, and nothing is replaced in any other way."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import pytest
from source_tree import ROOT, SourceFile, source_files

from tfstyle_dist.core import torch_internals

OTHERS = {"accelerate", "builtins", "keras", "logging", "os", "signal", "sys", "threading", "torch", "warnings"}
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What is changed in other packages")[2].partition("\n## ")[0]
NAMES = {"torch_internals.RUN_BACKWARD": torch_internals.RUN_BACKWARD}
NAMES |= {f"FUNC_WRAPS['{module}']": name for module, name in torch_internals.FUNC_WRAPS.items()}
# Of names that a comprehension wraps.
TABLES = {name: getattr(torch_internals, name) for name in ("LIST_WRITES", "UNMARKED_WRITES")}


def wrapped(file: SourceFile) -> Iterator[str]:
    """The names of the functions that a file wraps."""
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "DataPatch":
            yield "data"
        elif node.func.id in ("Patch", "wrap") and len(node.args) == 3:
            name = node.args[1]
            if isinstance(name, ast.Constant):
                yield str(name.value)
            else:
                yield from (
                    keys(file, node, ast.unparse(name))
                    or named(file, node)
                    or [NAMES.get(ast.unparse(name), ast.unparse(name))]
                )


def keys(file: SourceFile, call: ast.Call, variable: str) -> list[str]:
    """What a variable of a loop around a call becomes, where the loop goes over a dict of the same file."""
    loops = [node for node in ast.walk(file.tree) if isinstance(node, ast.For) and call in ast.walk(node)]
    tables = {ast.unparse(loop.iter) for loop in loops if re.match(rf"\(?{variable}\b", ast.unparse(loop.target))}
    return [
        ast.literal_eval(key)
        for node in file.tree.body
        if isinstance(node, ast.Assign) and f"{ast.unparse(node.targets[0])}.items()" in tables
        for key in (node.value.keys if isinstance(node.value, ast.Dict) else ())
        if key is not None
    ]


def named(file: SourceFile, call: ast.Call) -> list[str]:
    """What the names in a table of ``torch_internals`` begin with, where a comprehension over it makes the call."""
    made = [node for node in ast.walk(file.tree) if isinstance(node, ast.ListComp) and node.elt is call]
    return [TABLES[ast.unparse(node.generators[0].iter)][0] for node in made]


def rows(table: str) -> Iterator[tuple[set[str], set[str]]]:
    """Of each row the names in its first column and the files in its second, with their folders in the package."""
    for row in table.splitlines():
        if not row.startswith("| `"):
            continue
        functions, files = (re.findall(r"`([^`]+)`", column) for column in row.split("|")[1:3])
        folder = PurePosixPath(files[0]).parent  # a second file stands there without its folder
        yield (
            {name.rpartition(".")[2] for name in functions},
            {str(folder / PurePosixPath(name).name) for name in files},
        )


def missing_in(table: str) -> list[str]:
    """What is wrapped and stands in no row with its file, and what a row says that nobody wraps."""
    found = [
        (name, path)
        for file in source_files()
        if (path := file.where.partition("/")[2]) not in ("core/process_hooks.py", "integrations/keras/wrapping.py")
        for name in wrapped(file)
    ]
    listed = list(rows(table))
    wrong = [
        f"{path}: {name}"
        for name, path in found
        if not any(name in functions and path in files for functions, files in listed)
    ]
    for functions, files in listed:
        left = files - {path for name, path in found if name in functions}
        wrong += [f"{path}, which wraps none of {sorted(functions)}" for path in sorted(left)]
    return wrong


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
    wrong = missing_in(TABLE)
    assert not wrong, f"list these in docs/architecture.md, with the reason: {wrong}"


@pytest.mark.parametrize(
    ("part", "instead", "name"),
    [
        ("`keras.Model.compile`, `fit`, `evaluate`, ", "", "integrations/keras/methods.py: fit"),
        ("| `step` of each class", "| each class", "gradients/step_hooks.py: step"),
        ("| `torch.Tensor.data` ", "| ", "variables/content/data_writes.py: data"),
        ("`gradients/backward_calls.py`", "`gradients/other.py`", "gradients/backward_calls.py: _engine_run_backward"),
    ],
)
def test_a_row_that_lacks_something_is_seen(part: str, instead: str, name: str) -> None:
    assert part in TABLE
    assert name in missing_in(TABLE.replace(part, instead))


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
