"""FSDP2 of torch under a strategy: the strategy divides the data, FSDP the model and its gradients."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
import transformer

import tfstyle_dist as tfd
from tfstyle_dist.model_parallel import full_state_dict, num_local_elements


@pytest.mark.distributed(workers=2, timeout=120, deadline=40)
def test_fully_shard_in_a_scope(rank: int, shared_tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    with tfd.MirroredStrategy() as strategy:
        torch.manual_seed(rank)
        with strategy.scope():
            model = transformer.Transformer()
        whole = num_local_elements(model.parameters())
        mesh = strategy.experimental_data_mesh()
        with strategy.scope():
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            strategy.experimental_adopt(model)
            optimizer = transformer.make_optimizer(model)
        assert num_local_elements(model.parameters()) <= 0.6 * whole
        start = full_state_dict(model)

        def step(words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = transformer.loss_of(model, words, following)
            loss.backward()
            optimizer.step()
            return loss.detach()

        steps, losses = transformer.batches(3), []
        for batch in strategy.experimental_distribute_dataset(steps):
            # FSDP warns of in-place operations on the output, of which there are none.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            losses.append(float(strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)))
        expected, plain, _ = transformer.plain_training(start, steps)
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(full_state_dict(model), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
        path = tfd.train.Checkpoint(model=model, optimizer=optimizer).save(str(shared_tmp_path / "sharded"))
        saved = full_state_dict(optimizer)["state"]
    with tfd.MirroredStrategy() as strategy:
        with strategy.scope():
            model = transformer.Transformer()
            optimizer = transformer.make_optimizer(model)
        tfd.train.Checkpoint(model=model, optimizer=optimizer).restore(path).assert_consumed()
        torch.testing.assert_close(dict(model.state_dict()), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state_dict()["state"], saved)


@pytest.mark.distributed(workers=4, timeout=60, deadline=30)
def test_a_division_that_leaves_workers_out_is_refused(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with tfd.MirroredStrategy() as strategy:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))["model"]
        layer = torch.nn.Linear(4, 4)
        layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(0)]))
        with pytest.raises(ValueError, match="divided over 2 of 4 workers"):
            strategy.experimental_adopt(layer)
