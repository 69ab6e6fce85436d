"""Numbers, and lists of different lengths, that a step function returns from the replicas of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.testing.strategies import strategy_combinations

SEVERAL = strategy_combinations("mirrored_2", "mirrored_3", "mirrored_2_workers", "mirrored_2_workers_2_replicas")
NUMBERS: dict[str, Callable[[int], Any]] = {
    "float": lambda replica: replica + 0.5,
    "equal floats": lambda replica: float(torch.tensor(0.5)),
    "complex": lambda replica: complex(replica, 1.0),
}


def replica_id() -> int:
    context = td.get_replica_context()
    assert context is not None
    return context.replica_id_in_sync_group


@SEVERAL
@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_reduced_as_tensors_are(strategy: td.Strategy, kind: str) -> None:
    number = NUMBERS[kind]
    numbers = strategy.run(lambda: {"seen": number(replica_id())})
    tensors = strategy.run(lambda: {"seen": torch.tensor(number(replica_id()))})
    found, expected = (strategy.reduce("MEAN", value, axis=None)["seen"] for value in (numbers, tensors))
    assert found.dtype == expected.dtype
    assert torch.equal(found.cpu(), expected.cpu())


@SEVERAL
@pytest.mark.parametrize(
    "number",
    [lambda replica: 3 + replica // 2, lambda replica: replica == 0, lambda replica: 3, lambda replica: replica + 0.5],
)
def test_numbers_are_summed_always_or_never(strategy: td.Strategy, number: Callable[[int], Any]) -> None:
    """Equal ones of the replicas of a process come back as one, as in TensorFlow."""
    numbers = strategy.run(lambda: number(replica_id()))
    every = [number(replica) for replica in range(strategy.num_replicas_in_sync)]
    assert float(strategy.reduce("MEAN", numbers, axis=None)) == pytest.approx(sum(every) / len(every))
    if strategy.worker.num_local_replicas == 1:
        assert strategy.reduce("SUM", numbers, axis=None) == sum(every)
    else:
        with pytest.raises(ValueError, match=r"cannot be reduced with SUM.*Return a tensor"):
            strategy.reduce("SUM", numbers, axis=None)


@SEVERAL
def test_a_number_has_no_axis(strategy: td.Strategy) -> None:
    numbers = strategy.run(lambda: replica_id() + 0.5)
    with pytest.raises(InvalidArgumentError, match=r"a scalar needs value.reshape\(1\) first, a number torch.tensor"):
        strategy.gather(numbers, axis=0)
    with pytest.raises(ValueError, match=r"out of range for a per-replica value of rank 0.*Write axis=None"):
        strategy.reduce("SUM", numbers, axis=0)


def test_a_number_that_fits_into_no_tensor(two: Any) -> None:
    with pytest.raises(ValueError, match=r"does not fit into a tensor, .* Give a smaller whole number"):
        two.reduce("MEAN", two.run(lambda: 2**70 + replica_id()), axis=None)


# ---- lists of different lengths ------------------------------------------------------------------------------------


def boxes() -> list[torch.Tensor]:
    """As a detector finds them: one in the first replica's image, two in the second one's."""
    return [torch.full((4,), float(replica_id()))] * (replica_id() + 1)


LENGTHS = (
    r"replica 0 gave a list of length 1, replica 1 gave a list of length 2\. .*torch.cat\(parts\) and .*"
    r"strategy.gather takes tensors of different sizes.*a dataclass.*experimental_local_results gives that of each"
)


def test_lists_of_different_lengths_are_named(two: Any) -> None:
    with pytest.raises(AssertionError, match=f"^The return values of the replicas.* structures: {LENGTHS}"):
        two.run(boxes)
    with pytest.raises(AssertionError, match=rf"structures: at \['found'\]\[1\] {LENGTHS}"):
        two.run(lambda: {"loss": torch.zeros(()), "found": [torch.zeros(1), boxes()]})
    with pytest.raises(
        AssertionError, match="replica 0 gave a list of length 50, replica 1 gave a list of length 51"
    ) as e:
        two.run(lambda: [torch.zeros(1)] * (50 + replica_id()))
    assert len(str(e.value)) < 700


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (([1.5], (1.5,)), "replica 0 gave a list of length 1, replica 1 gave a tuple of length 1"),
        (({"a": 1}, {"a": 1, "b": 2}), r"gave a dict with the keys \['a'\], .* a dict with the keys \['a', 'b'\]"),
        (([(1, 2)], [3.5]), r"at \[0\] replica 0 gave a tuple of length 2, replica 1 gave a value of type float"),
    ],
)
def test_other_structures_are_named(two: Any, values: tuple[Any, Any], words: str) -> None:
    with pytest.raises(AssertionError, match=f"{words}. Make every replica return the same nesting, types and keys"):
        two.run(lambda: values[replica_id()])


@dataclass
class Found:
    boxes: list[torch.Tensor]


def test_what_the_error_advises(two: Any) -> None:
    def step() -> tuple[torch.Tensor, torch.Tensor]:
        parts = boxes()
        return torch.cat(parts), torch.tensor([len(part) for part in parts])

    values, lengths = two.gather(two.run(step), axis=0)
    assert [part.tolist() for part in values.split(lengths.tolist())] == [[0.0] * 4, [1.0] * 4, [1.0] * 4]
    held = two.experimental_local_results(two.run(lambda: Found(boxes())))
    assert [len(found.boxes) for found in held] == [1, 2]
