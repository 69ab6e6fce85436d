"""What the threads of replicas take over from their caller, and their random numbers."""

from __future__ import annotations

import contextvars
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from fault_steps import THREE, TWO, ReplicaFault, all_reduce, build, replica_id, train_step

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


def test_two_threads_run_steps_of_one_strategy(two: Any) -> None:
    """One trains, and the other one evaluates or trains another model: one run after the other."""
    models = [build(two) for _ in range(2)]
    before = [model.weight.detach().clone() for model, _ in models]
    begun, asked = threading.Event(), threading.Event()

    def waits() -> None:
        train_step(*models[0])
        if not begun.is_set():  # one replica has made its step, the other one has not
            begun.set()
            asked.wait(20)
            time.sleep(0.2)  # the other thread's run must not begin meanwhile

    def other() -> None:
        begun.wait(20)
        asked.set()
        two.run(lambda: train_step(*models[1]))

    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(other)
        two.run(waits)
        result.result(20)
    for (model, _), value in zip(models, before, strict=True):
        torch.testing.assert_close(model.weight.detach(), value - 0.1)


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


@pytest.mark.parametrize("total", [4, 2, 1])
def test_each_replica_has_all_threads_in_its_turn(two: Any, total: int) -> None:
    torch.set_num_threads(total)
    assert every(two, torch.get_num_threads) == {total}
    assert torch.get_num_threads() == total


def test_threads_are_restored_after_an_error(two: Any) -> None:
    def fail() -> None:
        raise ReplicaFault

    torch.set_num_threads(4)
    with pytest.raises(ReplicaFault):
        two.run(fail)
    assert torch.get_num_threads() == 4


# ---- random numbers ----------------------------------------------------------------------------------------


def test_replicas_with_seeds_draw_what_ranks_with_these_seeds_draw() -> None:
    def draw() -> list[float]:
        first = torch.nn.functional.dropout(torch.ones(8)).tolist()
        all_reduce()  # another replica draws in between
        return [first + torch.rand(3).tolist()][0]

    expected = []
    for rank in range(3):
        torch.manual_seed(7 + rank)  # what seed_replicas(7) does in the process of a rank
        expected.append(torch.nn.functional.dropout(torch.ones(8)).tolist() + torch.rand(3).tolist())
    for _ in range(2):
        with td.MirroredStrategy(THREE) as strategy:
            strategy.seed_replicas(7)
            drawn: dict[int, list[float]] = {}
            strategy.run(lambda: drawn.__setitem__(replica_id(), draw()))  # noqa: B023
            assert [drawn[r] for r in range(3)] == expected
            again: dict[int, list[float]] = {}
            strategy.run(lambda: again.__setitem__(replica_id(), draw()))  # noqa: B023
            assert again != drawn, "the streams go on from run to run"


def test_the_first_replica_draws_from_the_stream_of_its_process(two: Any) -> None:
    torch.manual_seed(1)
    expected = torch.rand(9).tolist()
    torch.manual_seed(1)
    first = two.run(lambda: torch.rand(5)).values[0].tolist()
    assert first + torch.rand(4).tolist() == expected


def draws(seed: int, steps: int = 3) -> list[list[float]]:
    """What two replicas draw in some steps of a program, without ``seed_replicas``."""
    torch.manual_seed(seed)
    with td.MirroredStrategy(TWO) as strategy:
        drawn: list[list[float]] = []
        for _ in range(steps):
            torch.rand(3)  # the program's own
            drawn += [v.tolist() for v in strategy.run(lambda: torch.rand(2)).values]
        return drawn


def test_without_seeds_each_replica_draws_numbers_of_its_own_the_same_in_every_program() -> None:
    first = draws(5)
    assert first == draws(5)
    assert len({tuple(numbers) for numbers in first}) == len(first)
    assert not {tuple(numbers) for numbers in first} & {tuple(numbers) for numbers in draws(6)}


def test_a_replica_that_draws_alone_draws_other_numbers_in_each_step(two: Any) -> None:
    def draw() -> torch.Tensor:
        return torch.rand(2) if replica_id() == 1 else torch.zeros(2)

    drawn = [tuple(two.run(draw).values[1].tolist()) for _ in range(4)]
    assert len(set(drawn)) == 4


def test_pythons_and_numpys_numbers_if_asked(two: Any) -> None:
    def draw() -> torch.Tensor:
        all_reduce()  # another replica draws in between
        return torch.tensor([random.random(), np.random.rand(), random.random()])

    expected = []
    for rank in range(2):
        random.seed(7 + rank)
        np.random.seed(7 + rank)
        expected.append([random.random(), np.random.rand(), random.random()])
    for _ in range(2):
        two.seed_replicas(7, python=True)
        for values, wanted in zip(two.run(draw).values, expected, strict=True):
            torch.testing.assert_close(values, torch.tensor(wanted))


def test_generator_of_each_replica(two: Any) -> None:
    def draw() -> torch.Tensor:
        replica = td.get_replica_context()
        assert replica is not None
        return torch.rand(4, generator=replica.generator(3))

    first, second = (v.tolist() for v in two.run(draw).values)
    assert first != second
    assert [v.tolist() for v in two.run(draw).values] == [first, second]
