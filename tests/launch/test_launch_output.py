"""What the launcher shows where its output takes no such letters, or where nobody reads it any more."""

from __future__ import annotations

import signal
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
