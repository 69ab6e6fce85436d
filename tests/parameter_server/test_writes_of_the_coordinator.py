"""What the coordinator's program writes to what is on the servers, in every way that torch has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

import tfstyle_dist as tfd

pytestmark = pytest.mark.timeout(90)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WRITES: dict[str, Callable[[Any, nn.Module], Any]] = {
    "data": lambda w, m: w.data.mul_(2),
    "data=": lambda w, m: setattr(w, "data", w.data * 2),
    "part of data": lambda w, m: w.data[0].mul_(2),
    "index of data": lambda w, m: w.data.__setitem__(0, 5.0),
    "view": lambda w, m: w.view(-1)[1:].mul_(2),
    "split": lambda w, m: w.split(1)[1].mul_(2),
    "detach": lambda w, m: w.detach().mul_(2),
    "set_": lambda w, m: w.set_(w.detach() * 2),
    "state_dict": lambda w, m: m.state_dict()["weight"].mul_(2),
    "constant_": lambda w, m: nn.init.constant_(w, 3.0),
    "normal_": lambda w, m: nn.init.normal_(w),
    "apply": lambda w, m: m.apply(lambda module: module.weight.data.normal_(0.0, 0.02)),
    "out": lambda w, m: torch.mul(w, 2, out=w),
    "vector": lambda w, m: nn.utils.vector_to_parameters(torch.arange(6.0), [w]),
    "later": lambda w, m: [view := w.data[0], w.mul_(2), view.mul_(2)],
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_writes_in_the_coordinators_program_reach_the_servers(cluster: Any, name: str) -> None:
    c = cluster(workers=1, ps=1)
    torch.manual_seed(0)
    with c.strategy.scope():
        model, other = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    c.coordinator.schedule(lambda: model.weight.detach()).fetch()
    alone = nn.Linear(3, 2, bias=False)
    with torch.no_grad():
        alone.weight.copy_(model.weight)
        for net in (model, alone):
            torch.manual_seed(1)
            WRITES[name](net.weight, net)
    servers = c.coordinator.schedule(lambda: model.weight.detach().clone()).get()
    torch.testing.assert_close(servers, alone.weight.detach())
    torch.testing.assert_close(model.weight.detach(), alone.weight.detach())
    a, b = model.weight.detach().clone(), other.weight.detach().clone()
    model.weight.data, other.weight.data = other.weight.data, model.weight.data
    assert torch.equal(model.weight, b)
    assert torch.equal(other.weight, a)


def test_arrays_of_what_is_on_servers_are_read_only(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match="read-only"):
        model.weight.detach().numpy().fill(1.0)


def test_two_parameters_do_not_share_memory_on_servers(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def total() -> float:
        return float(sum(p.detach().sum() for p in model.parameters()))

    first, second = model[0].weight, model[1].weight
    second.data = first.data.t()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"'1\.weight' was given the memory of '0\.weight', but on the servers"):
            c.coordinator.schedule(total)
    second.data = first.data.clone()
    assert c.coordinator.schedule(total).fetch() == pytest.approx(total())
    kept, first.data = first.data, second.data
    second.data = kept
    vector = torch.arange(12.0)
    nn.utils.vector_to_parameters(vector, model.parameters())
    assert total() == 66.0
    assert c.coordinator.schedule(total).fetch() == pytest.approx(total())


def test_a_transformer_begins_with_its_own_values(cluster: Any) -> None:
    """Its biases are made first and filled last, by ``torch.nn.init.constant_``, when others are on the servers."""

    def build_one() -> nn.Module:
        torch.manual_seed(0)
        return nn.TransformerEncoderLayer(4, 2, 8, 0.0)

    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = build_one()
        nn.init.uniform_(model.norm1.weight)
        nn.init.constant_(model.norm1.bias, 7.0)
    found = c.coordinator.schedule(lambda: [p.detach().clone() for p in model.parameters()]).get()
    expected = dict(build_one().named_parameters()) | {"norm1.bias": torch.full((4,), 7.0)}
    for (name, theirs), ours in zip(expected.items(), found, strict=True):
        if name != "norm1.weight":
            torch.testing.assert_close(ours, theirs.detach(), msg=name)


def test_variables_of_several_replicas_are_written_through_what_shares_their_memory() -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        for name, write in WRITES.items():
            if name in ("state_dict", "apply"):
                continue
            with strategy.scope():
                variable = tfd.Variable(torch.arange(6.0).reshape(2, 3))
            alone = nn.Parameter(torch.arange(6.0).reshape(2, 3))
            with torch.no_grad():
                for tensor in (variable, alone):
                    torch.manual_seed(1)
                    write(tensor, nn.Identity())
            for copy in strategy.experimental_local_results(variable):
                torch.testing.assert_close(copy.detach(), alone.detach(), msg=name)


def test_what_shares_memory_with_a_parameter_follows_it_until_the_end(cluster: Any) -> None:
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1)
    state = model.state_dict()
    with torch.no_grad():
        model.weight.fill_(3.0)
    assert state["weight"].tolist() == [[3.0, 3.0]]
    leaf = model.weight.detach().requires_grad_()
    (leaf * torch.tensor([1.0, 2.0])).sum().backward()
    assert leaf.grad.tolist() == [[1.0, 2.0]]
    late = model.weight.detach()
    late.requires_grad = True
    (late * 2).sum().backward()
    assert late.grad.tolist() == [[2.0, 2.0]]
    c.strategy.close()
    assert state["weight"].tolist() == [[3.0, 3.0]]
    assert repr(state["weight"]) == repr(torch.full((1, 2), 3.0))


def test_a_scaler_of_the_coordinators_program_tells_a_fused_optimizer_its_scale(cluster: Any) -> None:
    """By attributes, of which the servers know nothing; it skips a step with infinite gradients in the same way."""
    c = cluster(workers=1, ps=1)
    with c.strategy.scope():
        model = nn.Linear(2, 1, dtype=torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    plain = nn.Linear(2, 1, dtype=torch.float64)
    plain.load_state_dict(model.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    for number in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 2, dtype=torch.float64)).pow(2).mean()).backward()
        if number == 2:
            model.weight.grad[0, 0] = float("inf")
        if number == 3:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        theirs.zero_grad()
        plain(torch.ones(2, 2, dtype=torch.float64)).pow(2).mean().backward()
        if number != 2:
            theirs.step()
            torch.testing.assert_close(model.weight.grad, plain.weight.grad)
    torch.testing.assert_close(model.weight.detach().clone(), plain.weight.detach())
    assert scaler.get_scale() == 8.0
