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
from tfstyle_dist.parameter_server.protocol.zeromq_sockets import Context
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


NO_FILE_LEFT = """
import contextlib, os, resource, select, socket
from tfstyle_dist.parameter_server.transports.listening_socket import ListeningSocket
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
name = f"\\0tfstyle-test-{os.getpid()}"
listening = socket.socket(socket.AF_UNIX)
listening.bind(name)
listener = ListeningSocket(listening, "/job:ps/task:0")

def waits():
    return bool(select.select([listener.number], [], [], 0)[0])

def connect():
    client = socket.socket(socket.AF_UNIX)
    client.connect(name)
    client.settimeout(20)
    return client

refused, taken = [connect() for _ in range(3)], connect()
files = []
with contextlib.suppress(OSError):
    while True:
        files.append(os.open(os.devnull, os.O_RDONLY))
for client in refused:
    assert listener.accept(0) is None
    assert client.recv(1) == b""
assert waits(), "the last one was not asked for yet"
os.close(files.pop())
connection = listener.accept(0)
connection.sendall(b"!")
assert taken.recv(1) == b"!"
os.close(files.pop())
os.close(files.pop())
more = connect()
assert listener.accept(1 << 20) is None
assert more.recv(1) == b""
assert not waits()
listener.close()
print("done")
"""


def test_a_connection_without_a_file_for_it_does_not_wait_for_ever() -> None:
    """It would keep the server busy: its listening socket stays ready until the connection is taken."""
    found = subprocess.run([sys.executable, "-c", NO_FILE_LEFT], capture_output=True, text=True, timeout=50)
    assert found.stdout == "done\n", found.stderr
    assert found.stderr.count("has no file left for a connection") == 1
