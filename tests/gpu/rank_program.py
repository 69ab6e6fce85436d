"""Ranks on devices, of their own where there are enough; started with what to show, one part or several."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from device_kind import KIND, load_kind
from shared_gpu import on_a_host_of_its_own
from torch.utils.checkpoint import checkpoint

import tfstyle_dist as td
from tfstyle_dist.strategies.reductions import reduce_columns

RANK = int(os.environ["RANK"])


def strategy_of(implementation: str, limit: float = 60.0) -> td.MirroredStrategy:
    options = td.experimental.CommunicationOptions(implementation=implementation, timeout_seconds=limit)
    return td.MirroredStrategy([DEVICE], communication_options=options)


def library_name() -> str:
    """What torch sums with between devices of this kind."""
    return torch.distributed.get_default_backend_for_device(KIND)


def say(**facts: Any) -> None:
    sys.stdout.write(json.dumps({"part": part, "rank": RANK, **facts}) + "\n")
    sys.stdout.flush()


def train(implementation: str) -> None:
    strategy = strategy_of(implementation)
    torch.manual_seed(RANK)
    with strategy.scope():
        model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(3)))
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    calls = getattr(torch.distributed.group.WORLD, "calls", [])
    for kind in ("plain", "checkpoint", "reentrant"):

        def step(x: torch.Tensor, kind: str = kind) -> None:
            optimizer.zero_grad()
            h = model[0](x)
            h = model[1](h) if kind == "plain" else checkpoint(model[1], h, use_reentrant=kind == "reentrant")
            (model[2](h) ** 2).sum().backward()
            optimizer.step()

        for _ in range(3):
            strategy.run(step, args=(torch.full((2, 3), 1.0 + RANK, device=DEVICE),))
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        say(kind=kind, weights=weights.cpu().tolist(), device=str(weights.device))
    used = len(calls) > 0 if KIND == "pretend" else f"{KIND}:{library_name()}" in torch.distributed.get_backend_config()
    say(current=str(torch.ones(1, device=KIND).device), library=used)
    strategy.close()


def values(implementation: str) -> None:
    strategy = strategy_of(implementation)
    x, half = torch.full((2, 2), 1.0 + RANK, device=DEVICE), torch.full((2,), 1.0 + RANK, device=DEVICE).half()
    context = td.get_replica_context
    cases = {
        "reduce": lambda: strategy.reduce("SUM", x, axis=None),
        "reduce of a CPU value": lambda: strategy.reduce("SUM", torch.tensor(3), axis=None),
        "reduce rows": lambda: strategy.reduce("SUM", x, axis=0),
        "mean of rows": lambda: strategy.reduce("MEAN", x, axis=0),
        "mean of halves": lambda: strategy.reduce("MEAN", half, axis=None),
        "all_reduce": lambda: strategy.run(lambda: context().all_reduce("SUM", x)),
        "all_reduce of a CPU value": lambda: strategy.run(lambda: context().all_reduce("SUM", torch.ones(2))),
        "all_reduce of both": lambda: torch.cat(
            [t.reshape(-1) for t in strategy.run(lambda: context().all_reduce("SUM", [x, torch.ones(2), x]))]
        ),
        "all_gather": lambda: strategy.run(lambda: context().all_gather(x, 0)),
        "all_gather of uneven CPU values": lambda: strategy.run(lambda: context().all_gather(torch.ones(1 + RANK), 0)),
        "gather": lambda: strategy.gather(x, 0),
        "places of several values": lambda: stay(strategy, x, torch.ones(2, 2), x),
        "calls of the library for what the host must know": lambda: host_facts(strategy),
    }
    for count in (4, 2_000_000):  # few elements are gathered, many halved
        cases[f"a tree over {count} elements"] = lambda count=count: in_a_tree(strategy, count)
    for name, case in cases.items():
        say(name=name, value=case().float().cpu().reshape(-1).tolist())
    # One rank has it on its device, the other on the CPU: a library would wait for ever.
    apart = half.float().cpu() if RANK else half.float()
    for name in ("reduce", "gather"):
        try:
            value = strategy.reduce("SUM", apart, None) if name == "reduce" else strategy.gather(apart, 0)
            value = value.cpu().tolist()
        except td.errors.CollectiveMismatchError as error:
            value = ["refused" if KIND in str(error) else str(error)]
        say(name=f"{name} of values in different places", value=value)
    strategy.close()


def stay(strategy: td.Strategy, *given: torch.Tensor) -> torch.Tensor:
    """Whether each of some values that are reduced together is found where it was."""
    found = reduce_columns(strategy, td.ReduceOp.SUM, [[value] for value in given], "places")
    return torch.tensor([after.device == before.device for after, before in zip(found, given, strict=True)])


def host_facts(strategy: td.Strategy) -> torch.Tensor:
    """How many calls a loop makes that asks whether to stop, whether to save, and whether there is a batch."""
    calls = getattr(torch.distributed.group.WORLD, "calls", [])  # in the pretend library
    with tempfile.TemporaryDirectory() as own, strategy.scope():
        folder = strategy.worker.group.gather_objects(own, "folder")[0]
        handler = td.experimental.PreemptionCheckpointHandler(None, td.train.Checkpoint(), folder)
        data = torch.utils.data.DataLoader(range(8), batch_size=2, sampler=torch.utils.data.RandomSampler(range(8)))
        before, steps = len(calls), 0
        for _ in strategy.experimental_distribute_dataset(data):
            handler.run(lambda: None)
            steps += 1
            if strategy.should_stop(RANK == 1 and steps == 3):
                break
        assert steps == 3
    return torch.tensor(float(len(calls) - before))


def in_a_tree(strategy: td.Strategy, count: int) -> torch.Tensor:
    values = torch.full((count,), 1.0 + RANK, device=DEVICE)
    strategy.worker.group.all_reduce(values, "a tree", td.AggregationMethod.TREE)
    assert bool((values == 3.0).all())
    return values[:2]


def everyday(implementation: str) -> None:
    """Loops as users write them: uneven last batches, SyncBatchNorm, a counter, a checkpoint."""
    strategy = strategy_of(implementation)
    with tempfile.TemporaryDirectory() as own:
        folder = strategy.worker.group.gather_objects(own, "folder")[0]
        # The last batch has 3 examples, or 1, of which the second rank has none.
        for name, rows, norm in (("SyncBatchNorm", 11, True), ("an empty share", 9, False)):
            loop(strategy, name, rows, norm, f"{folder}/{rows}")
        strategy.worker.group.gather_objects(None, "read")
    strategy.close()


def loop(strategy: td.MirroredStrategy, name: str, rows: int, norm: bool, path: str) -> None:
    """Says how far one training is from that of one device, and from itself where it goes on from a checkpoint."""

    def build(middle: Any) -> torch.nn.Module:
        ends = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
        return torch.nn.Sequential(ends[0], middle(4) if norm else torch.nn.Tanh(), ends[1]).double()

    def update(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(net(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def state(net: torch.nn.Module) -> torch.Tensor:
        return torch.cat([value.detach().reshape(-1).double().cpu() for value in net.state_dict().values()])

    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(1)).double()
    batches = [(part, part.sum(1, keepdim=True)) for part in (x[:8], x[8:])]
    on_read, add = td.VariableSynchronization.ON_READ, td.VariableAggregation.SUM
    torch.manual_seed(RANK)
    with strategy.scope():
        model, seen = build(torch.nn.SyncBatchNorm), td.Variable(0.0, synchronization=on_read, aggregation=add)
    plain = build(torch.nn.BatchNorm1d)
    plain.load_state_dict({key: value.detach().cpu() for key, value in model.state_dict().items()})
    ours, theirs = (torch.optim.Adam(net.parameters(), 0.05, eps=1e-3) for net in (model, plain))

    def step(*batch: torch.Tensor) -> torch.Tensor:
        seen.assign_add(torch.tensor(float(len(batch[0])), device=DEVICE))
        return update(model, ours, batch)

    def epoch() -> torch.Tensor:
        losses = [
            strategy.reduce("MEAN", strategy.run(step, args=batch), axis=None)
            for batch in strategy.experimental_distribute_dataset(batches)
        ]
        assert not torch.stack(losses).isnan().any()
        return state(model)

    after = epoch()
    for batch in batches:
        update(plain, theirs, batch)
    checkpoint = td.train.Checkpoint(model=model, optimizer=ours, seen=seen)
    saved = checkpoint.save(path)
    second, both = epoch(), float(seen.read_value())
    checkpoint.restore(saved).assert_consumed()
    again = epoch()
    say(
        name=name,
        weights=again.tolist(),
        off=float((after - state(plain)).abs().max()),
        restored=torch.equal(second, again),
        seen=[both, float(seen.read_value())],
    )


def library(_: str) -> None:
    """Every collective of a group of one rank that the accelerator's library carries."""
    from datetime import timedelta

    import torch.distributed as dist

    from tfstyle_dist.comm.torch_group import TorchGroup

    backend = f"cpu:gloo,{KIND}:{library_name()}"
    dist.init_process_group(backend, rank=0, world_size=1)
    group = TorchGroup(dist.group.WORLD, timedelta(seconds=30), None, backend, dist.destroy_process_group)
    made = {
        "all_reduce": lambda x: group.all_reduce(x, "sum") or x,
        "all_gather": lambda x: group.all_gather(x, "gather")[0],
        "broadcast": lambda x: group.broadcast(x, 0, "broadcast") or x,
    }
    for name, call in made.items():
        for where in (DEVICE, "cpu"):
            x = torch.arange(4.0, device=where)
            result = call(x)
            say(name=f"{name} of {where}", value=result.cpu().tolist(), kept=result.device == x.device)
    group.close()


def together(_: str) -> None:
    """Both ranks on the first device, which a library like NCCL refuses."""
    try:
        strategy_of("NCCL")
        refused = ""
    except ValueError as error:
        refused = str(error)
    strategy = strategy_of("AUTO")
    with strategy.scope():
        model = torch.nn.Linear(2, 1)

    def step() -> None:
        model(torch.full((1, 2), 1.0 + RANK, device=DEVICE)).sum().backward()

    strategy.run(step)
    calls = getattr(torch.distributed.group.WORLD, "calls", [])
    say(refused=refused, gradient=model.weight.grad.tolist(), where=str(model.weight.grad.device), calls=len(calls))
    strategy.close()


def lost(how: str) -> None:
    strategy = strategy_of("AUTO", limit=4.0)
    with strategy.scope():
        model = torch.nn.Linear(3, 3)

    def step() -> None:
        model(torch.ones(2, 3, device=DEVICE)).sum().backward()

    strategy.run(step)
    if RANK == 1:
        if how == "stuck":
            time.sleep(10)  # the other one has 4 seconds
        os._exit(0)
    try:
        strategy.run(step)
    except (td.errors.PeerLostError, td.errors.DeadlineExceededError) as error:
        under_way = list(getattr(torch.distributed.group.WORLD, "under_way", []))  # in the pretend library
        waits = [not work.is_completed() for work in under_way]
        strategy.close()
        ended = [work.is_completed() for work in under_way]
        say(error=type(error).__name__, says="Worker 1 is missing" in str(error), waits=any(waits), ended=all(ended))
        os._exit(0)


if __name__ == "__main__":
    count = load_kind().device_count()
    DEVICE = f"{KIND}:{RANK % count}"
    if sys.argv[1] == "together":
        DEVICE = f"{KIND}:0"
    elif count < int(os.environ["WORLD_SIZE"]):
        os.environ.update(on_a_host_of_its_own(RANK))
    if KIND == "pretend":
        from pretend_accelerator.collectives import register

        register()
    parts = {part.__name__: part for part in (train, values, everyday, library, lost, together)}
    for part in sys.argv[1].split(","):
        parts[part](sys.argv[2])
