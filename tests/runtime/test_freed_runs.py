"""What a run lets go is freed when it ends: the batch, what the step made, and what an error held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import tfstyle_dist as td


@pytest.fixture(params=[td.MirroredStrategy, td.experimental.CentralStorageStrategy])
def strategy(request: pytest.FixtureRequest) -> Iterator[Any]:
    with request.param(["cpu:0", "cpu:1"]) as made:
        yield made


@pytest.mark.parametrize("fails_on", [None, (0, 1), (1,)])
def test_a_run_leaves_nothing_for_the_garbage_collector(strategy: Any, fails_on: tuple[int, ...] | None) -> None:
    with strategy.scope():
        model = torch.nn.Linear(2, 2)
    held: list[weakref.ref[torch.Tensor]] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        held.extend((weakref.ref(x), weakref.ref(out)))
        replica = td.get_replica_context().replica_id_in_sync_group
        if fails_on is not None and replica in fails_on:
            raise ValueError("as it is meant")
        out.sum().backward()
        return out.detach()

    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            batch = torch.ones(4, 2)
            if fails_on is None:
                strategy.run(step, args=(batch,))
            else:
                with pytest.raises(ValueError, match="meant") as caught:
                    strategy.run(step, args=(batch,))
                del caught
        del batch
        strategy.run(lambda: None)  # the threads have let go of the last run when they have begun this one
        assert [r() for r in held if r() is not None] == []
    finally:
        gc.enable()
