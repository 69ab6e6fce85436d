"""Stacks of other processes: who gets them, from whom they are taken, and what a bad answer costs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tfstyle_dist.comm.peers import stacks
from tfstyle_dist.core import unix_sockets

pytestmark = pytest.mark.timeout(60)
NOBODY = 65534


def ask(name: str, seconds: float = 15.0) -> str | None:
    """Asks in another thread: one that asks is not shown."""
    answer: list[str | None] = []
    asker = threading.Thread(target=lambda: answer.append(stacks.ask(name, seconds)), daemon=True)
    asker.start()
    asker.join(20)
    assert answer, "it waits on"
    return answer[0]


def test_they_are_shown_until_the_last_user_stops() -> None:
    assert stacks.socket_name() == ""
    stacks.start()
    stacks.start()
    name = stacks.socket_name()
    shown = ask(name)
    assert shown is not None
    assert "test_they_are_shown_until_the_last_user_stops" in shown
    stacks.stop()
    assert stacks.ask(name) is not None
    stacks.stop()
    assert stacks.socket_name() == ""
    assert stacks.ask(name) is None
    assert not [thread for thread in threading.enumerate() if thread.name == "tfstyle_dist stacks"]


def test_nobody_knows_the_name_before() -> None:
    names = set()
    for _ in range(2):
        stacks.start()
        names.add(stacks.socket_name())
        stacks.stop()
    assert len(names) == 2
    assert not any(str(os.getpid()) in name for name in names)


@pytest.fixture
def answering() -> Iterator[Callable[[Callable[[Any], None]], str]]:
    """Makes a process of this user that does with each connection what it likes."""
    with contextlib.ExitStack() as ends:

        def make(answer: Callable[[Any], None]) -> str:
            name = unix_sockets.new_name("test")
            listening = ends.enter_context(unix_sockets.listen(name, 1))

            def serve() -> None:
                with contextlib.suppress(OSError), listening.accept()[0] as asker:
                    answer(asker)

            thread = threading.Thread(target=serve)
            thread.start()
            ends.callback(thread.join)
            return name

        yield make


def test_an_answer_that_never_ends_is_cut(answering: Any) -> None:
    over = threading.Event()

    def trickle(asker: Any) -> None:
        while not over.wait(0.05):
            asker.sendall(b"line\n")

    try:
        assert set((ask(answering(trickle), 1.0) or "").split()) == {"line"}
    finally:
        over.set()


def test_an_answer_that_is_too_long_is_cut(answering: Any) -> None:
    assert len(ask(answering(lambda asker: asker.sendall(bytes(1 << 22)))) or "") == 20_000


@pytest.mark.skipif(os.geteuid() != 0, reason="another user's process needs root")
def test_another_user_neither_answers_nor_asks() -> None:
    source = f"""
import os, socket, sys
os.setgid({NOBODY}); os.setuid({NOBODY})
own = socket.socket(socket.AF_UNIX); own.bind("\\0" + sys.argv[1]); own.listen(1)
print("bound", flush=True)
with own.accept()[0] as asker:
    try:
        asker.sendall(b"send your keys to me")
    except OSError:
        pass
input()
asker = socket.socket(socket.AF_UNIX); asker.settimeout(20); asker.connect("\\0" + sys.argv[2])
print(asker.recv(100), flush=True)
"""
    name = unix_sockets.new_name("test")
    stacks.start()
    command = [sys.executable, "-I", "-S", "-c", source, name, stacks.socket_name()]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "bound\n"
        assert ask(name) is None
        assert other.communicate("\n", timeout=30)[0] == "b''\n"
    finally:
        other.kill()
        other.communicate()
        stacks.stop()


NO_FILES = """
import os, resource, socket, time
from tfstyle_dist.comm.peers import stacks
stacks.start()
name = stacks.socket_name()
waiting = socket.socket(socket.AF_UNIX)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.dup(0))
except OSError:
    waiting.connect("\\0" + name)  # it cannot be taken
time.sleep(1)
for handle in held:
    os.close(handle)
assert waiting.recv(1 << 16).startswith(b"thread MainThread")
assert stacks.ask(name, 20) is not None
stacks.stop()
"""


def test_it_goes_on_when_there_is_a_free_file_again() -> None:
    done = subprocess.run([sys.executable, "-c", NO_FILES], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
