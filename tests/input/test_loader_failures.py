"""A DataLoader process that raises or is killed ends the iteration with an error, on every rank, and does not hang."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import tfstyle_dist as td
from tfstyle_dist.core.errors import PeerLostError, UnavailableError
from tfstyle_dist.testing.runner import run_script

BAD = 5


class Faulty(Dataset[torch.Tensor]):
    """Sample ``BAD`` fails in the way it is told."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == BAD and self.how == "raise":
            raise OSError("cannot read sample 5")
        if index == BAD and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(float(index))


def read(strategy: td.Strategy, how: str) -> Any:
    return list(strategy.experimental_distribute_dataset(Faulty(how), global_batch_size=2, num_workers=1))


@pytest.mark.parametrize(
    ("how", "error", "words"), [("raise", OSError, "sample 5"), ("kill", RuntimeError, "DataLoader worker")]
)
def test_one_process(how: str, error: type[Exception], words: str) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy, pytest.raises(error, match=words):
        read(strategy, how)


@pytest.mark.parametrize("how", ["raise", "kill"])
def test_the_other_ranks_hear_of_it(how: str) -> None:
    """In fresh processes: loader processes are forked, and a long-lived pool of ranks has threads and locks by now."""
    done = run_script(
        [__file__, how], nproc=2, timeout=100, env={"TFSTYLE_TIMEOUT_SECONDS": "8", "CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_news_of_a_dead_loader_that_comes_while_values_are_sent_is_no_lost_worker(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's signal handler raises in whatever the main thread does."""

    def interrupted(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    with td.MultiWorkerMirroredStrategy() as strategy:
        transport, tensor = strategy.worker.group._transport, torch.ones(2)
        with monkeypatch.context() as patched:
            patched.setattr(torch.distributed, "all_reduce", interrupted)
            patched.setattr(torch.distributed, "batch_isend_irecv", interrupted)
            for call in (
                lambda: transport.start_all_reduce(tensor, "a sum"),
                lambda: transport.exchange([(1 - rank, tensor)], [], "a message"),
            ):
                with pytest.raises(RuntimeError, match="DataLoader worker") as caught:
                    call()
                assert type(caught.value) is RuntimeError
        assert strategy.reduce("SUM", tensor, axis=None).tolist() == [2.0, 2.0]


def main(how: str) -> None:
    """Sample 5 is rank 1's; rank 0 meets the news in its next collective call."""
    strategy = td.MirroredStrategy()
    rank = strategy.worker.group.rank
    expected = (OSError if how == "raise" else RuntimeError, PeerLostError, UnavailableError, TimeoutError)
    with pytest.raises(expected) as caught:  # noqa: PT012
        for batch in strategy.experimental_distribute_dataset(Faulty(how), global_batch_size=2, num_workers=1):
            strategy.reduce("SUM", batch, axis=0)
        strategy.close()
    text = str(caught.value)
    if rank == 0:
        assert "worker 1" in text.lower(), text
    elif how == "raise":
        assert isinstance(caught.value, OSError)
        assert any("input of worker 1" in note for note in caught.value.__notes__)
    else:  # torch's signal handler raises wherever the main thread is: in next(), or while it waits in reduce()
        assert "DataLoader worker" in text, text
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1])
