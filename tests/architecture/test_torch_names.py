"""Private names of torch stand in ``core/torch_internals.py`` alone, where each is looked up and explained."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from source_tree import KERNELS, PACKAGE, ROOT, SourceFile, source_files, starts_with

HOME = f"{PACKAGE}.core.torch_internals"
# The kernels stand alone. tests/core/test_torch_internals.py has a test of these too.
KERNEL_NAMES = {"_foreach_add", "_foreach_add_"}
# Attributes of the package's own objects that happen to be called like some of torch.
OWN = {("tfstyle_dist/coordinator/references.py", "_values"), ("tfstyle_dist/variables/adoption.py", "_modules")}
LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def private_attributes() -> frozenset[str]:
    """The private attributes of the objects of torch that the package is handed."""
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    loader = torch.utils.data.DataLoader([1])
    objects = (
        module, module.weight, optimizer, loader, iter(loader), torch.amp.GradScaler("cpu"), torch.Generator(),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1), torch.autograd.Variable, torch.autograd.Function,
        (module.weight * 1).grad_fn, torch.utils.data.dataloader._MultiProcessingDataLoaderIter,
        torch.distributed.ProcessGroup, torch.distributed.Store, torch.distributed.Work, torch.autograd.profiler,
    )  # fmt: skip
    names = {name for thing in objects for name in (*dir(thing), *getattr(thing, "__dict__", ()))}
    return frozenset({name for name in names if is_private(name)} | {"_local_tensor"})  # of DTensor


def names_from_torch(file: SourceFile) -> set[str]:
    """What the names are called that a file has imported from torch."""
    found = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            found |= {a.asname or "torch" for a in node.names if starts_with(a.name, "torch")}
        elif isinstance(node, ast.ImportFrom) and starts_with(node.module or "", "torch"):
            found |= {a.asname or a.name for a in node.names}
    return found


def chain(node: ast.expr) -> list[str]:
    """``["torch", "_C", "name"]`` for ``torch._C.name``; begins with an empty text unless it starts at a plain name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *names]


def looked_up(node: ast.Call | ast.Subscript) -> Iterator[str]:
    """The names that are looked up by texts, as in ``getattr(tensor, "_version")`` or ``vars(module)["_buffers"]``."""
    given: list[ast.expr] = [node.slice] if isinstance(node, ast.Subscript) else []
    if isinstance(node, ast.Call) and chain(node.func)[-1] in LOOKUPS:
        given = node.args
    yield from (part.value for part in given if isinstance(part, ast.Constant) and isinstance(part.value, str))


def private_uses(file: SourceFile) -> Iterator[tuple[int, str]]:
    """The private names of torch in a file, and their lines."""
    for imported in file.imports():
        if starts_with(imported.module, "torch") and any(map(is_private, imported.module.split("."))):
            yield imported.line, imported.module
    roots = names_from_torch(file)
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root, *_ = names = chain(node)
            if root in roots or (node.attr in private_attributes() and names[:-1] not in (["self"], ["cls"])):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call | ast.Subscript):
            yield from ((node.lineno, name) for name in looked_up(node) if name in private_attributes())


def test_private_names_of_torch_are_used_in_one_module() -> None:
    wrong = [
        f"{file.where}:{line}: {name}"
        for file in source_files()
        if file.name != HOME
        for line, name in private_uses(file)
        if (file.where, name) not in OWN and not (starts_with(file.name, KERNELS) and name in KERNEL_NAMES)
    ]
    assert not wrong, "use a name of tfstyle_dist/core/torch_internals.py, or add one:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "import torch._inductor",
        "from torch.utils import _pytree",
        "from torch._C import name",
        "import torch\ntorch._foreach_mul_([], 2)",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "from torch import nn\nnn.Module._call_impl",
        "def f(tensor): return tensor._version",
        "def f(model): return model.inner._parameters",
        "def f(tensor): return getattr(tensor, '_version')",
        "def f(module): return vars(module)['_buffers']",
    ],
)
def test_the_rule_sees(line: str) -> None:
    path = source_files()[0].path
    assert list(private_uses(SourceFile(path, "tfstyle_dist.example", ast.parse(line))))


def traced_functions(file: SourceFile) -> list[str]:
    """Where a ``__torch_function__`` is not ``untraced``."""
    return [
        f"{file.where}:{node.lineno}"
        for node in ast.walk(file.tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__torch_function__"
        if "untraced" not in {ast.unparse(decorator) for decorator in node.decorator_list}
    ]


def test_no_class_lets_its_torch_function_be_traced() -> None:
    wrong = [where for file in source_files() for where in traced_functions(file)]
    assert not wrong, f"torch.compile makes wrong numbers of these, see core/untraced.py: {wrong}"
    tree = ast.parse("class A:\n    @classmethod\n    def __torch_function__(cls): ...")
    assert traced_functions(SourceFile(ROOT / "tfstyle_dist" / "made_up.py", "tfstyle_dist.made_up", tree))
