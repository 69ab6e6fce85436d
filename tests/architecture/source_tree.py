"""Reads the imports of the package's source files without importing them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tfstyle_dist"
KERNELS = "tfstyle_dist_kernels"
FOLDERS = {PACKAGE: ROOT / PACKAGE, KERNELS: ROOT / "kernels"}


@dataclass(frozen=True)
class Import:
    """One imported module, or one name imported from a module.

    Attributes:
        module: the absolute dotted path, such as ``tfstyle_dist.core.env`` or ``torch.distributed.Store``.
        base: the module a ``from`` names; equal to ``module`` for a plain import.
        line: where it stands.
    """

    module: str
    base: str
    line: int


@dataclass(frozen=True)
class SourceFile:
    """A parsed file of the package or of the kernels."""

    path: Path
    name: str
    tree: ast.Module

    @property
    def where(self) -> str:
        """The path as a message shows it."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def is_package(self) -> bool:
        """Whether the file is an ``__init__.py``."""
        return self.path.name == "__init__.py"

    def imports(self) -> list[Import]:
        """Every import of the file, also those inside functions and under ``TYPE_CHECKING``."""
        found: list[Import] = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                found += [Import(alias.name, alias.name, node.lineno) for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                base = self._absolute(node.module, node.level)
                found += [Import(f"{base}.{alias.name}", base, node.lineno) for alias in node.names]
        return found

    def _absolute(self, module: str | None, level: int) -> str:
        if level == 0:
            assert module is not None
            return module
        parts = self.name.split(".")
        keep = len(parts) - level + (1 if self.is_package else 0)
        return ".".join([*parts[:keep], *([module] if module else [])])


@cache
def source_files() -> tuple[SourceFile, ...]:
    """All Python files of the package and of the kernels."""
    files = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = list(path.relative_to(folder).with_suffix("").parts)
            if parts[-1] == "__init__":
                parts.pop()
            files.append(SourceFile(path, ".".join([package, *parts]), ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(files)


def starts_with(module: str, prefix: str) -> bool:
    """Whether ``module`` is ``prefix`` or lies inside it."""
    return module == prefix or module.startswith(f"{prefix}.")
