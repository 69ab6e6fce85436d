"""Central storage on ranks: what programs do with the memory of parameters, gradients and optimizer state.

Each case is run by two ranks, each with half of the batches, and by one device with all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from central_cases import CASES, Job, OverAll, Values, build
from central_ranks import is_own, on_two_ranks, train
from torch import nn

from tfstyle_dist.core.errors import CollectiveMismatchError
from tfstyle_dist.variables import find_record

pytestmark = pytest.mark.cpu_only("central storage between processes computes on the CPU")


def values_of(job: Job, more: Values) -> Values:
    state = [v for s in job.optimizer.state_dict()["state"].values() for v in s.values()]
    return [v.detach().clone() for v in [*job.model.parameters(), *state, *more]]


@on_two_ranks
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_as_on_one_device(central: Any, case: Callable[[Job], Values]) -> None:
    alone, together = Job(None), Job(central)
    expected, found = values_of(alone, case(alone)), values_of(together, case(together))
    for ours, plain in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-10)


@on_two_ranks
def test_all_is_there_once(central: Any) -> None:
    job = Job(central)
    job.train(0, 1)
    state = [t for s in job.optimizer.state.values() for t in s.values()]
    assert not any(map(is_own, [*job.model.parameters(), *(p.grad for p in job.model.parameters()), *state]))


@on_two_ranks
def test_parameters_of_one_memory_are_there_once_if_nothing_else_has_it(central: Any) -> None:
    """As ``load_state_dict(assign=True)`` leaves those that were read from one file."""

    def take_parts(model: nn.Module) -> torch.Tensor:
        whole = torch.cat([p.detach().flatten() for p in model.parameters()])
        parts = whole.split([p.numel() for p in model.parameters()])
        views = [part.view_as(p) for part, p in zip(parts, model.parameters(), strict=True)]
        state = dict(zip([name for name, _ in model.named_parameters()], views, strict=True))
        model.load_state_dict(state, assign=True)
        return whole

    for keep in (False, True):
        with central.scope():
            model = build()
            whole = take_parts(model)
            if not keep:
                del whole
            central.experimental_adopt(model)
        places = [central.parameter_store.shared_home.place_of(find_record(p)) for p in model.parameters()]
        assert [place is None for place in places] == [keep] * len(places)


@on_two_ranks
def test_parameters_are_there_once_after_a_whole_update(central: Any) -> None:
    job = Job(central)
    job.optimizer = OverAll(job.model.parameters())
    job.train(0, 1)
    assert not any(map(is_own, job.model.parameters()))


@on_two_ranks
def test_an_optimizer_that_one_rank_alone_updates_with_is_an_error_on_all(central: Any, rank: int) -> None:
    job = Job(central)
    job.optimizer = OverAll(job.model.parameters(), lr=0.0 if rank else 0.1)
    with pytest.raises(CollectiveMismatchError, match=r"worker\(s\) \[.\] changed parameters in the update"):
        job.train(0)


@on_two_ranks
def test_what_is_kept_costs_only_itself_its_memory(central: Any) -> None:
    """The others stay in the one copy."""
    job = Job(central)
    job.train(0)
    job.model[2].bias.data = job.model[0].bias.data
    job.train(1)
    places = [central.parameter_store.shared_home.place_of(find_record(p)) for p in job.model.parameters()]
    assert [place is None for place in places] == [False, True, False, True, False, False]


@on_two_ranks
def test_state_that_one_rank_writes_is_an_error_on_all(central: Any, rank: int) -> None:
    job = Job(central)
    job.train(0)
    if rank == 1:
        job.optimizer.state[job.model[0].weight]["exp_avg"].zero_()
    with pytest.raises(CollectiveMismatchError, match=r"worker\(s\) \[1\] wrote to its parameters or their state"):
        train(central, job.model, job.optimizer, range(1))
