"""Ranks that die, stop or raise: all the others hear of it within the deadline; and strategies that share a group."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fault_steps import all_reduce, build, train_step
from until import wait_until

import tfstyle_dist as td
from tfstyle_dist.core.errors import PeerLostError, UnavailableError

ranks_of_two = pytest.mark.distributed(workers=2, timeout=50, deadline=10)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


# ---- a rank is gone ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.distributed(workers=3, timeout=50, deadline=10, may_die=(1,))
@pytest.mark.parametrize("operation", ["backward", "all_reduce"])
def test_a_killed_rank_is_named_by_all_others(rank: int, ranks: Any, operation: str) -> None:
    strategy = td.MirroredStrategy()
    model, optimizer = build(strategy, 3)
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
    assert f"called at {all_reduce.__code__.co_filename}:" in message
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
    model, optimizer = build(strategy, 3)

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


# ---- mixed precision ---------------------------------------------------------------------------------------


@ranks_of_two
def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int) -> None:
    with td.MirroredStrategy() as strategy:
        model, optimizer = build(strategy, 3)
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


# ---- several strategies --------------------------------------------------------------------------------------


@ranks_of_two
def test_two_strategies_at_a_time(rank: int) -> None:
    with td.MirroredStrategy() as first, td.MirroredStrategy() as second:
        models = [build(first, 3), build(second, 3)]
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
