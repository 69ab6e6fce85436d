"""The layers of docs/architecture.md and the other rules about what a file may contain."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict

import pytest
from source_tree import FOLDERS, KERNELS, PACKAGE, ROOT, Import, SourceFile, source_files, starts_with

MAX_LINES = 500

# Higher layers import lower ones. Packages of one layer do not import each other, except for WITHIN_LAYER.
LAYERS = {
    "core": 0,
    "shm": 1,
    "comm": 1,
    "cluster_resolver": 1,
    "values": 1,
    "runtime": 2,
    "ops": 2,
    "gradients": 3,
    "cross_device_ops": 3,
    "elastic": 3,
    "input": 3,
    "monitoring": 3,
    "variables": 3,
    "parameter_server": 3,
    "strategies": 4,
    "checkpoint": 5,
    "coordinator": 5,
    "train": 5,
    "nn": 5,
    "config": 5,
    "functions": 5,
    "model_parallel": 5,
    "testing": 6,
    "integrations": 6,
    "launch": 6,
    "doctor": 6,
    "compare_aggregation": 6,
    "cli": 7,
}
WITHIN_LAYER = {
    ("comm", "shm"),
    ("runtime", "ops"),
    ("gradients", "variables"),
    ("gradients", "cross_device_ops"),
    ("variables", "cross_device_ops"),
    ("parameter_server", "variables"),
    ("elastic", "variables"),
    ("elastic", "gradients"),
    ("train", "checkpoint"),
}
# Public names only: they import what they re-export, and nothing inside imports them.
REEXPORTS = {"", "compat", "data", "distribute", "experimental", "tpu"}

# Writes files with torch.distributed.checkpoint, and does not communicate.
CHECKPOINT_STORAGE = f"{PACKAGE}.checkpoint.dcp"
# Looks up private names for comm, and does not communicate.
TORCH_INTERNALS = f"{PACKAGE}.core.torch_internals"

OPTIONAL_PACKAGES = (
    "triton",
    "llvmlite",
    "torch_xla",
    "accelerate",
    "ray",
    "lightning",
    "lightning_fabric",
    "keras",
    "matplotlib",
    "tensorboard",
    "zmq",
    "cloudpickle",
    "googleapiclient",
    "kubernetes",
)
# Modules of torch that load an optional package.
OPTIONAL_ALIASES = {"torch.utils.tensorboard": "tensorboard"}
ENVIRONMENT_READERS = {f"{PACKAGE}.core.env", f"{PACKAGE}.core.launch_env"}
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}


def part_of(module: str) -> str:
    """The sub-package or module under the root: ``comm`` for ``tfstyle_dist.comm.group``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported_part(imported: Import) -> str:
    """Like ``part_of``; a name that is not a sub-package was imported from the public root."""
    part = part_of(imported.module)
    if imported.base == PACKAGE and not ((ROOT / PACKAGE / part).is_dir() or (ROOT / PACKAGE / f"{part}.py").is_file()):
        return ""
    return part


def may_import(importer: str, imported: str) -> bool:
    if imported in REEXPORTS:
        return importer in REEXPORTS
    if importer in REEXPORTS or importer == imported:
        return True
    return LAYERS[importer] > LAYERS[imported] or (importer, imported) in WITHIN_LAYER


def package_files() -> list[SourceFile]:
    return [file for file in source_files() if starts_with(file.name, PACKAGE)]


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(file.name) for file in package_files()} - REEXPORTS
    assert parts <= LAYERS.keys(), f"give these a layer here and in docs/architecture.md: {parts - LAYERS.keys()}"


def test_imports_go_downward() -> None:
    wrong = []
    for file in package_files():
        importer = part_of(file.name)
        for imported in file.imports():
            if starts_with(imported.module, PACKAGE) and not may_import(importer, imported_part(imported)):
                target = imported_part(imported) or "the public root"
                wrong.append(f"{file.where}:{imported.line}: {importer or 'the public root'} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_only_ops_imports_the_kernels() -> None:
    wrong = [
        f"{file.where}:{imported.line}"
        for file in package_files()
        for imported in file.imports()
        if starts_with(imported.module, KERNELS) and part_of(file.name) != "ops"
    ]
    assert not wrong, f"import tfstyle_dist.ops instead of the kernels: {wrong}"


def test_kernels_stand_alone() -> None:
    wrong = [
        f"{file.where}:{imported.line}: {imported.module}"
        for file in source_files()
        for imported in file.imports()
        if starts_with(file.name, KERNELS) and starts_with(imported.module, PACKAGE)
    ]
    assert not wrong, f"kernels/ must not import the package: {wrong}"


def test_kernels_folder_is_a_namespace() -> None:
    assert not (FOLDERS[KERNELS] / "__init__.py").exists(), "an __init__.py would shadow another package named kernels"


@pytest.mark.parametrize("optional", OPTIONAL_PACKAGES)
def test_optional_package_is_imported_in_one_module(optional: str) -> None:
    importers: dict[str, set[int]] = defaultdict(set)
    for file in source_files():
        for imported in file.imports():
            aliases = {name for alias, name in OPTIONAL_ALIASES.items() if starts_with(imported.module, alias)}
            if starts_with(imported.module, optional) or optional in aliases:
                importers[file.where].add(imported.line)
    assert len(importers) <= 1, f"{optional} is imported in {dict(importers)}"


def attribute_lines(file: SourceFile, owner: str, names: set[str]) -> list[int]:
    """Lines with ``owner.name`` for one of ``names``, where ``owner`` is a plain name."""
    return [
        node.lineno
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == owner
        and node.attr in names
    ]


def test_environment_is_read_in_one_place() -> None:
    wrong = []
    for file in source_files():
        if file.name in ENVIRONMENT_READERS or part_of(file.name) == "testing":
            continue
        lines = attribute_lines(file, "os", ENVIRONMENT)
        lines += [i.line for i in file.imports() if i.base == "os" and i.module.removeprefix("os.") in ENVIRONMENT]
        wrong += [f"{file.where}:{line}" for line in lines]
    assert not wrong, f"read environment variables in core/env.py or core/launch_env.py only: {wrong}"


def test_torch_distributed_is_used_in_comm_only() -> None:
    wrong = []
    for file in source_files():
        if part_of(file.name) in {"comm", "testing"} or file.name in (CHECKPOINT_STORAGE, TORCH_INTERNALS):
            continue
        lines = attribute_lines(file, "torch", {"distributed"})
        lines += [i.line for i in file.imports() if starts_with(i.module, "torch.distributed")]
        wrong += [f"{file.where}:{line}" for line in lines]
    assert not wrong, f"use a WorkerGroup instead of torch.distributed: {wrong}"


def has_code(file: SourceFile) -> bool:
    """Whether a file holds more than a docstring, imports and ``__all__ = ...``."""
    simple = (ast.Expr, ast.Import, ast.ImportFrom, ast.Assign)
    return not all(isinstance(node, simple) for node in file.tree.body)


def test_annotations_are_not_evaluated() -> None:
    wrong = [
        file.where
        for file in package_files()
        if has_code(file) and "__future__.annotations" not in {i.module for i in file.imports()}
    ]
    assert not wrong, f"add `from __future__ import annotations`: {wrong}"


def test_architecture_page_names_existing_modules() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Interfaces")[1]
    modules = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", table)
    missing = [module for module in modules if not (FOLDERS[PACKAGE] / module).is_file()]
    assert modules
    assert not missing, f"docs/architecture.md names modules that do not exist: {missing}"


def test_texts_are_not_torn() -> None:
    """The parts of a long text fill their lines: a short one in the middle is left over from an edit."""
    wrong = []
    for file in source_files():
        before = None
        for token in tokenize.generate_tokens(
            iter(file.path.read_text(encoding="utf-8").splitlines(keepends=True)).__next__
        ):
            if token.type == tokenize.NL:
                continue
            if token.type == tokenize.STRING and before is not None and before.type == tokenize.STRING:
                whole_line = before.string[:-1].endswith("\\n") or before.end[0] == token.start[0]
                if before.end[1] < 60 and not whole_line:
                    wrong.append(f"{file.where}:{before.end[0]}: {before.string}")
            before = token
    assert not wrong, "fill the lines of these texts:\n" + "\n".join(wrong)


def test_files_are_short() -> None:
    folders = [*FOLDERS.values(), *(ROOT / name for name in ("tests", "examples", "benchmarks"))]
    sizes = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for folder in folders
        for path in folder.rglob("*.py")
    }
    long = {path: lines for path, lines in sizes.items() if lines > MAX_LINES}
    assert not long, f"split files of more than {MAX_LINES} lines: {long}"
