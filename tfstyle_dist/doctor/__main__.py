"""Checks this machine and the cluster it is told of; the exit code is 1 when something would not work.

python -m tfstyle_dist.doctor            # in the environment in which the job is to start
python -m tfstyle_dist.doctor --meet     # on all hosts at the same time: do the tasks find each other?
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence

from tfstyle_dist.doctor import cluster, machine
from tfstyle_dist.doctor.finding import Finding, Level, problem

_MACHINE = (machine.versions, machine.devices, machine.backends, machine.shared_memory, machine.limits)


def examine(meet_seconds: float | None = None) -> list[Finding]:
    """All findings.

    Args:
        meet_seconds: how long to wait for the other tasks; ``None`` does not try to meet them.
    """
    findings = []
    for check in (*_MACHINE, machine.host_name, cluster.settings):
        findings += _guarded(check)
    resolver, found = cluster.find_cluster()
    findings += found
    if resolver is not None:
        findings += _guarded(lambda: cluster.reachability(resolver))
        if meet_seconds is not None:
            findings += _guarded(lambda: cluster.find_tasks(resolver, meet_seconds))
    return findings


def _guarded(check: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """One check that breaks must not hide the others."""
    try:
        return list(check())
    except Exception as error:
        return [problem("doctor", f"a check failed: {type(error).__name__}: {error}", "please report this")]


@contextlib.contextmanager
def _messages_to_stderr() -> Iterator[None]:
    """What libraries print meanwhile, also from C++ as Gloo does, must not get between the findings."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the findings; returns 1 if there is a problem."""
    parser = argparse.ArgumentParser("python -m tfstyle_dist.doctor", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument(
        "--meet",
        type=float,
        nargs="?",
        const=60.0,
        metavar="SECONDS",
        help="meet the other tasks, which must do so at the same time; wait so long (60)",
    )
    options = parser.parse_args(arguments)
    with _messages_to_stderr() if options.json else contextlib.nullcontext():
        findings = examine(options.meet)
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    if options.json:
        print(json.dumps({"problems": problems, "findings": [finding.as_json() for finding in findings]}, indent=2))
    else:
        print("\n".join(str(finding) for finding in findings))
        print(f"{problems} problem(s)" if problems else "no problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
