"""``nn.SyncBatchNorm`` in ``run``: the statistics of all replicas' examples, also where the shares differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tfstyle_dist as td

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("sizes", [(3, 1), (4, 0), (2, 2, 3)])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_uneven_shares_normalise_as_one_batch(sizes: tuple[int, ...], momentum: float | None) -> None:
    torch.manual_seed(0)
    whole = torch.randn(sum(sizes), 3, dtype=torch.float64) * 5 + 100
    plain = nn.BatchNorm1d(3, momentum=momentum).double()
    x = whole.clone().requires_grad_()
    for _ in range(2):
        y = plain(x)
    (y**3).sum().backward()
    with td.MirroredStrategy([f"cpu:{r}" for r in range(len(sizes))]) as strategy:
        with strategy.scope():
            norm = nn.SyncBatchNorm(3, momentum=momentum).double()

        def step(share: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            leaf = share.to(torch.empty(0).device, copy=True).requires_grad_()
            for _ in range(2):
                out = norm(leaf)
            (out**3).sum().backward()
            return out.detach(), leaf.grad, norm.running_var.clone()

        shares = td.values.PerReplica(whole.split(list(sizes)))
        out, grad, variance = strategy.run(step, args=(shares,))
        torch.testing.assert_close(torch.cat(strategy.experimental_local_results(out)), y.detach())
        torch.testing.assert_close(torch.cat(strategy.experimental_local_results(grad)), x.grad)
        for found in strategy.experimental_local_results(variance):
            torch.testing.assert_close(found, plain.running_var)
        assert norm.weight.grad is not None
        assert plain.weight.grad is not None
        torch.testing.assert_close(norm.weight.grad * len(sizes), plain.weight.grad)  # the replicas' mean


def test_the_statistics_are_used_where_the_module_does_not_train() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            norm = nn.SyncBatchNorm(2).eval()
            norm.running_mean.fill_(1.0)
        out = strategy.run(lambda: norm(torch.ones(1, 2)))
        assert float(strategy.reduce("SUM", out, axis=None).abs().max()) == pytest.approx(0.0, abs=1e-6)
        with pytest.raises(ValueError, match="at least 2 dimensions"):
            strategy.run(lambda: norm.train()(torch.ones(3)))


def test_inputs_of_other_channels_are_refused() -> None:
    """One channel would be stretched over all of them without an error."""
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.scope():
            norm = nn.SyncBatchNorm(1, track_running_stats=False)
            bare = nn.SyncBatchNorm(1, affine=False, track_running_stats=False)
        with pytest.raises(
            ValueError, match=r"SyncBatchNorm\(1\) takes inputs of 1 channels, got 3: \(2, 3\).*num_features=3"
        ):
            strategy.run(lambda: norm(torch.ones(2, 3)))
        out = strategy.run(lambda: bare(torch.ones(2, 3)))  # as plain BatchNorm1d, which has nothing to compare with
        assert float(strategy.reduce("SUM", out, axis=None).abs().max()) == 0.0


@pytest.mark.distributed(workers=2)
def test_a_group_of_some_workers_is_refused(process_group: object, rank: int) -> None:
    alone = [torch.distributed.new_group([number]) for number in range(2)]
    with td.MirroredStrategy() as strategy:
        with strategy.scope():
            whole = nn.SyncBatchNorm(2, process_group=process_group)
            norm = nn.SyncBatchNorm(2, process_group=alone[rank])
            others = nn.SyncBatchNorm(2, process_group=alone[1 - rank])
        x = torch.full((2, 2), float(rank), device=torch.empty(0).device)
        assert float(strategy.run(lambda: whole(x).detach()).mean()) == pytest.approx(2.0 * rank - 1.0, abs=1e-3)
        with pytest.raises(ValueError, match=r"a process_group of 1 of the 2 workers.*Leave process_group out"):
            strategy.run(lambda: norm(x))
        with pytest.raises(ValueError, match="a process_group of other workers"):
            strategy.run(lambda: others(x))
        assert torch.equal(norm.eval()(x), nn.BatchNorm1d(2).eval()(x))


def _ranks_of_different_branches(strategy: td.Strategy) -> None:
    """Two ranks whose last layer only one of them uses, by turns, behind a layer whose gradients meet in backward."""

    def build() -> nn.ModuleList:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 4))
        return nn.ModuleList([net, nn.Linear(4, 4)]).double()

    def loss(h: torch.Tensor, number: int, k: int) -> torch.Tensor:
        return ((model[1](h) if k == 0 or (k + number) % 2 else h) ** 2).mean()

    strategy.gradient_reducer.bytes_per_pack = 8  # a bucket for each parameter
    with strategy.scope():
        norm: type[nn.Module] = nn.SyncBatchNorm
        model = build()
    number, found = strategy.worker.group.rank, []
    whole = torch.randn(4, 10, 3, generator=torch.Generator().manual_seed(1), device="cpu").double()

    def step(x: torch.Tensor, k: int) -> None:
        model.zero_grad()
        loss(model[0](x.to(torch.empty(0).device)), number, k).backward()

    for k, x in enumerate(whole):
        strategy.run(step, args=(x.chunk(2)[number], k))
        found.append([p.grad.cpu().clone() for p in model.parameters()])
    norm = nn.BatchNorm1d
    model = build()
    for k, x in enumerate(whole):
        model.zero_grad()
        first, second = model[0](x.to(torch.empty(0).device)).chunk(2)
        ((loss(first, 0, k) + loss(second, 1, k)) / 2).backward()
        torch.testing.assert_close(found[k], [p.grad.cpu() for p in model.parameters()])


@pytest.mark.distributed(workers=2, timeout=50, deadline=15, env={"TFSTYLE_SHARED_MEMORY": "0"})
def test_buckets_wait_for_what_meets_in_backward() -> None:
    """Else one rank sends a bucket before, the other one after the gradient of the statistics."""
    with td.MirroredStrategy() as strategy:
        _ranks_of_different_branches(strategy)


@pytest.mark.cpu_only("central storage between processes computes there")
@pytest.mark.distributed(workers=2, timeout=50, deadline=15)
def test_buckets_of_central_storage_wait_too() -> None:
    with td.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0") as strategy:
        _ranks_of_different_branches(strategy)
