"""What is installed with the package alone, without any of its extras, is enough to train."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

PROGRAM = """
import importlib.metadata as metadata, re, sys

def names(requirements):
    # A marker about the machine may hold; one about an extra does not.
    return [re.match("[A-Za-z0-9._-]+", r)[0] for r in requirements or () if "extra ==" not in r]

installed = {re.sub("[-_.]+", "-", d.name).lower(): d for d in metadata.distributions()}
needed, left = set(), ["tfstyle-dist"]
while left:
    name = re.sub("[-_.]+", "-", left.pop()).lower()
    if name not in needed and name in installed:
        needed.add(name)
        left += names(installed[name].requires)
homes = metadata.packages_distributions()
hidden = {m for m, d in homes.items() if needed.isdisjoint(re.sub("[-_.]+", "-", n).lower() for n in d)}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}, which no requirement brings", name=name)

assert "pytest" in hidden and "torch" not in hidden, sorted(hidden)
sys.meta_path.insert(0, Hide())
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
print("trained")
"""


def test_what_the_package_requires_is_enough() -> None:
    try:
        importlib.metadata.distribution("tfstyle_dist")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, so that it is not known what it requires")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "trained"
