"""Forks the tasks of clusters on command: a task starts in milliseconds instead of the seconds that imports take.

Commands are JSON lines on standard input; each is answered by one line.
"""

from __future__ import annotations

import json
import os
import resource
import sys

import torch

import tfstyle_dist as td


def die_with_parent() -> None:
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def task(message: dict) -> None:
    os.environ.update(message["env"])
    if message.get("memory"):
        resource.setrlimit(resource.RLIMIT_DATA, (message["memory"], message["memory"]))
    td.Server(message["spec"], job_name=message["job"], task_index=message["index"]).join()


def main() -> None:
    torch.set_num_threads(1)
    td.Server  # noqa: B018  # loads the package
    import cloudpickle  # noqa: F401

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1).step()  # the first one in a process loads much
    import zmq  # noqa: F401

    for line in sys.stdin:
        message = json.loads(line)
        if message["op"] == "start":
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    die_with_parent()
                    os.close(0)
                    os.dup2(os.open(message["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
                    os.dup2(2, 1)
                    task(message)
                    code = 0
                except BaseException as error:
                    print(f"{message['job']} {message['index']}: {type(error).__name__}: {error}", file=sys.stderr)
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            print(pid, flush=True)
        else:  # wait, perhaps not for ever
            pid, status = os.waitpid(message["pid"], os.WNOHANG)
            print("null" if pid == 0 else os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
