"""Commands that tests start together, such as the ranks of a group, with a time limit that leaves nothing behind."""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence

from tfstyle_dist.testing import processes

_VARIABLE = "TFSTYLE_TESTING_STARTED"


def outputs(commands: Sequence[tuple[Sequence[object], Mapping[str, str]]], seconds: float) -> str:
    """What commands print that are started together; each must end with 0.

    Args:
        commands: each with its environment.
        seconds: limit for all of them; then they are killed with all that they started.
    """
    token = uuid.uuid4().hex
    end = time.monotonic() + seconds
    started = []
    try:
        for command, env in commands:
            started.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    env={**env, _VARIABLE: token},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    start_new_session=True,
                )
            )
        texts = [process.communicate(timeout=max(end - time.monotonic(), 0.1))[0] for process in started]
    finally:
        for process in started:
            if process.returncode is None:
                processes.kill_group(process.pid)
        processes.kill_with_environment(_VARIABLE, token)  # torchrun starts its workers in sessions of their own
        for process in started:
            process.communicate()
    assert all(process.returncode == 0 for process in started), "\n".join(texts)
    return "".join(texts)
