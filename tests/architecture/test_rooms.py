"""What holds in every room: no import circles, short files, no private names of others; and the walks of the page."""

from __future__ import annotations

import ast
import re
from collections import defaultdict

from source_tree import PACKAGE, ROOT, SourceFile, source_files, starts_with

MAX_LINES = 300
STILL_LONG: dict[str, int] = {}
"""Files that are to be divided yet, and how long they may be until then; nothing is added here."""


def room_files() -> list[SourceFile]:
    return [file for file in source_files() if starts_with(file.name, PACKAGE)]


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {file.name for file in room_files()}
    imports: dict[str, set[str]] = defaultdict(set)
    for file in room_files():
        top = {node.lineno for node in file.tree.body if isinstance(node, ast.Import | ast.ImportFrom)}
        for imported in file.imports():
            if imported.line in top:
                imports[file.name].add(imported.module if imported.module in names else imported.base)
    circles = []
    for start in sorted(names):
        reached, left = set(), [start]
        while left:
            for found in imports[left.pop()] - reached:
                reached.add(found)
                left.append(found)
        if start in reached:
            circles.append(start)
    assert not circles, f"these modules import themselves by way of others: {circles}"


def test_files_are_short() -> None:
    long = {}
    for file in source_files():
        lines = len(file.path.read_text(encoding="utf-8").splitlines())
        if lines > STILL_LONG.get(file.where.partition("/")[2], MAX_LINES):
            long[file.where] = lines
    assert not long, f"divide files of more than {MAX_LINES} lines: {long}"


def test_the_list_of_long_files_gets_shorter() -> None:
    lengths = {f.where.partition("/")[2]: len(f.path.read_text(encoding="utf-8").splitlines()) for f in source_files()}
    short = [name for name in STILL_LONG if lengths.get(name, 0) <= MAX_LINES]
    assert not short, f"these need no exception any more: {short}"


def test_private_names_stay_in_their_module() -> None:
    wrong = []
    for file in room_files():
        for imported in file.imports():
            name = imported.module.rpartition(".")[2]
            if starts_with(imported.module, PACKAGE) and name.startswith("_") and not name.startswith("__"):
                wrong.append(f"{file.where}:{imported.line}: {name}")
    assert not wrong, f"make these public or move what uses them: {wrong}"


def test_the_stops_of_the_walks_exist() -> None:
    """Each row of a walk on the architecture page names a file and a function in it."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    stops = re.findall(r"^\| \d+ \| `([a-z_/]+\.py)` \| `([A-Za-z_.]+)` \|", page, re.MULTILINE)
    assert stops
    missing = []
    for path, function in stops:
        owner, _, name = function.rpartition(".")
        file = ROOT / PACKAGE / path
        body = ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
        if owner:
            body = [n for node in body if isinstance(node, ast.ClassDef) and node.name == owner for n in node.body]
        if not any(isinstance(node, ast.FunctionDef) and node.name == name for node in body):
            missing.append(f"{path}: {function}")
    assert not missing, f"docs/architecture.md names stops that do not exist: {missing}"


def test_every_module_of_elastic_jobs_is_in_the_table() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| folder of `elastic/` |")[2].partition("\n\n")[0]
    named, folder = [], ""
    for place, modules in re.findall(r"^\|([^|]*)\|([^|]*\.py`) \|", table, re.MULTILINE):
        folder = place.strip(" `") or folder
        named += [folder + module for module in re.findall(r"`(\w+\.py)`", modules)]
    room = ROOT / PACKAGE / "elastic"
    there = {str(path.relative_to(room)) for path in room.rglob("*.py") if path.name != "__init__.py"}
    assert sorted(named) == sorted(there), f"in one of both only: {sorted(set(named) ^ there)}"


def test_folders_of_elastic_jobs_use_those_below_them() -> None:
    below = {
        "steps": {"membership", "state", "connections"},
        "membership": {"connections"},
        "state": {"connections"},
        "connections": set(),
    }
    wrong = []
    for file in room_files():
        _, room, *rest = [*file.name.split("."), ""]
        if room != "elastic" or len(rest) < 3:
            continue
        allowed = {"options", rest[0], *below[rest[0]]}
        wrong += [
            f"{file.where}:{imported.line}: {imported.module}"
            for imported in file.imports()
            if starts_with(imported.base, f"{PACKAGE}.elastic") and [*imported.base.split("."), ""][2] not in allowed
        ]
    assert not wrong, "\n".join(wrong)
