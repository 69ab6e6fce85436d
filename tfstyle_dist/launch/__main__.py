"""Starts a cluster on one machine: every task is a process with its own ``TF_CONFIG``.

    python -m tfstyle_dist.launch --workers 2 train.py --epochs 3
    python -m tfstyle_dist.launch --workers 2 --ps 1 train.py          # parameter servers: a chief is started too
    python -m tfstyle_dist.launch --workers 2 -m package.module
    python -m tfstyle_dist.launch --workers 4 --elastic train.py       # goes on when workers die (docs/elastic.md)

Each task's output is shown line by line with its name in front. When a task fails, all are stopped, its traceback is
shown once more, and the exit code is that task's. With --elastic the others go on, the lost one is started again up to
--max-restarts times, and the exit code is 0 if one of them comes to the end. The tasks meet at free ports of 127.0.0.1.
With parameter servers they get a key that is made for the job (TFSTYLE_PS_KEYS) unless you gave one: other users of the
machine are refused.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from tfstyle_dist.launch.cluster import ended_file_of_job, key_of_job, make_tasks
from tfstyle_dist.launch.restarts import Restarts
from tfstyle_dist.launch.supervisor import Supervisor

_RESTARTS = 3


def _count(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (number := int(text)) >= 0:
            return number
    raise argparse.ArgumentTypeError(f"must be a whole number that is not negative, got {text!r}; write e.g. 2")


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if (seconds := float(text)) >= 0:  # not of nan
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number of seconds that is not negative, got {text!r}; write e.g. 10")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "python -m tfstyle_dist.launch",
        description=summary,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=_count, default=2, metavar="N", help="tasks 'worker' (default 2)")
    parser.add_argument(
        "--ps", type=_count, default=0, metavar="N", help="tasks 'ps', parameter servers (default 0); brings a chief"
    )
    parser.add_argument("--chief", action="store_true", help="a task 'chief' besides the workers")
    parser.add_argument("--evaluator", action="store_true", help="a task 'evaluator'")
    parser.add_argument(
        "--grace", type=_seconds, default=10.0, metavar="SECONDS", help="from SIGTERM to SIGKILL when stopping (10)"
    )
    parser.add_argument(
        "--evaluator-grace",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long the evaluator may go on after the training has ended (60)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="a worker that fails does not stop the others and is started again: for "
        "MultiWorkerMirroredStrategy(elastic=...)",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        default=None,
        metavar="N",
        help="with --elastic: how often each worker is started again (3), after 0.2 s, 0.4 s, ... up to 30 s",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as for python -m")
    parser.add_argument("script", help="the Python program that every task runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.workers == 0 and not options.chief:
        parser.error("there is nobody to train: give --workers N or --chief")
    if options.max_restarts is not None and not options.elastic:
        parser.error("--max-restarts is for elastic jobs: give --elastic too")
    # Workers of parameter servers run what a chief schedules.
    options.chief = options.chief or options.ps > 0
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cluster to its end.

    Args:
        arguments: the command line; default: that of the process.

    Returns:
        0, or the exit code of the first task that failed; 128 plus the number of a signal, SIGPIPE where nobody reads
        the output any more; 1 where it cannot be written.
    """
    options = parse(arguments)
    command = [sys.executable, *(["-m"] if options.module else []), options.script, *options.arguments]
    with key_of_job(options.ps) as key, ended_file_of_job(options.elastic) as ended_file:
        most = _RESTARTS if options.max_restarts is None else options.max_restarts
        restarts = None if ended_file is None else Restarts(most, ended_file)
        tasks = make_tasks(command, options.workers, options.ps, options.chief, options.evaluator, key, ended_file)
        return Supervisor(tasks, options.grace, options.evaluator_grace, restarts).run()


if __name__ == "__main__":
    sys.exit(main())
