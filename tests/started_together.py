"""Commands that tests start together, such as the ranks of a group, with a time limit that leaves nothing behind."""

from __future__ import annotations

import os
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence

from tfstyle_dist.core.launch_env import LAUNCHER_VARIABLES
from tfstyle_dist.testing import processes

_VARIABLE = "TFSTYLE_TESTING_STARTED"


def clean_environment(**others: object) -> dict[str, str]:
    """This environment as that of a shell in which nothing is launched, without GPUs, and with some variables more."""
    kept = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, "TF_CONFIG")}
    told = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **others}
    return {**kept, **{name: str(value) for name, value in told.items()}}


def outputs(
    commands: Sequence[tuple[Sequence[object], Mapping[str, str]]], seconds: float, codes: Sequence[int] | None = None
) -> list[str]:
    """What each of the commands prints that are started together.

    Args:
        commands: each with its environment.
        seconds: limit for all of them; then they are killed with all that they started.
        codes: the exit codes that they must end with; ``None``: each with 0.
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
    assert [process.returncode for process in started] == list(codes or [0] * len(started)), "\n".join(texts)
    return texts
