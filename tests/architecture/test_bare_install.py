"""What is installed with the package alone, without any of its extras, is enough to import it and to train."""

from __future__ import annotations

import ast
import configparser
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from source_tree import ROOT

PROGRAM = """
import sys
import torch
import tfstyle_dist as tfd

for strategy in (tfd.MirroredStrategy(["cpu:0", "cpu:1"]), tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])):
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        return x.sum()

    loader = torch.utils.data.DataLoader(torch.ones(10, 2), batch_size=4, shuffle=True)
    sums = [strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)
            for x in strategy.experimental_distribute_dataset(loader)]
    assert float(sum(sums)) == 20.0
    strategy.close()
own = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] in ("tfstyle_dist", "tfstyle_dist_kernels")]
print(*[m.__file__ for m in own if m.__file__], sep="\\n")
"""
OWN = {"tfstyle_dist", "tfstyle_dist_kernels"}


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """The packages that a module imports when it is imported itself, but for what it can do without."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.unparse(node.test):
            yield from imported([*node.body, *node.orelse])
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from imported(node.body)


def test_what_the_package_requires_is_enough() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = {re.split("[<>=]", line)[0] for line in config["options"]["install_requires"].split()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    files = [Path(line) for line in done.stdout.split()]
    assert len(files) > 50
    known = required | OWN | sys.stdlib_module_names
    for file in files:
        unknown = set(imported(ast.parse(file.read_text(encoding="utf-8")).body)) - known
        assert not unknown, f"{file} imports {unknown}, which install_requires of setup.cfg does not name"
