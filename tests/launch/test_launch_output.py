"""What the launcher shows where its output takes no such letters, has no reader or no room, or the terminal ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(90)


def test_letters_that_the_output_has_not_are_escaped(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    code, out, err = launch("sys.stdout.buffer.write('loss \\u2192 0.5\\n'.encode())", "--workers", "1").end()
    assert (code, out, err) == (0, "[worker 0] loss \\u2192 0.5\n", "")


@pytest.mark.parametrize("errors_too", [False, True])
def test_a_job_whose_output_nobody_reads_is_ended(launch: Any, errors_too: bool) -> None:
    """``| head -1`` and ``2>&1 | head -1``."""
    started = launch("while True: print('ready', flush=True); time.sleep(0.01)", "--workers", "1")
    process = started.process
    started.wait_for(1)
    process.stdout.close()
    if errors_too:
        process.stderr.close()
    else:
        assert (
            process.stderr.read()
            == "[launch] nobody reads the output any more (it went into a pipe): stopping all tasks\n"
        )
    assert process.wait(30) == 128 + signal.SIGPIPE
    assert not started.left()


def test_tasks_keep_their_grace_where_nobody_reads(launch: Any, tmp_path: Path) -> None:
    """As with ``| tee log`` after Ctrl-C: what a task says while it saves is no second Ctrl-C."""
    saved = tmp_path / "saved"
    started = launch(
        f"""
def save(*_):
    for _ in range(10):
        print("saving", flush=True)
        time.sleep(0.1)
    open({str(saved)!r}, "w").close()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
""",
        "--workers",
        "1",
    )
    started.wait_for(1)
    started.process.stdout.close()
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(30) == 128 + signal.SIGTERM
    assert saved.exists()


def test_tasks_keep_their_grace_where_the_output_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    program, saved = tmp_path / "program.py", tmp_path / "saved"
    program.write_text(f"""
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path({str(saved)!r}).touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
time.sleep(600)
""")
    command = [sys.executable, "-m", "tfstyle_dist.launch", "--workers", "1", str(program)]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    said = "[launch] the output cannot be written ([Errno 28] No space left on device): stopping all tasks\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert saved.exists()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_nothing_is_lost_where_the_output_does_not_wait_for_a_slow_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unbuffered: str
) -> None:
    """As of a terminal or a pipe that a program in the same shell has set so."""
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    program = tmp_path / "program.py"
    program.write_text("for number in range(2000): print(number, 'x' * 150)\nprint('y' * 300_000)")
    out, into = os.pipe()
    os.set_blocking(into, False)
    command = [sys.executable, "-m", "tfstyle_dist.launch", "--workers", "1", str(program)]
    with subprocess.Popen(command, stdout=into, stderr=subprocess.PIPE, text=True) as process:
        os.close(into)
        with open(out, encoding="utf-8") as read:
            first = read.readline()
            time.sleep(1.0)  # the pipe is full
            lines = [first, *read]
        assert (process.wait(30), process.communicate()[1]) == (0, "")
    expected = [*(f"{number} {'x' * 150}" for number in range(2000)), "y" * 300_000]
    assert lines == [f"[worker 0] {line}\n" for line in expected]


def test_the_end_of_the_terminal_is_none_of_a_job_under_nohup(launch: Any) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        started = launch("print('ready', flush=True); time.sleep(1); print('done')", "--workers", "1")
    finally:
        signal.signal(signal.SIGHUP, before)
    started.wait_for(1)
    started.process.send_signal(signal.SIGHUP)
    code, out, err = started.end()
    assert (code, out, err) == (0, "[worker 0] done\n", "")
