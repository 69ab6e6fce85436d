"""What the threads of replicas take over from their caller, and their random numbers."""

from __future__ import annotations

import contextvars
from typing import Any

import pytest
import torch
from fault_steps import THREE, TWO, ReplicaFault, all_reduce, replica_id

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(60)

# ---- what replica threads take over ------------------------------------------------------------------------

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


def every(strategy: Any, function: Any) -> set[Any]:
    seen: list[Any] = []
    strategy.run(lambda: seen.append(function()))
    assert len(seen) == strategy.num_replicas_in_sync
    return set(seen)


def test_contextvars(two: Any) -> None:
    token = variable.set("seen")
    try:
        assert every(two, variable.get) == {"seen"}
        every(two, lambda: variable.set("changed") and None)
        assert variable.get() in ("seen", "changed")  # replica 0 shares the caller's context
    finally:
        variable.reset(token)


def test_grad_mode(two: Any) -> None:
    assert every(two, torch.is_grad_enabled) == {True}
    with torch.no_grad():
        assert every(two, torch.is_grad_enabled) == {False}
    assert every(two, torch.is_grad_enabled) == {True}


def test_inference_mode(two: Any) -> None:
    with torch.inference_mode():
        assert every(two, torch.is_inference_mode_enabled) == {True}
    assert every(two, torch.is_inference_mode_enabled) == {False}


def test_autocast(two: Any) -> None:
    def dtype() -> torch.dtype:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert every(two, dtype) == {torch.bfloat16}
    assert every(two, dtype) == {torch.float32}


def test_autocast_switched_off_inside(two: Any) -> None:
    def dtype() -> torch.dtype:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype

    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert every(two, dtype) == {torch.float32}


def test_default_dtype(two: Any) -> None:
    torch.set_default_dtype(torch.float64)
    assert every(two, lambda: torch.ones(1).dtype) == {torch.float64}
    torch.set_default_dtype(torch.float32)
    assert every(two, lambda: torch.ones(1).dtype) == {torch.float32}


def test_default_device(two: Any) -> None:
    with torch.device("meta"):
        assert every(two, lambda: torch.ones(1).device.type) == {"meta"}
    assert every(two, lambda: torch.ones(1).device.type) == {"cpu"}


@pytest.mark.parametrize(("total", "each"), [(4, 2), (2, 1), (1, 1)])
def test_threads_are_shared_out_and_restored(two: Any, total: int, each: int) -> None:
    torch.set_num_threads(total)
    assert every(two, torch.get_num_threads) == {each}
    assert torch.get_num_threads() == total


def test_threads_are_restored_after_an_error(two: Any) -> None:
    def fail() -> None:
        raise ReplicaFault

    torch.set_num_threads(4)
    with pytest.raises(ReplicaFault):
        two.run(fail)
    assert torch.get_num_threads() == 4


# ---- random numbers ----------------------------------------------------------------------------------------


def test_serial_replicas_with_seeds_draw_what_ranks_with_these_seeds_draw() -> None:
    def draw() -> list[float]:
        first = torch.nn.functional.dropout(torch.ones(8)).tolist()
        all_reduce()  # another replica draws in between
        return [first + torch.rand(3).tolist()][0]

    expected = []
    for rank in range(3):
        torch.manual_seed(7 + rank)  # what seed_replicas(7) does in the process of a rank
        expected.append(torch.nn.functional.dropout(torch.ones(8)).tolist() + torch.rand(3).tolist())
    for _ in range(2):
        with td.MirroredStrategy(THREE, run_replicas="serial") as strategy:
            strategy.seed_replicas(7)
            drawn: dict[int, list[float]] = {}
            strategy.run(lambda: drawn.__setitem__(replica_id(), draw()))  # noqa: B023
            assert [drawn[r] for r in range(3)] == expected
            again: dict[int, list[float]] = {}
            strategy.run(lambda: again.__setitem__(replica_id(), draw()))  # noqa: B023
            assert again != drawn, "the streams go on from run to run"


def test_seeded_replicas_leave_the_caller_its_own_stream() -> None:
    with td.MirroredStrategy(TWO, run_replicas="serial") as strategy:
        strategy.seed_replicas(7)
        torch.manual_seed(1)
        expected = torch.rand(4).tolist()
        torch.manual_seed(1)
        strategy.run(lambda: torch.rand(5))
        assert torch.rand(4).tolist() == expected


def test_seed_replicas_needs_serial_mode(two: Any) -> None:
    with pytest.raises(RuntimeError, match="run_replicas='serial'"):
        two.seed_replicas(1)


def test_generator_of_each_replica(two: Any) -> None:
    def draw() -> torch.Tensor:
        replica = td.get_replica_context()
        assert replica is not None
        return torch.rand(4, generator=replica.generator(3))

    first, second = (v.tolist() for v in two.run(draw).values)
    assert first != second
    assert [v.tolist() for v in two.run(draw).values] == [first, second]
