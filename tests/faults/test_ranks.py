"""Ranks that die, stop, raise or make other calls: all the others hear of it within the deadline."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import CollectiveMismatchError, DeadlineExceededError, PeerLostError, UnavailableError

ranks_of_two = pytest.mark.distributed(workers=2, timeout=50, deadline=10)


def all_reduce(value: float = 1.0) -> torch.Tensor:
    replica = td.get_replica_context()
    assert replica is not None
    result: torch.Tensor = replica.all_reduce("SUM", torch.tensor(value))
    return result


def build(strategy: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def wait_until(condition: Any) -> None:
    while not condition():
        time.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ---- a rank is gone ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed(workers=3, timeout=50, deadline=10, may_die=(1,))
@pytest.mark.parametrize("operation", ["backward", "all_reduce"])
def test_a_killed_rank_is_named_by_all_others(rank: int, ranks: Any, operation: str) -> None:
    strategy = td.MirroredStrategy()
    model, optimizer = build(strategy)
    strategy.run(lambda: train_step(model, optimizer))
    if rank == 1:
        ranks.kill(1)
    calls = {"backward": lambda: train_step(model, optimizer), "all_reduce": all_reduce}
    with pytest.raises(PeerLostError) as caught:
        strategy.run(calls[operation])
    message = str(caught.value)
    assert message.startswith("Worker 1 is missing: "), message
    assert f"worker 1 (pid {ranks.pids[1]}" in message
    assert "MISSING, dead" in message
    assert ("'gradients" if operation == "backward" else "'all_reduce'") in message
    assert f"called at {__file__}:" in message
    assert isinstance(caught.value, ConnectionError)
    with pytest.raises(UnavailableError):  # at once: the group is broken
        strategy.run(all_reduce)
    strategy.close()


@pytest.mark.slow
@pytest.mark.distributed(workers=2, timeout=60, deadline=10)
def test_a_stopped_rank_is_named(rank: int, ranks: Any, shared_tmp_path: Path) -> None:
    strategy = td.MirroredStrategy()
    strategy.run(all_reduce)
    if rank == 1:
        ranks.stop(1)
        # Resumed by rank 0, which has given up: that is what this rank finds.
        with pytest.raises((PeerLostError, TimeoutError)):
            strategy.run(all_reduce)
        strategy.close()
        return
    wait_until(lambda: state_of(ranks.pids[1]) == "T")
    try:
        with pytest.raises((PeerLostError, TimeoutError), match=r"Worker 1 is missing(.|\n)*stopped \(SIGSTOP\)"):
            strategy.run(all_reduce)
    finally:
        strategy.worker.group.abort()
        strategy.close()
        ranks.resume(1)


@pytest.mark.distributed(workers=3, timeout=50, deadline=10)
def test_the_reason_of_a_failed_rank_reaches_the_others(rank: int) -> None:
    strategy = td.MirroredStrategy()

    def step() -> None:
        if rank == 2:
            raise FileNotFoundError("data/part-7.txt is not there")
        all_reduce()

    if rank == 2:
        with pytest.raises(FileNotFoundError) as failure:
            strategy.run(step)
        assert "raised in replica 2 of 3" in failure.value.__notes__[0]
    else:
        with pytest.raises(PeerLostError) as caught:
            strategy.run(step)
        message = str(caught.value)
        assert message.startswith("Worker 2 is missing"), message
        assert "failed: FileNotFoundError: data/part-7.txt is not there" in message
    strategy.close()


@ranks_of_two
def test_a_rank_that_raises_between_backward_and_step(rank: int) -> None:
    strategy = td.MirroredStrategy()
    model, optimizer = build(strategy)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        if rank == 1:
            raise ValueError("between backward and step")
        optimizer.step()

    if rank == 1:
        with pytest.raises(ValueError, match="between backward and step"):
            strategy.run(step)
    else:
        strategy.run(step)  # this one needs nobody any more
        with pytest.raises(PeerLostError, match=r"Worker 1 is missing(.|\n)*failed: ValueError: between backward"):
            strategy.run(step)
    strategy.close()


@ranks_of_two
def test_a_rank_that_fails_with_several_replicas_leaves_word(rank: int) -> None:
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
    assert strategy.run(all_reduce).values == (4.0, 4.0)

    def step() -> None:
        replica = td.get_replica_context()
        assert replica is not None
        if replica.replica_id_in_sync_group == 3:
            raise ValueError("in replica 3")
        all_reduce()

    if rank == 1:
        with pytest.raises(ValueError, match="in replica 3"):
            strategy.run(step)
    else:
        with pytest.raises(PeerLostError, match=r"Worker 1 is missing(.|\n)*failed: ValueError: in replica 3"):
            strategy.run(step)
    strategy.close()


# ---- ranks make different calls ----------------------------------------------------------------------------


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
        model, optimizer = build(strategy)
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


@ranks_of_two
def test_an_extra_call_on_one_rank(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy)
        strategy.run(lambda: train_step(model, optimizer))

        def step() -> None:
            if rank == 1:
                reduce("MEAN", torch.ones(5))
            train_step(model, optimizer)

        with pytest.raises(CollectiveMismatchError, match=r"worker 0: gradients(.|\n)*worker 1: all_reduce MEAN"):
            strategy.run(step)


@pytest.mark.distributed(workers=2, timeout=50, deadline=10, env={"TFSTYLE_SHARED_MEMORY": "0"})
def test_an_extra_call_without_shared_memory(rank: int) -> None:
    """Over sockets gradients are compared once for each plan: the wait ends at the deadline and says where both are."""
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy)
        strategy.run(lambda: train_step(model, optimizer))

        def step() -> None:
            if rank == 1:
                reduce("MEAN", torch.ones(5))
            train_step(model, optimizer)

        expected = r"'gradients\[0\]'(.|\n)*waits in operation" if rank == 0 else r"'all_reduce(.|\n)*gradients\[0\]"
        with pytest.raises((DeadlineExceededError, PeerLostError), match=expected):
            strategy.run(step)


@pytest.mark.distributed(
    workers=2, timeout=50, deadline=10, env={"TFSTYLE_DEBUG": "collectives", "TFSTYLE_SHARED_MEMORY": "0"}
)
def test_debug_mode_compares_gradients_too(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy)
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
        assert __file__ in str(caught.value)
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
def test_one_rank_builds_no_model(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        calls = [lambda: build(strategy), lambda: strategy.run(all_reduce)]
        with pytest.raises(CollectiveMismatchError, match=r"worker 0: model structure(.|\n)*worker 1: all_reduce"):
            calls[rank]()


@pytest.mark.distributed(workers=2, timeout=50, deadline=10, env={"TFSTYLE_DEBUG": "collectives"})
def test_debug_mode(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy)
        strategy.run(lambda: train_step(model, optimizer))
        assert strategy.run(all_reduce) == 2.0
        with pytest.raises(
            CollectiveMismatchError,
            match=f"(?s)worker 0: gather.*{__file__}.*worker 1: all_reduce.*{__file__}",
        ):
            strategy.run(lambda: gather(torch.ones(2)) if rank == 0 else reduce("SUM", torch.ones(2)))


# ---- mixed precision ---------------------------------------------------------------------------------------


@ranks_of_two
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        before = model.weight.detach().clone()

        def step(factor: float) -> None:
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(1, 3)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()

        strategy.run(step, args=(float("inf") if rank == 1 else 1.0,))
        assert torch.equal(model.weight.detach(), before)
        assert scaler.get_scale() == 2.0
        strategy.run(step, args=(1.0,))
        torch.testing.assert_close(model.weight.detach(), before - 0.1)


# ---- the process group -------------------------------------------------------------------------------------


def join(rank: int, size: int, name: str) -> None:
    import torch.distributed as dist

    path = os.environ["TFSTYLE_RENDEZVOUS_FILE"] + name
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=size, timeout=timedelta(seconds=10)
    )


@ranks_of_two
def test_a_group_of_the_program_is_adopted_and_kept(rank: int) -> None:
    import torch.distributed as dist

    join(rank, 2, "-own")
    with td.MirroredStrategy() as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.run(all_reduce) == 2.0
    assert dist.is_initialized()
    dist.barrier()


@ranks_of_two
def test_a_group_of_another_size_is_refused(rank: int) -> None:
    join(0, 1, f"-alone-{rank}")
    with pytest.raises(ValueError, match=r"initialised with 1 worker\(s\), but WORLD_SIZE=2"):
        td.MirroredStrategy()


@pytest.mark.distributed(workers=2, timeout=50, deadline=10, env={"WORLD_SIZE": None, "RANK": None})
def test_a_group_without_a_launcher_is_adopted(rank: int) -> None:
    join(rank, 2, "-by-hand")
    with td.MirroredStrategy() as strategy:
        assert strategy.run(all_reduce) == 2.0


@ranks_of_two
def test_two_strategies_at_a_time(rank: int) -> None:
    with td.MirroredStrategy() as first, td.MirroredStrategy() as second:
        models = [build(first), build(second)]
        for strategy, (model, optimizer) in zip((first, second), models, strict=True):
            assert strategy.run(all_reduce, args=(float(rank),)) == 1.0
            strategy.run(lambda: train_step(model, optimizer))  # noqa: B023
        second.close()
        assert first.run(all_reduce) == 2.0


@ranks_of_two
def test_closing_the_first_of_two_strategies(rank: int) -> None:
    first, second = td.MirroredStrategy(), td.MirroredStrategy()
    first.close()
    assert second.run(all_reduce) == 2.0
    second.close()


@ranks_of_two
def test_one_strategy_after_the_other(rank: int) -> None:
    for _ in range(2):
        with td.MirroredStrategy() as strategy:
            assert strategy.run(all_reduce) == 2.0


@ranks_of_two
def test_run_after_close(rank: int) -> None:
    strategy = td.MirroredStrategy()
    strategy.close()
    with pytest.raises(RuntimeError, match="closed"):
        strategy.run(all_reduce)


@pytest.mark.distributed(workers=2, timeout=50, deadline=10)
def test_ctrl_c_on_one_rank(rank: int) -> None:
    """The interrupted one leaves word."""
    strategy = td.MirroredStrategy()

    def step() -> None:
        if rank == 1:
            signal.raise_signal(signal.SIGINT)
        all_reduce()

    if rank == 1:
        with pytest.raises(KeyboardInterrupt):
            strategy.run(step)
    else:
        with pytest.raises(PeerLostError, match="failed: KeyboardInterrupt"):
            strategy.run(step)
    strategy.close()
