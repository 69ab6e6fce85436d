"""The public names and parameters are those of TensorFlow, as ``api_table.py`` claims."""

from __future__ import annotations

import dis
import enum
import importlib
import importlib.util
import inspect
import json
import re
from fnmatch import fnmatchcase
from typing import Any

import pytest
from api_table import FOLDER, IN, LEFT_OUT, NO_DEFAULT, REQUIRED, SYMBOLS, port_path
from source_tree import ROOT

from tfstyle_dist.core.absent_name import AbsentName

DATA = ROOT / "tests" / "data"
RECORDED: dict[str, Any] = json.loads((DATA / "tf_api_surface.json").read_text(encoding="utf-8"))
V1_OPTIMIZERS: dict[str, Any] = json.loads((DATA / "tf_v1_optimizers.json").read_text(encoding="utf-8"))
SURFACE: dict[str, dict[str, Any]] = {
    **RECORDED["symbols"],
    **RECORDED["compat_v1_distribute_symbols"],
    **V1_OPTIMIZERS["symbols"],
}
STATUS = (ROOT / "docs" / "status.md").read_text(encoding="utf-8")
MISSING = object()


def resolve(path: str) -> Any:
    """The object at a dotted path, or ``MISSING``; an attribute goes before a module of the same name."""
    root, *names = path.split(".")
    found: Any = importlib.import_module(root)
    for name in names:
        inside = found.__name__ if inspect.ismodule(found) else None
        found = getattr(found, name, MISSING)
        if found is MISSING and inside and importlib.util.find_spec(f"{inside}.{name}"):
            found = importlib.import_module(f"{inside}.{name}")
    return found


def own_names(owner: type) -> set[str]:
    """The members that the package itself gives a class, with the attributes that ``__init__`` sets."""
    names: set[str] = set()
    for base in owner.__mro__:
        if base.__module__.partition(".")[0] != "tfstyle_dist":
            continue
        names |= {name for name, value in vars(base).items() if not isinstance(value, AbsentName)}
        names |= {*inspect.get_annotations(base)}
        if inspect.isfunction(init := vars(base).get("__init__")):
            names |= {step.argval for step in dis.get_instructions(init) if step.opname == "STORE_ATTR"}
    return names


def has_member(owner: type, name: str) -> bool:
    """Whether a class has a member, be it its own or torch's."""
    return hasattr(owner, name) or name in own_names(owner)


def members_of(symbol: str) -> set[str]:
    """The members of a TensorFlow class that the table must list."""
    entry = SURFACE[symbol]
    if entry["kind"] == "enum":
        return set()
    names = {name for group in ("methods", "names", "constants") for name in entry.get(group, ())}
    return {"__init__" if name == "__new__" else name for name in names} | properties_of(symbol)


def properties_of(symbol: str) -> set[str]:
    """The properties of a TensorFlow class."""
    return {entry["name"] for entry in SURFACE[symbol].get("properties", ())}


def parameters_of(symbol: str, name: str) -> list[dict[str, Any]] | None:
    """The parameters of a method of a TensorFlow class; ``None`` for what is no method."""
    methods = SURFACE[symbol].get("methods", {})
    if name == "__init__" and "__init__" not in methods:
        name = "__new__"
    found = methods.get(name)
    return None if found is None else found["params"]


def status_of(symbol: str) -> str:
    """The entry of the symbol itself."""
    entry = SYMBOLS[symbol]
    return entry if isinstance(entry, str) else IN


def left_out(where: str) -> set[str]:
    return {name for pattern, names in LEFT_OUT.items() if fnmatchcase(where, pattern) for name in names}


def check_parameters(where: str, theirs: list[dict[str, Any]], ours: Any) -> None:
    """Our parameters are TensorFlow's without those left out, in its order; ours come last or by keyword."""
    signature = inspect.signature(ours)
    parameters = [p for p in signature.parameters.values() if p.name not in {"self", "cls"}]
    required = {p["name"]: "default" not in p for p in theirs if p["name"] not in {"self", "cls"}}
    if parameters and parameters[0].name == "strategy" and "strategy" not in required:
        del parameters[0]  # a method that is a function of the strategy
    expected = [name for name in required if name not in left_out(where)]
    shared = [p for p in parameters if p.name in required]
    assert [p.name for p in shared] == expected, f"{where}{signature} should take {expected}; or see LEFT_OUT"
    not_optional = [p.name for p in shared if p.default is p.empty and not required[p.name] and p.kind not in VARIADIC]
    assert not set(not_optional) - REQUIRED.get(where, set()), f"{where}: {not_optional} have a default in TensorFlow"
    keyword_only = [p.name for p in shared if p.kind is p.KEYWORD_ONLY]
    assert not keyword_only, f"{where}: {keyword_only} can be passed by position in TensorFlow"
    last = max((parameters.index(p) for p in shared), default=-1)
    early = [p.name for p in parameters[:last] if p.name not in required and p.kind is not p.KEYWORD_ONLY]
    assert not early, f"{where}: our own parameters {early} must come after TensorFlow's or be keyword-only"


OPERATORS = ("__eq__", "__ne__")  # their operand has no name
VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
PRESENT = [symbol for symbol in SYMBOLS if status_of(symbol) == IN]
ABSENT = [symbol for symbol in SYMBOLS if status_of(symbol) != IN]
CLASSES = [symbol for symbol, entry in SYMBOLS.items() if isinstance(entry, dict)]


def test_table_lists_every_symbol() -> None:
    assert SYMBOLS.keys() == SURFACE.keys()


@pytest.mark.parametrize("symbol", CLASSES)
def test_table_lists_every_member(symbol: str) -> None:
    entry = SYMBOLS[symbol]
    assert isinstance(entry, dict)
    assert entry.keys() == members_of(symbol)


@pytest.mark.parametrize("symbol", [s for s in PRESENT if s not in CLASSES])
def test_table_gives_a_class_its_members(symbol: str) -> None:
    assert not members_of(symbol) - SURFACE[symbol].get("constants", {}).keys(), "list its members one by one"


def test_every_status_is_known() -> None:
    statuses = {status_of(symbol) for symbol in SYMBOLS}
    statuses |= {status for entry in SYMBOLS.values() if isinstance(entry, dict) for status in entry.values()}
    statuses |= {status for names in LEFT_OUT.values() for status in names.values()}
    assert all(re.fullmatch(r"in|(planned|n/a):.+", status) for status in statuses), statuses


def test_nothing_is_planned_any_more() -> None:
    planned = {symbol for symbol in SYMBOLS if status_of(symbol).startswith("planned:")}
    assert planned == set()
    inside = [entry for entry in SYMBOLS.values() if isinstance(entry, dict)]
    statuses = [status for names in (*inside, *LEFT_OUT.values()) for status in names.values()]
    assert not any(status.startswith("planned:") for status in statuses)


@pytest.mark.parametrize("symbol", PRESENT)
def test_symbol_is_there(symbol: str) -> None:
    theirs, ours = SURFACE[symbol], resolve(port_path(symbol))
    assert ours is not MISSING, f"{port_path(symbol)} is missing"
    if theirs["kind"] == "enum":
        assert issubclass(ours, enum.Enum)
        own = {member.name: member.value for member in ours}
        assert own == theirs["members"]
        aliases = {name: member.name for name, member in ours.__members__.items() if name != member.name}
        assert theirs["aliases"].items() <= aliases.items()
    elif theirs["kind"] == "function":
        check_parameters(symbol, theirs["params"], ours)
    else:
        assert inspect.isclass(ours)
        constants = theirs.get("constants", {})
        assert {name: getattr(ours, name) for name in constants} == constants


def test_symbols_left_out_are_not_there() -> None:
    there = {symbol: status_of(symbol) for symbol in ABSENT if resolve(port_path(symbol)) is not MISSING}
    assert not there, f"these exist: change their entries {there}"


@pytest.mark.parametrize("symbol", CLASSES)
def test_members(symbol: str) -> None:
    ours, table = resolve(port_path(symbol)), SYMBOLS[symbol]
    assert isinstance(table, dict)
    assert inspect.isclass(ours), f"{port_path(symbol)} is missing"
    problems = []
    for name, status in table.items():
        where = f"{symbol}.{name}"
        if status != IN:
            if not name.startswith("__") and name in own_names(ours):
                problems.append(f"{where} exists: change its entry {status!r}")
        elif not has_member(ours, name):
            problems.append(f"{where} is missing")
        elif name not in OPERATORS and (parameters := parameters_of(symbol, name)) is not None:
            try:
                check_parameters(where, parameters, ours if name == "__init__" else getattr(ours, name))
            except AssertionError as error:
                problems.append(str(error).splitlines()[0])
        elif name in properties_of(symbol) and inspect.isroutine(getattr(ours, name, None)):
            problems.append(f"{where} is a property in TensorFlow, not a method")
    assert not problems, "\n".join(problems)


def test_left_out_parameters_belong_to_something() -> None:
    wheres = {f"{symbol}.{name}" for symbol in CLASSES for name in members_of(symbol)} | set(PRESENT)
    unused = [pattern for pattern in LEFT_OUT if not any(fnmatchcase(where, pattern) for where in wheres)]
    assert not unused, f"LEFT_OUT names nothing that is in the package: {unused}"


def differences() -> dict[str, set[str]]:
    """What is not as in TensorFlow, by its reason."""
    found: dict[str, set[str]] = {FOLDER: {"gradients"}, NO_DEFAULT: set().union(*REQUIRED.values())}
    tables = [{symbol.rpartition(".")[2]: entry} for symbol, entry in SYMBOLS.items() if isinstance(entry, str)]
    tables += [entry for entry in SYMBOLS.values() if isinstance(entry, dict)]
    for table in (*tables, *LEFT_OUT.values()):
        for name, status in table.items():
            if status != IN:
                found.setdefault(status, set()).add(name)
    return {reason.partition(":")[2]: names for reason, names in found.items()}


def test_the_status_page_lists_every_difference_with_its_reason() -> None:
    section = STATUS.split("## What of TensorFlow's surface is left out")[1].split("## ")[0]
    rows = re.findall(r"^\| ([^|`]+) \| (`[^|]+) \|$", section, flags=re.MULTILINE)
    assert {reason: set(re.findall(r"`([^`]+)`", names)) for reason, names in rows} == differences()


def test_tensorflow_paths_name_the_same_objects() -> None:
    for symbol in SYMBOLS:
        if symbol.startswith("tf.distribute."):
            short = f"tfstyle_dist.{symbol.removeprefix('tf.distribute.')}"
            assert resolve(short) is resolve(port_path(symbol)), short
        if symbol.startswith("tf.compat.v1.distribute.") and symbol.replace("compat.v1.", "") in SYMBOLS:
            assert resolve(port_path(symbol)) is resolve(port_path(symbol.replace("compat.v1.", "")))
