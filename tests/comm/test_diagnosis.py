"""Which workers are called missing: one that is late with its own error is not."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from tfstyle_dist.comm.peers import diagnosis
from tfstyle_dist.comm.peers.peer import this_peer

pytestmark = pytest.mark.timeout(60)


def missing(*, someone_is_dead: bool, late: float, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Those that worker 0 misses, where worker 1 runs and says ``late`` seconds later what it waits in."""
    monkeypatch.setattr(diagnosis, "_GRACE_SECONDS", 0.1)
    gone = subprocess.Popen(["true"])
    gone.wait()
    store = dist.HashStore()
    pids = [os.getpid(), os.getpid(), gone.pid if someone_is_dead else os.getpid()]
    peers = [replace(this_peer(rank), pid=pid) for rank, pid in enumerate(pids)]
    other = threading.Timer(late, store.set, ("p/waiting/1", "all_reduce"))
    other.start()
    begin = time.monotonic()
    found, text = diagnosis.describe_missing(store, "p", 0, peers, "all_reduce")
    assert time.monotonic() - begin < 30
    assert "worker 2" in text
    other.join()
    return found


def test_who_has_yet_to_find_out_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(someone_is_dead=True, late=1.0, monkeypatch=monkeypatch) == [2]


def test_nobody_is_waited_for_where_all_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing(someone_is_dead=False, late=5.0, monkeypatch=monkeypatch) == [1, 2]
