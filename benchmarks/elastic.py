"""What faults cost an elastic job: time to the next commit after a kill, time to join again, goodput, fault-free cost.

    python benchmarks/elastic.py                  # short: 10 kills, 1 minute of chaos
    python benchmarks/elastic.py --long           # 50 kills, 10 minutes of chaos
    python benchmarks/elastic.py --only recovery  # or: restart, cost, alarms, chaos
    python benchmarks/elastic.py --torchft .venv-torchft/bin/python   # torchft 0.2 beside it, from its own environment

Every worker is a process of this machine. Steps are padded with a fixed sleep, because a dead process donates its core.
It is a part of the step, as in torchft's worker: a worker sleeps once in each attempt, however many replicas it holds.
Where this user may make a network namespace (root), chaos has partitions too: for 3 s nothing gets through to or from
the port of worker 0, to which all others connect. Workers that share memory would not notice that, so in chaos with
partitions each worker pretends to be on a host of its own (TFSTYLE_HOST), and all goes through sockets. Writes a table
to benchmarks/results/elastic.md unless --no-write.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from elastic_job import Job
from elastic_worker import SAVE_EVERY

RESULTS = Path(__file__).parent / "results" / "elastic.md"
OWN_NETWORK = "TFSTYLE_OWN_NETWORK"
"""Set where this program runs in a network namespace of its own."""


# ---- partitions ---------------------------------------------------------------------------------------------------


class Partitions:
    """Cuts ports of this machine off; possible in a network namespace of this program's own (``in_own_network``)."""

    def __init__(self) -> None:
        self.possible = OWN_NETWORK in os.environ
        if self.possible:
            self._ip("link set lo up")
            self._ip("rule add pref 100 lookup local")  # so that rules can come before it
            self._ip("rule del pref 0")

    def _ip(self, what: str) -> None:
        subprocess.run(["ip", *what.split()], check=True)

    def cut(self, port: int) -> None:
        """Nothing gets through to a port, or from it."""
        self._ip(f"rule add pref 1 ipproto tcp dport {port} blackhole")
        self._ip(f"rule add pref 2 ipproto tcp sport {port} blackhole")

    def heal(self) -> None:
        """All gets through again."""
        self._ip("rule del pref 1")
        self._ip("rule del pref 2")


def in_own_network() -> None:
    """Runs this program anew in a network namespace of its own, where that is possible."""
    if OWN_NETWORK not in os.environ and os.geteuid() == 0:
        with contextlib.suppress(OSError):
            if not subprocess.run(["unshare", "--net", "ip", "rule"], capture_output=True).returncode:
                os.execvpe("unshare", ["unshare", "--net", sys.executable, *sys.argv], {**os.environ, OWN_NETWORK: "1"})


# ---- measurements -------------------------------------------------------------------------------------------------


def measure_recovery(kills: int, torchft: str, say: Callable[[str], None]) -> list[str]:
    """Kills one of 4 and starts it again, many times."""
    lines = []
    for kind in ("elastic", *(("torchft",) if torchft else ())):
        job, chance = Job(4, 1e6, 0.02, kind, torchft=torchft), random.Random(1)
        recovered: list[float] = []
        started_up: list[float] = []
        joined: list[float] = []
        stalls: list[float] = []
        try:
            job.wait_for_commits([0, 1, 2, 3], 0)
            for kill in range(kills):
                victim = chance.randrange(4)
                others = [r for r in range(4) if r != victim]
                time.sleep(chance.uniform(0.2, 0.4))
                when = job.kill(victim)
                recovered.append(max(job.wait_for_commits(others, when)) - when)
                began = job.restart(victim)
                first = job.wait_for_commits([victim], began)[0]
                ready = next(t for what, t, _ in job.lines(victim) if what == "ready" and t > began)
                started_up.append(ready - began)
                joined.append(first - ready)
                times = [t for t, _ in job.commits(others[0]) if began < t <= first]
                stalls.append(max((b - a for a, b in pairwise(times)), default=0.0))
                say(f"{kind}, kill {kill + 1}: worker {victim}, {recovered[-1]:.3f} s; started after "
                    f"{started_up[-1]:.2f} s; then {joined[-1]:.3f} s to its first commit")  # fmt: skip
        except (RuntimeError, TimeoutError) as error:
            if kind == "elastic":
                raise
            lines.append(f"| {kind}, in kill {len(joined) + 1} | {error} |")  # what others do is no reason to stop
        finally:
            job.close()
        name = "" if kind == "elastic" else f"{kind}: "
        measured = {
            f"time from kill -9 of one of 4 to the next commit of all others, {len(recovered)} kills": recovered,
            "time that the new process needs for imports and the model": started_up,
            "time from there to its first commit": joined,
            "longest time between two commits of the others meanwhile (padded with 20 ms)": stalls,
        }
        lines += [f"| {name}{what} | {_spread(values)} |" for what, values in measured.items() if values]
    return lines


def measure_restart(kills: int, say: Callable[[str], None]) -> list[str]:
    """Kills one of 4 where nothing is elastic: all end, all are started again, and go on at the last checkpoint."""
    job, chance = Job(4, 1e6, 0.02, "restart"), random.Random(1)
    recovered: list[float] = []
    try:
        job.wait_for_commits([0, 1, 2, 3], 0, SAVE_EVERY)
        for kill in range(kills):
            time.sleep(chance.uniform(1, 3))
            when = job.kill(chance.randrange(4))
            done = max(number for _, number in job.commits(0) + job.commits(1))
            job.restart_all()
            recovered.append(max(job.wait_for_commits([0, 1, 2, 3], when, done)) - when)
            say(f"restart, kill {kill + 1}: {recovered[-1]:.3f} s")
    finally:
        job.close()
    return [
        f"| without elastic=, all start again from the last checkpoint (one each {SAVE_EVERY} steps): time to the next "
        f"step that is new, {kills} kills | {_spread(recovered)} |"
    ]


def measure_cost(torchft: str, say: Callable[[str], None]) -> list[str]:
    """Steps that only sleep and compute a little, with and without elastic=, in turns."""
    kinds = ["plain", "elastic", "elastic, check_every=100", *(["torchft"] if torchft else [])]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(3):
        for name, times in found.items():
            kind = name.partition(",")[0]
            job = Job(2, 12, 0.05, kind, check_every=100 if "check" in name else 0, torchft=torchft)
            try:
                job.wait_for_commits([0, 1], 0)
                for process in job.processes:
                    process.wait(120)
                commits = [t for t, _ in job.commits(0)][5:]
                times += [b - a for a, b in pairwise(commits)]
            finally:
                job.close()
            say(f"{name}: median {statistics.median(times) * 1e3:.2f} ms a step")
    base = statistics.median(found["plain"])
    return [
        f"| a step of 2 workers, padded with 50 ms, {name} | median {statistics.median(t) * 1e3:.2f} ms "
        f"({statistics.median(t) / base - 1:+.1%}) |"
        for name, t in found.items()
    ]


def measure_alarms(steps: int, say: Callable[[str], None]) -> list[str]:
    """Many steps that compare all copies each time; with two workers a difference ends both."""
    job = Job(2, 1e6, 0.0, replicas=4, check_every=1)
    try:
        while min(len(job.commits(rank)) for rank in (0, 1)) < steps:
            if any(process.poll() is not None for process in job.processes):
                raise RuntimeError(f"a worker ended after {len(job.commits(0))} steps: a false alarm; run with SHOW=1")
            time.sleep(1)
    finally:
        job.close()
    say(f"{steps} steps without an alarm")
    return [f"| false alarms in {steps:,} steps of 2 workers with 4 replicas, check_every=1 | 0 |"]


def measure_chaos(
    seconds: float, every: float, workers: int, partitions: Partitions, say: Callable[[str], None]
) -> list[str]:
    """A fault every so many seconds: a kill, a stop of 3 s, or a partition of 3 s."""
    counts: list[int] = []
    lost: dict[str, list[float]] = {}
    for chaotic in (False, True):
        job = Job(workers, seconds, 0.3, suspect_after=1.0, stopped_after=0.1, apart=partitions.possible)
        try:
            began = max(job.wait_for_commits(list(range(workers)), 0))
            faults = _chaos(job, began, seconds, every if chaotic else seconds, partitions, say)
            commits = [job.commits(rank) for rank in range(workers)]
            counts.append(max(n for of_one in commits for t, n in of_one if t <= began + seconds - 5))
            for what, when in faults:
                made = _steps_until(commits, when + every) - _steps_until(commits, when)
                lost.setdefault(what, []).append(every * counts[0] / (seconds - 5) - made)
        finally:
            job.close()
        say(f"{'with' if chaotic else 'without'} faults: {counts[-1]} steps")
    named = ", ".join(f"{len(each)} {what}" for what, each in sorted(lost.items()))
    where = "each on a pretended host of its own" if partitions.possible else "on one host"
    return [
        f"| committed steps with {sum(map(len, lost.values()))} faults ({named}) in {seconds:.0f} s, {workers} workers "
        f"({where}), over those without | {counts[1]} / {counts[0]} = {counts[1] / counts[0]:.1%} |",
        *(f"| steps that one of the {what} cost | mean {statistics.mean(each):.1f}, most {max(each):.1f} |"
          for what, each in sorted(lost.items())),
    ]  # fmt: skip


def _steps_until(commits: list[list[tuple[float, int]]], when: float) -> int:
    """The number of the last step that one of the workers had committed."""
    return max((n for of_one in commits for t, n in of_one if t <= when), default=0)


def _chaos(
    job: Job, began: float, seconds: float, every: float, partitions: Partitions, say: Callable[[str], None]
) -> list[tuple[str, float]]:
    """Until 5 s before the end; returns what was done, and when."""
    chance, next_fault, heals = random.Random(2), began + every, 0.0
    faults: list[tuple[str, float]] = []
    kinds = ["kills", "stops of 3 s", *(["partitions of 3 s"] if partitions.possible else [])]
    while time.time() < began + seconds - 5:
        time.sleep(0.1)
        job.restart_the_dead()
        if heals and time.time() > heals:
            partitions.heal()
            heals = 0.0
        if time.time() > next_fault and time.time() < began + seconds - every:
            what, victim, next_fault = chance.choice(kinds), chance.randrange(len(job.processes)), next_fault + every
            victim = 0 if what == "partitions of 3 s" else victim
            faults.append((what, time.time()))
            if what == "kills":
                job.kill(victim)
            elif what == "stops of 3 s":
                job.processes[victim].send_signal(signal.SIGSTOP)
                subprocess.Popen(["sh", "-c", f"sleep 3; kill -CONT {job.processes[victim].pid}"])
            else:
                heals = time.time() + 3
                partitions.cut(int(job.addresses[0].rpartition(":")[2]))
            say(f"{time.time() - began:.0f} s: {what}, worker {victim}")
    return faults


def _spread(values: list[float]) -> str:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"median {statistics.median(values):.3f} s, p95 {high:.3f} s, most {ordered[-1]:.3f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--long", action="store_true", help="50 kills, 10,000 steps, 10 minutes of chaos")
    parser.add_argument("--only", choices=["recovery", "restart", "cost", "alarms", "chaos"])
    parser.add_argument("--kills", type=int, default=0, help="another number of kills")
    parser.add_argument("--torchft", default="", metavar="PYTHON", help="of an environment with torchft 0.2")
    parser.add_argument("--no-write", action="store_true", help="print the table only")
    options = parser.parse_args()
    in_own_network()
    partitions = Partitions()
    kills, seconds, every, workers = (50, 600.0, 15.0, 8) if options.long else (10, 60.0, 10.0, 4)
    kills = options.kills or kills

    def say(text: str) -> None:
        print(text, flush=True)

    parts: dict[str, Callable[[], list[str]]] = {
        "recovery": lambda: measure_recovery(kills, options.torchft, say),
        "restart": lambda: measure_restart(max(kills // 5, 3), say),
        "cost": lambda: measure_cost(options.torchft, say),
        "alarms": lambda: measure_alarms(10_000 if options.long else 1_000, say),
        "chaos": lambda: measure_chaos(seconds, every, workers, partitions, say),
    }
    command = ["python benchmarks/elastic.py", *sys.argv[1:]]
    if options.torchft:
        command = ["PYTHON" if word == options.torchft else word for word in command]
    lines = [
        f"| load average before | {' '.join(f'{load:.1f}' for load in os.getloadavg())} on {os.cpu_count()} cores |"
    ]
    for name, measure in parts.items():
        if options.only in (None, name):
            lines += measure()
            table = "\n".join(["| | |", "|---|---|", *lines])
            # After each part, so that a later one that fails takes nothing along.
            if not options.no_write:
                RESULTS.write_text(f"# What faults cost an elastic job\n\n`{' '.join(command)}`\n\n{table}\n")
    print(table)


if __name__ == "__main__":
    main()
