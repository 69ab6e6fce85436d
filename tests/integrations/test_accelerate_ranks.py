"""``StrategyAccelerator`` on two CPU ranks."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
from accelerate_state import no_accelerate_state  # noqa: F401
from agreement import said_by_first
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tfstyle_dist as tfd
from tfstyle_dist.core.network import free_ports
from tfstyle_dist.integrations.accelerate import StrategyAccelerator, attach, from_accelerator
from tfstyle_dist.integrations.accelerate.gradients import StrategyDDPHandler

pytestmark = pytest.mark.distributed(workers=2)

METHODS = {
    "ADD_N": tfd.AggregationMethod.ADD_N,
    "TREE": tfd.AggregationMethod.EXPERIMENTAL_TREE,
    "DEFAULT": tfd.AggregationMethod.DEFAULT,
}


def mirrored(method: str = "ADD_N", replicas: int = 1) -> tfd.MirroredStrategy:
    ops = tfd.ReductionToOneDevice(aggregation_method=METHODS[method])
    return tfd.MirroredStrategy([f"cpu:{number}" for number in range(replicas)], cross_device_ops=ops)


def data(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, inputs @ torch.randn(6, 2, generator=generator))


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def train(accelerator: Any, model: nn.Module, global_batch: int = 8) -> tuple[nn.Module, list[float]]:
    """One epoch with accumulation, clipping and a scheduler; returns the model itself and the mean losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(data(), batch_size=global_batch)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return accelerator.unwrap_model(model), losses


def train_alone(steps: int, global_batch: int = 8) -> tuple[nn.Module, list[float]]:
    """The same in plain PyTorch, without accelerate."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    losses = []
    for number, (inputs, targets) in enumerate(DataLoader(data(), batch_size=global_batch)):
        loss = nn.functional.mse_loss(model(inputs), targets)
        (loss / steps).backward()
        if (number + 1) % steps == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def assert_same(ours: tuple[nn.Module, list[float]], steps: int) -> None:
    theirs = train_alone(steps)
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-5, atol=1e-6)
    for name, tensor in ours[0].state_dict().items():
        torch.testing.assert_close(tensor.detach().clone(), theirs[0].state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("method", "replicas"), [("ADD_N", 1), ("TREE", 1), ("DEFAULT", 1), ("TREE", 2)])
def test_training_equals_one_device(method: str, replicas: int) -> None:
    with mirrored(method, replicas) as strategy:
        config = accelerate.DataLoaderConfiguration(split_batches=True)
        accelerator = StrategyAccelerator(
            strategy=strategy, dataloader_config=config, gradient_accumulation_steps=2, cpu=True
        )
        assert accelerator.num_processes == 2
        assert_same(train(accelerator, make_model()), steps=2)


def test_without_a_strategy_it_makes_one_over_the_ranks() -> None:
    accelerator = StrategyAccelerator(auto_shard_policy=tfd.AutoShardPolicy.DATA)
    assert type(accelerator.strategy) is tfd.MirroredStrategy
    assert accelerator.strategy.num_replicas_in_sync == accelerator.num_processes == 2
    assert StrategyAccelerator().strategy is accelerator.strategy
    assert_same(train(accelerator, make_model()), steps=1)


@pytest.mark.parametrize("local", ["1", "2"])
def test_the_group_counts_where_variables_of_the_launcher_are_wrong(
    process_group: Any, rank: int, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in accelerate's ``debug_launcher``: every process of its group has RANK=0."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    monkeypatch.setenv("LOCAL_RANK", "0")
    accelerator = StrategyAccelerator(cpu=True)
    group = accelerator.strategy.worker.group
    assert (group.rank, group.size) == (accelerator.process_index, accelerator.num_processes) == (rank, 2)
    accelerator.strategy.close()


def test_bfloat16_is_summed_in_float32_and_rounded_once(rank: int) -> None:
    with mirrored("TREE") as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        model = accelerator.prepare(nn.Linear(3, 1, bias=False, dtype=torch.bfloat16))
        values = torch.tensor([[1.0, 256.0, 3e-3]]) * (rank + 1)
        model(values.bfloat16()).sum().backward()
        # The other rank's are half or double of these, without rounding.
        expected = (values.bfloat16().float() / (rank + 1) * 3 / 2).bfloat16()
        assert torch.equal(accelerator.unwrap_model(model).weight.grad, expected)


def test_no_sync_and_the_hook_of_the_script(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with mirrored() as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        weight = accelerator.unwrap_model(model).weight
        with accelerator.no_sync(model):
            accelerator.backward(model(torch.full((1, 1), rank + 1.0)).sum())
        assert weight.grad.item() == rank + 1
        accelerator.backward(model(torch.full((1, 1), 10.0 * rank)).sum())
        assert weight.grad.item() == (1 + 2 + 10) / 2
        own = accelerate.DistributedDataParallelKwargs(comm_hook=accelerate.DDPCommunicationHookType.FP16)
        other = StrategyAccelerator(strategy=strategy, kwargs_handlers=[own])
        hooked = other.prepare(nn.Linear(1, 1, bias=False))
        monkeypatch.setattr(strategy.worker.group, "all_reduce_async", None)  # the strategy is not asked
        hooked(torch.full((1, 1), rank + 1.0)).sum().backward()
        assert other.unwrap_model(hooked).weight.grad.item() == 1.5


@pytest.mark.parametrize("kind", ["plain", "in the scope", "central", "two replicas"])
def test_bf16_autocast_and_state(kind: str, shared_tmp_path: Path) -> None:
    strategy = tfd.experimental.CentralStorageStrategy() if kind == "central" else None
    with strategy or mirrored(replicas=2 if kind == "two replicas" else 1) as strategy:
        accelerator = StrategyAccelerator(strategy=strategy, mixed_precision="bf16")
        seen = []
        with strategy.scope() if kind == "in the scope" else contextlib.nullcontext():
            model = make_model()
        model[0].register_forward_hook(lambda _, __, output: seen.append(output.dtype))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer = accelerator.prepare(model, optimizer)
        inputs, targets = data()[:4]

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            return loss.detach()

        step()
        assert set(seen) == {torch.bfloat16}
        accelerator.save_state(str(shared_tmp_path / "state"))
        accelerator.save_model(model, str(shared_tmp_path / "model"))
        accelerator.wait_for_everyone()
        saved = safetensors.torch.load_file(shared_tmp_path / "model" / "model.safetensors")
        torch.testing.assert_close(saved, dict(accelerator.get_state_dict(model)), rtol=0, atol=0)
        assert sorted(saved) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        after = [step() for _ in range(3)]
        accelerator.load_state(str(shared_tmp_path / "state"))
        assert torch.equal(torch.stack(after), torch.stack([step() for _ in range(3)]))
        assert all("module." not in name for name in accelerator.get_state_dict(model))


def test_uneven_inputs_are_joined(rank: int) -> None:
    with mirrored() as strategy:
        config = accelerate.DataLoaderConfiguration(even_batches=False)
        accelerator = StrategyAccelerator(strategy=strategy, dataloader_config=config)
        model = accelerator.prepare(nn.Linear(1, 1, bias=False))
        loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(1.0, 4.0)[:, None]), batch_size=1))
        gradients = []
        with accelerator.join_uneven_inputs([model]):
            for (batch,) in loader:
                model.zero_grad()
                model(batch).sum().backward()
                gradients.append(accelerator.unwrap_model(model).weight.grad.item())
        assert gradients == [[1.5, 1.5], [1.5]][rank]  # 1 and 2, then 3 and nothing, both over two ranks
        assert not accelerator.multi_device


class Weighed(nn.Module):
    """Behind the loss stands a learned factor: NaN times it has a gradient of NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.factor = make_model(), nn.Parameter(torch.ones(()))

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(self.inner(inputs), targets) * self.factor


def weights_after(loader: Any, model: nn.Module, optimizer: Any, backward: Any) -> None:
    for inputs, targets in loader:
        optimizer.zero_grad()
        backward(model(inputs, targets))
        optimizer.step()


def after_one_device(count: int) -> dict[str, torch.Tensor]:
    model = Weighed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights_after(DataLoader(data(count), batch_size=8), model, optimizer, torch.Tensor.backward)
    return dict(model.state_dict())


@pytest.mark.parametrize(("count", "joined", "owned"), [(13, False, False), (13, False, True), (11, True, False)])
def test_an_uneven_end_of_a_policy_trains_as_one_device(count: int, joined: bool, owned: bool) -> None:
    """The last batch has 4 and 1 examples, or 3 and none."""
    with mirrored() as strategy:
        accelerator = StrategyAccelerator(strategy=strategy, auto_shard_policy=tfd.AutoShardPolicy.DATA)
        with strategy.scope() if owned else contextlib.nullcontext():
            model = Weighed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data(count), batch_size=8))
        with accelerator.join_uneven_inputs([model]) if joined else contextlib.nullcontext():
            weights_after(loader, model, optimizer, accelerator.backward)
        found = dict(accelerator.unwrap_model(model).state_dict())
    torch.testing.assert_close(found, after_one_device(count), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("count", [13, 9])
def test_a_distributed_dataset_trains_as_one_device(count: int, owned: bool) -> None:
    """Its last batch has 3 and 2 examples, or one and none."""
    with mirrored() as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        with strategy.scope() if owned else contextlib.nullcontext():
            model = Weighed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        dataset = strategy.experimental_distribute_dataset(DataLoader(data(count), batch_size=8))
        weights_after(dataset, model, optimizer, accelerator.backward)
        found = dict(accelerator.unwrap_model(model).state_dict())
    torch.testing.assert_close(found, after_one_device(count), rtol=1e-5, atol=1e-6)


def test_reduce_and_gather_for_metrics(rank: int) -> None:
    with mirrored("TREE") as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        value = {"a": torch.tensor([1.0, 2.0]) * (rank + 1), "b": (torch.tensor(rank), torch.tensor(True))}
        total = accelerator.reduce(value, "sum")
        assert total["a"].tolist() == [3.0, 6.0]
        assert total["b"][0].item() == 1
        assert accelerator.reduce(value["a"], "mean").tolist() == [1.5, 3.0]
        assert accelerator.reduce(torch.tensor(rank + 1.0, dtype=torch.bfloat16), "mean").item() == 1.5
        assert accelerator.reduce(torch.tensor(rank), "max").item() == 1
        assert value["a"].tolist() == [rank + 1.0, 2.0 * (rank + 1)]
        loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2))
        seen = torch.cat([accelerator.gather_for_metrics(batch) for batch in loader])
        assert seen.tolist() == list(range(11))


def test_data_is_shared_out_by_the_policy(rank: int) -> None:
    def batches(policy: tfd.AutoShardPolicy | None) -> list[list[int]]:
        accelerator = StrategyAccelerator(strategy=strategy, auto_shard_policy=policy)
        return [batch.tolist() for batch in accelerator.prepare(DataLoader(torch.arange(8), batch_size=4))]

    with mirrored() as strategy:
        assert batches(None) == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]][rank]
        assert batches(tfd.AutoShardPolicy.OFF) == [[0, 1, 2, 3], [4, 5, 6, 7]]
        shares = batches(tfd.AutoShardPolicy.DATA)
        distributed = strategy.experimental_distribute_dataset(DataLoader(torch.arange(8), batch_size=4))
        assert shares == [batch.tolist() for batch in distributed] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]][rank]


def test_attach_changes_an_accelerator_that_exists() -> None:
    class Own(accelerate.Accelerator):
        pass

    with mirrored() as strategy:
        for kind in (accelerate.Accelerator, Own):
            accelerator = kind(cpu=True)
            assert attach(accelerator, strategy) is accelerator
            assert isinstance(accelerator, kind)
            assert accelerator.strategy is strategy
            assert isinstance(accelerator.ddp_handler, StrategyDDPHandler)
            assert attach(accelerator, strategy).ddp_handler.own.__class__ is accelerate.DistributedDataParallelKwargs
            accelerator.dataloader_config.split_batches = True
            assert_same(train(accelerator, make_model()), steps=1)


def test_our_own_loop_over_accelerates_processes() -> None:
    with tfd.MirroredStrategy() as first:  # the group of the processes; accelerate adopts it
        accelerator = StrategyAccelerator(strategy=first)
        assert from_accelerator(accelerator) is first
        strategy = from_accelerator(accelerate.Accelerator(cpu=True))
        assert strategy is not first
        with strategy.scope():
            model = nn.Linear(1, 1)
        weights = accelerator.gather(strategy.run(lambda: model.weight.detach().reshape(1)))
        assert weights[0] == weights[1]
        strategy.close()


@pytest.mark.parametrize("central", [False, True])
def test_a_model_of_the_strategy_keeps_its_own_gradients(central: bool) -> None:
    strategy = tfd.experimental.CentralStorageStrategy() if central else mirrored()
    with strategy:
        accelerator = StrategyAccelerator(
            strategy=strategy, auto_shard_policy=tfd.AutoShardPolicy.DATA, gradient_accumulation_steps=2
        )
        if central:
            model = make_model()  # adopted by prepare
        else:
            with strategy.scope():
                model = make_model()
        result = train(accelerator, model)
        assert result[0] is model
        assert_same(result, steps=2)
        joined = accelerator.join_uneven_inputs([accelerator.prepare(model)])
        with pytest.raises(ValueError, match="join_uneven_inputs needs models"), joined:
            pass


@pytest.mark.distributed(
    workers=2, env=dict.fromkeys(["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TFSTYLE_RENDEZVOUS_FILE"])
)
def test_workers_of_tf_config(rank: int, shared_tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports = said_by_first(rank, shared_tmp_path / "ports", lambda: free_ports(2))
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}))
    accelerator = StrategyAccelerator(auto_shard_policy=tfd.AutoShardPolicy.DATA, cpu=True)
    assert type(accelerator.strategy) is tfd.MultiWorkerMirroredStrategy
    assert (accelerator.process_index, accelerator.num_processes) == (rank, 2)
    assert "RANK" not in os.environ  # it was only lent to accelerate
    assert_same(train(accelerator, make_model()), steps=1)


def test_a_model_that_outlives_its_group_is_freed() -> None:
    for _ in range(8):
        with mirrored() as strategy:
            accelerator = StrategyAccelerator(strategy=strategy)
            model = accelerator.prepare(nn.Linear(1, 1))
            accelerator.gather([torch.ones(1) for _ in range(20)])
        for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
            state._shared_state.clear()
        del accelerator, model  # torch's own way to free it could wait for ever here


def test_a_pickle_has_no_strategy_in_it() -> None:
    with mirrored() as strategy:
        accelerator = StrategyAccelerator(strategy=strategy)
        copy = pickle.loads(pickle.dumps(accelerator))
        assert copy.state.__dict__ == accelerator.state.__dict__
        with pytest.raises(tfd.errors.UnavailableError, match=r"attach\(accelerator, strategy\)"):
            copy.strategy  # noqa: B018
        assert attach(copy, strategy).strategy is strategy


def test_what_does_not_match_is_refused(rank: int) -> None:
    with mirrored() as strategy:
        alone = tfd.OneDeviceStrategy("cpu:0")
        with pytest.raises(ValueError, match="worker 0 of 1, but the Accelerator is process"):
            StrategyAccelerator(strategy=alone)
        for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
            state._shared_state.clear()
        accelerate.PartialState()  # the trap: it does not join CPU ranks
        with pytest.raises(ValueError, match=r"each process would train alone.*write PartialState\(cpu=True\)"):
            StrategyAccelerator(strategy=strategy)
        for state in (accelerate.state.PartialState, accelerate.state.AcceleratorState):
            state._shared_state.clear()
        accelerate.PartialState(cpu=True)  # what the message says
        assert StrategyAccelerator(strategy=strategy).num_processes == 2
