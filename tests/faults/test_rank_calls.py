"""Ranks that make different calls: all hear of it, with both calls, within the deadline."""

from __future__ import annotations

import gc

import pytest
import torch
from fault_steps import all_reduce, build, train_step

import tfstyle_dist as td
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, PeerLostError

ranks_of_two = pytest.mark.distributed(workers=2, timeout=50, deadline=10)


def reduce(op: str, value: torch.Tensor) -> None:
    replica = td.get_replica_context()
    assert replica is not None
    replica.all_reduce(op, value)


def gather(value: torch.Tensor) -> None:
    replica = td.get_replica_context()
    assert replica is not None
    replica.all_gather(value, 0)


DIFFERENT = {
    "op": (lambda m: reduce("SUM", torch.ones(2)), lambda m: reduce("MEAN", torch.ones(2))),
    "shape": (lambda m: reduce("SUM", torch.ones(2)), lambda m: reduce("SUM", torch.ones(3))),
    "rank": (lambda m: reduce("SUM", torch.ones(4)), lambda m: reduce("SUM", torch.ones(2, 2))),
    "dtype": (lambda m: reduce("SUM", torch.ones(2)), lambda m: reduce("SUM", torch.ones(2).double())),
    "call": (lambda m: reduce("SUM", torch.ones(2)), lambda m: gather(torch.ones(2))),
    "backward": (lambda m: m(torch.ones(1, 3)).sum().backward(), lambda m: reduce("SUM", torch.ones(2))),
}


@ranks_of_two
@pytest.mark.parametrize("kind", list(DIFFERENT))
def test_different_calls(rank: int, kind: str) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
        strategy.run(lambda: train_step(model, optimizer))
        with pytest.raises(CollectiveMismatchError) as caught:
            strategy.run(lambda: DIFFERENT[kind][rank](model))
        message = str(caught.value)
        for worker in range(2):
            mine = next(part for part in message.splitlines() if part.startswith(f"  worker {worker}: "))
            assert f"{__file__}:" in mine, message
        # Both have said the same, so they are in step again.
        strategy.run(lambda: train_step(model, optimizer))
        assert strategy.run(all_reduce) == 2.0


def step_after_an_extra_call(rank: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if rank == 1:
        reduce("MEAN", torch.ones(5))
    train_step(model, optimizer)


@ranks_of_two
def test_an_extra_call_on_one_rank(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
        strategy.run(lambda: train_step(model, optimizer))

        with pytest.raises(CollectiveMismatchError, match=r"worker 0: gradients(.|\n)*worker 1: all_reduce MEAN"):
            strategy.run(lambda: step_after_an_extra_call(rank, model, optimizer))


@pytest.mark.distributed(workers=2, timeout=50, deadline=10, env={"TFSTYLE_SHARED_MEMORY": "0"})
def test_an_extra_call_without_shared_memory(rank: int) -> None:
    """Over sockets gradients are compared once for each plan: the wait ends at the deadline and says where both are."""
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
        strategy.run(lambda: train_step(model, optimizer))

        expected = r"'gradients\[0\]'(.|\n)*waits in operation" if rank == 0 else r"'all_reduce(.|\n)*gradients\[0\]"
        with pytest.raises((DeadlineExceededError, PeerLostError), match=expected):
            strategy.run(lambda: step_after_an_extra_call(rank, model, optimizer))


@pytest.mark.distributed(
    workers=2, timeout=50, deadline=10, env={"TFSTYLE_DEBUG": "collectives", "TFSTYLE_SHARED_MEMORY": "0"}
)
def test_debug_mode_compares_gradients_too(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
        strategy.run(lambda: train_step(model, optimizer))
        with pytest.raises(CollectiveMismatchError, match=r"worker 0: gradients(.|\n)*worker 1: all_reduce SUM"):
            strategy.run(lambda: reduce("SUM", torch.ones(5)) if rank else train_step(model, optimizer))


@ranks_of_two
def test_different_variables_are_assigned(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        with strategy.scope():
            first = td.Variable(0.0, name="first", aggregation=td.VariableAggregation.SUM)
            second = td.Variable(torch.zeros(4), name="second", aggregation=td.VariableAggregation.SUM)

        def step() -> None:
            variable = second if rank else first
            variable.assign_add(torch.ones(4) if rank else torch.tensor(1.0))

        with pytest.raises(
            CollectiveMismatchError, match=r"worker 0: variable 'first'(.|\n)*worker 1: variable 'second'"
        ):
            strategy.run(step)


@ranks_of_two
def test_only_one_rank_gathers_objects(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        group = strategy.worker.group
        calls = [
            lambda: group.gather_objects(["a"] * 1000, "names"),
            lambda: group.all_reduce(torch.ones(3), "loss"),
        ]
        with pytest.raises(CollectiveMismatchError, match="gather objects: names"):
            calls[rank]()
        assert group.gather_objects(rank, "ranks") == [0, 1]


@ranks_of_two
def test_a_call_that_one_rank_never_makes(rank: int) -> None:
    strategy = td.MirroredStrategy()
    if rank == 0:
        with pytest.raises((PeerLostError, TimeoutError), match="'all_reduce'") as caught:
            strategy.run(all_reduce)
        assert "worker 1" in str(caught.value)
        assert all_reduce.__code__.co_filename in str(caught.value)
    strategy.close()


@ranks_of_two
@pytest.mark.parametrize("kind", ["shape", "extra"])
def test_different_models(rank: int, kind: str) -> None:
    with td.MirroredStrategy() as strategy:

        def make() -> None:
            with strategy.scope():
                layers = [torch.nn.Linear(2, 3), torch.nn.Linear(3, 2 + (rank if kind == "shape" else 0))]
                if kind == "extra" and rank == 1:
                    layers.append(torch.nn.Linear(2, 2, bias=False))

        with pytest.raises(CollectiveMismatchError, match=r"built different models: entry [0-9]+ .* on worker 1"):
            make()


@ranks_of_two
def test_what_a_rank_has_let_go_is_no_part_of_its_model(rank: int) -> None:
    """One process still has a layer that nothing refers to but itself: its garbage collector has not run."""
    with td.MirroredStrategy() as strategy:
        gc.disable()
        try:
            with strategy.scope():
                if rank == 1:
                    tried = torch.nn.Linear(4, 4)
                    tried.itself = [tried]  # type: ignore[assignment]
                    del tried
                model, optimizer = build(strategy, 3)
        finally:
            gc.enable()
        strategy.run(lambda: train_step(model, optimizer))
        assert strategy.run(all_reduce) == 2.0


@ranks_of_two
def test_one_rank_builds_no_model(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        calls = [lambda: build(strategy, 3), lambda: strategy.run(all_reduce)]
        with pytest.raises(
            CollectiveMismatchError, match=r"worker 0: model structure(.|\n)*worker 1: all_reduce"
        ) as caught:
            calls[rank]()
    noted = "has a module, a parameter or a buffer that the others have not made" in str(caught.value.__notes__)
    assert noted == (rank == 0)


@pytest.mark.distributed(workers=2, timeout=50, deadline=10, env={"TFSTYLE_DEBUG": "collectives"})
def test_debug_mode(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
        strategy.run(lambda: train_step(model, optimizer))
        assert strategy.run(all_reduce) == 2.0
        with pytest.raises(
            CollectiveMismatchError,
            match=f"(?s)worker 0: gather.*{__file__}.*worker 1: all_reduce.*{__file__}",
        ):
            strategy.run(lambda: gather(torch.ones(2)) if rank == 0 else reduce("SUM", torch.ones(2)))
