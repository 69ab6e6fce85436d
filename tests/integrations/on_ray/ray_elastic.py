"""The worker of the elastic tests as a training function of Ray Train, whose processes import this file."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any


def train(config: dict[str, Any]) -> str:
    """Trains; each worker writes what it would print into a file of its own, one for each life."""
    import elastic_train
    import ray.train
    import torch

    torch.set_num_threads(1)
    rank, folder = ray.train.get_context().get_world_rank(), Path(config["folder"])
    life = len(list(folder.glob(f"worker{rank}-*")))
    (folder / f"worker{rank}-{life}").write_text(str(os.getpid()))
    os.environ.update({"LIFE": str(life), **config["environment"]})
    sys.argv = ["elastic_train.py", "mlp", str(config["steps"]), *config["faults"]]
    printed: list[str] = []
    vars(elastic_train)["print"] = lambda text, flush: printed.append(text)
    elastic_train.main()
    (text,) = printed
    (folder / f"result{rank}").write_text(text.removeprefix("result "))
    return "came to the end"


def raise_once(config: dict[str, Any]) -> None:
    """In its first life a worker raises where it would kill itself."""
    kill, marker = os.kill, Path(config["folder"]) / "raised"

    def fail(process: int, number: int) -> None:
        if number != signal.SIGKILL:
            return kill(process, number)
        marker.touch()
        raise ZeroDivisionError("once")

    if not marker.exists():
        os.kill = fail  # in this process of Ray's, which ends with the training
    train(config)
