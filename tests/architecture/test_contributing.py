"""What CONTRIBUTING.md says of adding something is done here, each with the smallest real example."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from source_tree import ROOT
from torch import nn

import tfstyle_dist as td
from tfstyle_dist import ops
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices, env, torch_internals
from tfstyle_dist.gradients.reducer import GradientReducer, GradientState
from tfstyle_dist.ops import backends
from tfstyle_dist.parameter_server.transports import available
from tfstyle_dist.parameter_server.transports.zeromq import ZeroMQTransport
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.extended import StrategyExtended
from tfstyle_dist.strategies.mirrored import MirroredVariables
from tfstyle_dist.testing.runner import run_script
from tfstyle_dist_kernels import reference

pytestmark = pytest.mark.timeout(120)
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
KINDS = ("A strategy", "A transport", "An exchange", "A kernel", "A device kind")


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_has_five_lines_that_name_files_that_exist(kind: str) -> None:
    section = PAGE.partition(f"### {kind}\n")[2].partition("\n#")[0]
    assert re.findall(r"^(\d)\.", section, re.MULTILINE) == list("12345")
    folders = [ROOT / name for name in (".", "tfstyle_dist", "tfstyle_dist/parameter_server", "tests/parameter_server")]
    folders.append(ROOT / "benchmarks")
    for path in re.findall(r"`([\w/]+(?:\.py|\.md|/))`", section):
        assert any((folder / path).exists() for folder in folders), path


# ---- a strategy -----------------------------------------------------------------------------------------------------


class Twins(MirroredVariables):
    """Two replicas on the CPU."""

    def __init__(self) -> None:
        places = devices.parse_replica_devices(["cpu:0", "cpu:1"])
        super().__init__(StrategyExtended(Worker(places, SingleGroup(), env.timeout())))


def train(strategy: td.Strategy, rows: torch.Tensor) -> torch.Tensor:
    """The weight after a step on one row for each replica."""
    with strategy.scope():
        model = nn.Linear(2, 1, bias=False)
        nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset([rows]):
        strategy.run(step, args=(batch,))
    return model.weight.detach().clone()


ROWS = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


def on_one_device() -> torch.Tensor:
    with td.OneDeviceStrategy("cpu") as strategy:
        return train(strategy, ROWS)


@pytest.mark.cpu_only("the strategy says which devices it has")
def test_a_strategy() -> None:
    with Twins() as strategy:
        assert strategy.num_replicas_in_sync == 2
        torch.testing.assert_close(train(strategy, ROWS), on_one_device())
        with strategy.scope():
            assert isinstance(td.Variable(1.0), td.distribute.DistributedValues)


# ---- a transport ----------------------------------------------------------------------------------------------------

sent: list[int] = []


class Counted(ZeroMQTransport):
    """ZeroMQ, with a list of the sizes of its messages; the server's end is that of ZeroMQ."""

    name = "counted ZeroMQ"

    @classmethod
    def open(cls, link: Any, server: dict[str, Any]) -> Counted | None:
        return cls(link) if server else None

    def send_message(self, parts: Sequence[Any]) -> None:
        sent.append(sum(len(part) for part in parts))
        super().send_message(parts)


def test_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "TRANSPORTS", (Counted,))
    sent.clear()
    with td.Server.local_cluster(workers=1, ps=1) as cluster, td.ParameterServerStrategy(cluster) as strategy:
        with strategy.scope():
            variable = td.Variable(torch.zeros(4))
        variable.assign_add(torch.ones(4))
        assert variable.numpy().tolist() == [1, 1, 1, 1]
        assert strategy.servers.links[0].transport_name == "counted ZeroMQ"
    assert sent


# ---- an exchange ----------------------------------------------------------------------------------------------------


class OneByOne(GradientReducer):
    """Each gradient is a message of its own, sent when the pass is over."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._noted: dict[int, GradientState] = {}
        self.messages = 0

    def on_gradient(self, parameter: torch.Tensor, state: GradientState) -> None:
        if not self._noted:
            torch_internals.queue_end_of_backward(self._exchange)
        self._noted[id(state)] = state

    def in_same_pass(self, state: GradientState) -> bool:
        return id(state) in self._noted

    def _exchange(self) -> None:
        noted, self._noted = sorted(self._noted.values(), key=lambda state: state.record.number), {}
        for state in noted:
            part = self.contribution(state)
            assert part is not None
            total, old, divisor = part.detach().reshape(-1).clone(), self.old_part(state), self.divisor(state.record)
            self.worker.group.all_reduce(total, f"gradient {state.record.number}")
            self.messages += 1
            total = (total if divisor is None else total / divisor).reshape(part.shape)
            state.record.components[0].grad = total if old is None else total + old
            self.settle(state)


class Talkative(td.MirroredStrategy):
    """Its gradients come together one by one."""

    def make_reducer(self) -> GradientReducer:
        return OneByOne(self.worker, self.parameter_store)


@pytest.mark.distributed(workers=2, timeout=90, deadline=30)
def test_an_exchange(rank: int) -> None:
    with Talkative() as strategy:
        found = train(strategy, ROWS)
        assert isinstance(strategy.gradient_reducer, OneByOne)
        assert strategy.gradient_reducer.messages == 1
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    model(ROWS).square().mean().backward()
    assert model.weight.grad is not None
    torch.testing.assert_close(found, model.weight.detach() - 0.1 * model.weight.grad)


# ---- a kernel -------------------------------------------------------------------------------------------------------


def test_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def sum_lists(contributions: Any, outs: Any, order: str, *, divisor: Any = None) -> None:
        calls.append(order)
        reference.sum_lists(contributions, outs, order, divisor=divisor)

    kernel = types.ModuleType("tfstyle_dist_kernels.made_up_sum")
    kernel.unavailable, kernel.sum_lists = lambda: None, sum_lists  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    monkeypatch.setitem(backends.MODULES, "made up", "made_up_sum")  # type: ignore[index]
    monkeypatch.setattr(backends, "NAMES", ("auto", *backends.MODULES))
    parts = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, 0.25]), torch.tensor([3.0, 3.0])]
    found = ops.aggregate(parts, td.AggregationMethod.EXPERIMENTAL_TREE, backend="made up")
    assert torch.equal(found, reference.tree(parts))
    assert calls == ["tree"]


# ---- a device kind --------------------------------------------------------------------------------------------------

KIND = """
import types
import torch

torch.utils.rename_privateuse1_backend("abacus")
module = types.ModuleType("torch.abacus")
module.is_available, module.device_count = lambda: True, lambda: 2
torch._register_device_module("abacus", module)

from tfstyle_dist.core import devices

devices.ACCELERATORS += ("abacus",)
assert [str(d) for d in devices.find_local_devices()] == ["abacus:0", "abacus:1"], devices.find_local_devices()
assert devices.parse("/device:ABACUS:1").torch_device == torch.device("abacus", 1)
assert devices.accelerator("abacus") is module
devices.parse_replica_devices(["abacus:0", "abacus:1"])
try:
    devices.parse_replica_devices(["abacus:2"])
except ValueError as error:
    print(error)
"""


def test_a_device_kind() -> None:
    done = run_script(["-c", KIND])
    assert done.returncode == 0, done.stderr
    assert "Device abacus:2 was asked for, but this process sees 2 ABACUS device(s)." in done.stdout
