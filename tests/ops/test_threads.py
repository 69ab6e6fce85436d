"""Threads of the program that must not each have a team of torch's threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)
SCRIPT = """
import os, threading
import torch
from tfstyle_dist.ops.threads import work_alone

torch.set_num_threads(4)
values = torch.ones(1 << 20)
done, end = threading.Barrier(7), threading.Event()

def work():
    work_alone()
    assert (values + 1).sum() == 2 << 20 and torch.get_num_threads() == 1
    done.wait()
    end.wait()

(values + 1).sum()
before = len(os.listdir("/proc/self/task"))
threads = [threading.Thread(target=work) for _ in range(6)]
for thread in threads:
    thread.start()
done.wait()
print(len(os.listdir("/proc/self/task")) - before, torch.get_num_threads())
end.set()
"""


def test_a_thread_that_works_alone_brings_no_others() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=50, check=True)
    assert found.stdout.split() == ["6", "4"]
