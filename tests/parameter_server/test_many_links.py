"""A program that talks to hundreds of tasks needs more open files than a process has as a rule."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(60)
LINKS = 300
SCRIPT = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.parameter_server.zmq_link import Context
context = Context(None)
try:
    links = [context.connect("127.0.0.1:9", b"c%d" % number) for number in range(int(sys.argv[3]))]
    print(len(links), "links")
except UnavailableError as error:
    print(error)
finally:
    context.close()
"""


def links_under(soft: int, hard: int) -> str:
    command = [sys.executable, "-c", SCRIPT, str(soft), str(hard), str(LINKS)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=50, check=True)
    return found.stdout.strip()


def test_more_files_are_taken_than_the_process_began_with() -> None:
    assert links_under(256, 4096) == f"{LINKS} links"


def test_too_few_files_are_named() -> None:
    said = links_under(256, 256)
    assert "This process may have 256 files open" in said
    assert "ulimit -Hn" in said
