"""Strategies over the process groups of accelerate, Lightning Fabric and a plain script, in processes of their own."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from started_together import clean_environment, outputs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAIN = """
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # imported later, it would keep the group after its end: see docs/scaling_out.md
import tfstyle_dist as tfd

def train(strategy):
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.arange(12.0).view(4, 3) / 10
    def step():
        replica = tfd.get_replica_context()
        share = data.chunk(replica.num_replicas_in_sync)[int(replica.replica_id_in_sync_group)]
        optimizer.zero_grad()
        model(share).square().mean().backward()
        optimizer.step()
    for _ in range(3):
        strategy.run(step)
    return model.weight.detach().clone()

def check(rank):
    assert dist.is_initialized()
    theirs = dist.group.WORLD
    for make in (tfd.MirroredStrategy, tfd.MultiWorkerMirroredStrategy):
        with make() as strategy:
            assert (strategy.num_replicas_in_sync, strategy.is_chief) == (2, rank == 0)
            trained = train(strategy)
        with tfd.OneDeviceStrategy("cpu:0") as alone:
            torch.testing.assert_close(trained, train(alone))
    assert dist.group.WORLD is theirs
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    print(f"rank {rank} agrees", flush=True)
"""
PLAIN = """
import sys
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
check(int(sys.argv[2]))
dist.destroy_process_group()
"""
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
check(accelerator.process_index)
assert accelerator.gather(torch.tensor([accelerator.process_index])).tolist() == [0, 1]
accelerator.end_training()
"""
FABRIC = """
from lightning.fabric import Fabric
fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
check(fabric.global_rank)
assert fabric.all_gather(torch.tensor([fabric.global_rank])).flatten().tolist() == [0, 1]
"""
LETS_GO = """
import gc, weakref
import torch
import torch.distributed as dist
import tfstyle_dist.integrations.accelerate

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
dist.destroy_process_group()
gc.collect()
print("rank 0 agrees" if group() is None else "the group lives on")
"""


def agreeing(*commands: list[str]) -> list[str]:
    """The ranks that say that their weights agree with one device."""
    texts = outputs([(command, clean_environment()) for command in commands], 250)
    return sorted(re.findall(r"rank (\d) agrees", "".join(texts)))


def test_of_a_plain_script(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(TRAIN + PLAIN)
    command = [sys.executable, str(program), str(tmp_path / "meeting")]
    assert agreeing([*command, "0"], [*command, "1"]) == ["0", "1"]


def test_of_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(TRAIN + ACCELERATE)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program)]
    assert agreeing(command) == ["0", "1"]


def test_a_destroyed_group_is_gone_although_an_optimizer_was_made(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    program = tmp_path / "program.py"
    program.write_text(LETS_GO)
    assert agreeing([sys.executable, str(program)]) == ["0"]


def test_of_fabric(tmp_path: Path) -> None:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed: `make test-engines` runs this with it")
    program = tmp_path / "program.py"
    program.write_text(TRAIN + FABRIC)
    assert agreeing([sys.executable, str(program)]) == ["0", "1"]
