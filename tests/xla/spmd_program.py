"""Checks with one program over all virtual XLA devices of the CPU; run by test_xla.py."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import parity
import pytest
import torch

import tfstyle_dist as tfd


def train(strategy: tfd.TPUStrategy) -> None:
    for build_optimizer in parity.OPTIMIZERS.values():
        with strategy.scope(), strategy.device:
            model = parity.make_model()
        start = parity.on_cpu(model)
        optimizer = build_optimizer(model)

        def step(x: torch.Tensor, y: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
            assert tfd.get_replica_context().num_replicas_in_sync == 1
            assert len(x) == 16
            assert "devices=[4,1]" in strategy.adapter.sharding(x), strategy.adapter.sharding(x)
            optimizer.zero_grad()
            loss = parity.loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        batches, losses = parity.make_batches(6), []
        for number, batch in enumerate(strategy.experimental_distribute_dataset(batches)):
            losses.append(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None))
            if number == 2:
                before = strategy.num_compilations
        assert strategy.num_compilations == before, "a step of known shapes was compiled again"
        expected, weights = parity.plain_training(start, build_optimizer, batches)
        parity.assert_same([float(loss) for loss in losses], expected)
        parity.assert_same(parity.on_cpu(model), weights)
    print("ok training")


def say_recompilations(strategy: tfd.TPUStrategy) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tfstyle_dist").addHandler(handler)
    for size in (4, 4, 4, 4, 4):
        strategy.run(lambda x: (x * 2).sum(), args=(torch.ones(size).to(strategy.device),))
    said.clear()
    strategy.run(lambda x: (x * 2).sum(), args=(torch.ones(4).to(strategy.device),))
    assert not said, said
    strategy.run(lambda x: (x * 2).sum(), args=(torch.ones(5).to(strategy.device),))
    assert len(said) == 1, said
    assert "compiled 1 new graph(s)" in said[0]
    print("ok recompilations")


def divide_a_model() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "model_parallel"))
    import transformer

    assignment = tfd.tpu.experimental.DeviceAssignment(num_replicas=2, num_cores_per_replica=2)
    for hidden in (16, 13):
        strategy = tfd.TPUStrategy(experimental_device_assignment=assignment, use_spmd=True)
        with strategy.scope(), strategy.device:
            model = transformer.Transformer(hidden)
        start = parity.on_cpu(model)
        plan = {**transformer.PLAN, "embedding": "row", "head": "output"}
        strategy.experimental_partition(model, plan)
        with strategy.scope():
            tfd.tpu.experimental.tensor_split(model.norm.weight, 2)
        optimizer = transformer.make_optimizer(model)

        def step(words: torch.Tensor, following: torch.Tensor, model=model, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = transformer.loss_of(model, words, following)
            loss.backward()
            optimizer.step()
            return loss.detach()

        batches = transformer.batches(4)
        losses = [float(strategy.run(step, args=b)) for b in strategy.experimental_distribute_dataset(batches)]
        expected, plain, _ = transformer.plain_training(start, batches, hidden)
        parity.assert_same(losses, expected)
        parity.assert_same(parity.on_cpu(model), dict(plain.state_dict()))
        up = model.blocks[0].up.weight
        assert "devices=[2,1,2]" in strategy.adapter.sharding(up), strategy.adapter.sharding(up)
        print("sharding of Adam's state:", strategy.adapter.sharding(optimizer.state[up]["exp_avg"]) or "none given")
    with pytest.raises(ValueError, match=r"makes 4 parts, but a replica has 2"):
        strategy.experimental_split_to_logical_devices(up, [4, 1])
    print("ok a divided model")


def refuse() -> None:
    with pytest.raises(ValueError, match=r"SPMD mode already|one replica of it runs"):
        tfd.TPUStrategy(use_spmd=False)
    with pytest.raises(ValueError, match="3 x 2 devices"):
        tfd.TPUStrategy(experimental_device_assignment=SimpleNamespace(num_replicas=3, num_cores_per_replica=2))
    print("ok refusals")


def main() -> None:
    with pytest.raises(ValueError, match=r"torch_xla\.launch\(main\)"):
        tfd.TPUStrategy(use_spmd=False)
    resolver = object()
    with tfd.TPUStrategy(resolver) as strategy:
        assert strategy.use_spmd
        assert strategy.cluster_resolver is resolver
        assert (strategy.num_devices, strategy.num_replicas_in_sync) == (4, 1)
        train(strategy)
        say_recompilations(strategy)
        refuse()
    divide_a_model()
    print("done")


if __name__ == "__main__":
    main()
