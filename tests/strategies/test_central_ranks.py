"""Central storage on ranks of one host: one copy of parameters, gradients and optimizer state in shared memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from central_ranks import assert_same_weights, build, loss_of, on_two_ranks, own_half, train, train_plainly
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import tfstyle_dist as td
from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.gradients import update_shards
from tfstyle_dist.variables import find_record

pytestmark = pytest.mark.cpu_only("central storage between processes computes on the CPU")


class NormScaled(torch.optim.Optimizer):
    """A rule that is not elementwise, with state that is no tensor: ``p -= lr / count * grad / norm(grad)``."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    p.sub_(group["lr"] / state["count"] * state["sum"] / state["sum"].norm())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
    "fused": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, fused=True),
    "foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, foreach=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=1e-3),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=1e-3),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "not elementwise": lambda p: NormScaled(p, 0.1),
}


def assert_same_state(ours: Any, plain: Any) -> None:
    assert ours["param_groups"] == plain["param_groups"]
    assert list(ours["state"]) == list(plain["state"])
    for key, state in plain["state"].items():
        assert list(ours["state"][key]) == list(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(ours["state"][key][name], value, rtol=1e-9, atol=1e-10)
            else:
                assert ours["state"][key][name] == value, (key, name)


@on_two_ranks
def test_what_one_rank_writes_into_the_copy_all_ranks_read(central: Any, rank: int) -> None:
    with central.scope():
        model = build()
    record = find_record(model[0].weight)
    assert record is not None
    place = central.parameter_store.shared_home.place_of(record)
    if rank == 1:
        place.flat.fill_(7.0)
    central.worker.group.numbers(0, "written")
    assert model[0].weight.detach().unique().tolist() == [7.0]


@on_two_ranks
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_every_optimizer_agrees_with_one_device_and_every_rank_has_its_whole_state(
    central: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        update_shards, "MOST", 64
    )  # several parts of one parameter for a rank, as with large parameters
    with central.scope():
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
    plain = build()
    plain_optimizer = OPTIMIZERS[name](plain.parameters())
    train(central, model, optimizer, range(5))
    train_plainly(plain, plain_optimizer, range(5))
    assert_same_weights(model, plain)
    assert_same_state(optimizer.state_dict(), plain_optimizer.state_dict())
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]


@on_two_ranks
@pytest.mark.parametrize("name", ["Adam", "not elementwise"])
def test_an_optimizer_state_moves_between_plain_and_central(central: Any, name: str) -> None:
    plain = build()
    plain_optimizer = OPTIMIZERS[name](plain.parameters())
    train_plainly(plain, plain_optimizer, range(3))
    with central.scope():
        model = build()
        optimizer = OPTIMIZERS[name](model.parameters())
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))  # torch keeps the tensors that it is given
    train(central, model, optimizer, range(3, 6))
    saved, saved_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train_plainly(plain, plain_optimizer, range(3, 6))
    assert_same_weights(model, plain)
    back = build()
    back_optimizer = OPTIMIZERS[name](back.parameters())
    back.load_state_dict(saved)
    back_optimizer.load_state_dict(saved_optimizer)
    train_plainly(back, back_optimizer, range(6, 8))
    train_plainly(plain, plain_optimizer, range(6, 8))
    assert_same_weights(back, plain)


@on_two_ranks
def test_groups_that_grow_and_parameters_that_thaw(central: Any) -> None:
    def stages(model: nn.Module, go: Callable[[Any, range], None]) -> None:
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.Adam(model[0].parameters(), lr=0.01, eps=1e-3)
        go(optimizer, range(2))
        optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
        go(optimizer, range(2, 4))
        model[0].bias.requires_grad_(True)
        go(optimizer, range(4, 6))

    with central.scope():
        model = build()
    plain = build()
    stages(model, lambda optimizer, steps: train(central, model, optimizer, steps))
    stages(plain, lambda optimizer, steps: train_plainly(plain, optimizer, steps))
    assert_same_weights(model, plain)


@on_two_ranks
def test_a_parameter_that_comes_back_into_the_groups_has_its_state(central: Any) -> None:
    with central.scope():
        model = build()
    plain = build()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    for start in (0, 4):
        train(central, model, optimizers[0], range(start, start + 2))
        train_plainly(plain, optimizers[1], range(start, start + 2))
        left = [optimizer.param_groups[0]["params"].pop() for optimizer in optimizers]
        train(central, model, optimizers[0], range(start + 2, start + 4))
        train_plainly(plain, optimizers[1], range(start + 2, start + 4))
        for optimizer, parameter in zip(optimizers, left, strict=True):
            optimizer.param_groups[0]["params"].append(parameter)
    train(central, model, optimizers[0], range(8, 11))
    train_plainly(plain, optimizers[1], range(8, 11))
    assert_same_weights(model, plain)
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())


@on_two_ranks
def test_a_closure_sees_the_parameters(central: Any) -> None:
    def closure_of(model: nn.Module, optimizer: Any, part: slice, step: int) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, part, step)
            loss.backward()
            return loss

        return closure

    with central.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    plain = build()
    plain_optimizer = torch.optim.Adam(plain.parameters(), eps=1e-3)
    for number in range(3):
        central.run(lambda n=number: optimizer.step(closure_of(model, optimizer, own_half(), n)))
        plain_optimizer.step(closure_of(plain, plain_optimizer, slice(0, 8), number))
    assert_same_weights(model, plain)


HOOKS: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "before": lambda optimizer: optimizer.register_step_pre_hook,
    "before the steps of all": lambda _: register_optimizer_step_pre_hook,
    "after": lambda optimizer: optimizer.register_step_post_hook,
}


@on_two_ranks
@pytest.mark.parametrize("when", HOOKS)
def test_hooks_around_a_step_see_whole_parameters_and_their_state(central: Any, when: str, rank: int) -> None:
    """Also if they come later, and go again."""
    with central.scope():
        model = build()
    plain = build()

    def hook(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            optimizer.state[parameter]["seen"] = optimizer.state[parameter].get("seen", 0) + 1
            with torch.no_grad():
                parameter.grad.div_(parameter.grad.norm())
                parameter.mul_((0.9 / parameter.norm()).clamp(max=1.0))

    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01, eps=1e-3) for m in (model, plain)]
    train(central, model, optimizers[0], range(2))
    train_plainly(plain, optimizers[1], range(2))
    handle = HOOKS[when](optimizers[0])(hook)
    train(central, model, optimizers[0], range(2, 4))
    handle.remove()
    handle = HOOKS[when](optimizers[1])(hook)
    train_plainly(plain, optimizers[1], range(2, 4))
    handle.remove()
    seen: list[int] = []
    if rank == 0:  # a hook that looks may be one worker's
        handle = optimizers[0].register_step_post_hook(lambda *_: seen.append(len(seen)))
    train(central, model, optimizers[0], range(4, 6))
    train_plainly(plain, optimizers[1], range(4, 6))
    assert_same_weights(model, plain)
    assert_same_state(optimizers[0].state_dict(), optimizers[1].state_dict())
    assert len(seen) == (2 if rank == 0 else 0)


@on_two_ranks
def test_clipping_and_zeroing_in_place(central: Any) -> None:
    with central.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    def step(trained: nn.Module, used: Any, part: slice, number: int) -> None:
        used.zero_grad(set_to_none=False)
        (loss_of(trained, part, number) * 100).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        used.step()

    for number in range(4):
        central.run(lambda n=number: step(model, optimizer, own_half(), n))
        step(plain, plain_optimizer, slice(0, 8), number)
    assert_same_weights(model, plain)


@on_two_ranks
def test_a_write_that_every_rank_makes_counts_once(central: Any) -> None:
    with central.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    plain = build()
    plain_optimizer = torch.optim.Adam(plain.parameters(), eps=1e-3)
    train(central, model, optimizer, range(2))
    train_plainly(plain, plain_optimizer, range(2))
    central.run(lambda: [p.data.mul_(0.5) for p in model.parameters()] and None)
    for p in plain.parameters():
        p.data.mul_(0.5)
    assert_same_weights(model, plain)
    train(central, model, optimizer, range(2, 4))
    train_plainly(plain, plain_optimizer, range(2, 4))
    assert_same_weights(model, plain)
    assert central.parameter_store.shared_home.written() == []


@on_two_ranks
def test_a_write_that_one_rank_makes_is_an_error_on_all(central: Any, rank: int) -> None:
    with central.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if rank == 1:
        model[0].weight.data.zero_()
    with pytest.raises(CollectiveMismatchError, match=r"worker\(s\) \[1\] wrote to its parameters"):
        train(central, model, optimizer, range(1))


@on_two_ranks
def test_optimizers_that_have_other_parameters_on_each_rank_are_refused(central: Any, rank: int) -> None:
    with central.scope():
        model = nn.Sequential(*[nn.Linear(20, 20, bias=False) for _ in range(2)]).double()
    optimizer = torch.optim.Adam(model[rank].parameters(), lr=0.01)  # as ZeroRedundancyOptimizer makes it
    with pytest.raises(CollectiveMismatchError, match=r"the same parameters in the same order\. A ZeroRedundancy"):
        train(central, model, optimizer, range(1))


@on_two_ranks
def test_a_converted_module_is_shared_again(central: Any) -> None:
    with central.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.float().double()
    plain = build().float().double()
    train(central, model, optimizer, range(2))
    train_plainly(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9), range(2))
    assert_same_weights(model, plain)
    assert not central.parameter_store.shared_home.moved_out(list(central.parameter_store.records()))


@on_two_ranks
def test_both_forms_give_the_same_bits(central: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(strategy: Any) -> list[torch.Tensor]:
        with strategy.scope():
            model = build()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        train(strategy, model, optimizer, range(6))
        return [p.detach().clone() for p in model.parameters()]

    ranks = weights(central)
    central.close()
    monkeypatch.delenv("RANK")
    with td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]) as strategy:
        in_process = weights(strategy)
    assert all(torch.equal(a, b) for a, b in zip(ranks, in_process, strict=True))


@on_two_ranks
@pytest.mark.parametrize("raising", [0, 1])
def test_a_rank_that_raises_before_the_update_changes_nothing(raising: int, rank: int) -> None:
    strategy = td.experimental.CentralStorageStrategy()
    with strategy.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(strategy, model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model, own_half(), 2).backward()
        if rank == raising:
            raise ValueError("this rank broke")
        optimizer.step()

    with pytest.raises(ValueError if rank == raising else ConnectionError, match="this rank broke"):
        strategy.run(step)
    strategy.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]


@on_two_ranks
def test_a_step_that_raises_puts_the_parameters_back(central: Any) -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise ValueError("the rule broke")

    with central.scope():
        model = build()
        optimizer = Broken(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the rule broke"):
        train(central, model, optimizer, range(1))
    assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [id(p) for p in model.parameters()]


@pytest.mark.distributed(workers=2, timeout=60, deadline=10, may_die=(1,))
def test_a_killed_rank_is_named_and_the_copy_is_whole(rank: int, ranks: Any) -> None:
    strategy = td.experimental.CentralStorageStrategy()
    with strategy.scope():
        model = build()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(strategy, model, optimizer, range(2))
    before = [p.detach().clone() for p in model.parameters()]
    if rank == 1:
        ranks.kill(1)
    with pytest.raises(ConnectionError, match="Worker 1 is missing"):
        train(strategy, model, optimizer, range(2, 4))
    strategy.close()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@on_two_ranks
def test_several_hosts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ValueError, match="one host, but WORLD_SIZE=2 and LOCAL_WORLD_SIZE=1"):
        td.experimental.CentralStorageStrategy()


@on_two_ranks
def test_several_compute_devices_in_each_of_several_processes_are_refused() -> None:
    with pytest.raises(ValueError, match="every process is one replica"):
        td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
