"""A worker of torchft for benchmarks/elastic.py: the same model, padding and log as a worker of an elastic job.

Run by the Python of an environment that holds torchft 0.2 (``benchmarks/elastic.py --torchft PYTHON``). Limits are 5 s,
where torchft's own are 60 s. The gradients are summed in one call of its ``Manager``: with torch 2.13 its
``DistributedDataParallel`` fails an assertion of its own when a worker dies.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torchft import Manager, Optimizer, ProcessGroupGloo


def main(log: str, rank: int, seconds: float, pad: float) -> None:
    """Trains for some time, and writes the time and number of each committed step.

    Args:
        log: the file to write to.
        rank: this replica group; it is one process.
        seconds: of training.
        pad: seconds of sleep in a step.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=5)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    inner = torch.optim.Adam(model.parameters(), lr=1e-3)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=limit,
        quorum_timeout=limit,
        connect_timeout=limit,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=os.environ["TORCHFT_LIGHTHOUSE"],
        replica_id=f"worker_{rank}",
        hostname="127.0.0.1",
    )
    optimizer = Optimizer(manager, inner)
    x = torch.randn(8, 64)
    with open(log, "a") as file:
        print("ready", time.time(), 0, file=file, flush=True)
        end_file = Path(log).with_name("end")
        if not end_file.exists():
            end_file.write_text(str(time.time() + seconds))
        end = float(end_file.read_text())
        print("started", time.time(), 0, file=file, flush=True)
        while time.time() < end:
            before = manager.current_step()
            optimizer.zero_grad()  # torchft finds out who is there beside what follows
            time.sleep(pad)
            model(x).square().mean().backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            for gradient, mean in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(mean.view_as(gradient))
            optimizer.step()
            if manager.current_step() > before:
                print("commit", time.time(), manager.current_step(), file=file, flush=True)
        print("end", time.time(), manager.current_step(), file=file, flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]))
