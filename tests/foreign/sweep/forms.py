"""The forms that a case runs in: each in processes of its own, with a limit; a hang is a result."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import servers
import torch
from programs import CASES, REPLICAS, Case, Each, Run, flat
from shared_gpu import on_a_host_of_its_own
from staying import Answer, Staying, said_of

import tfstyle_dist as tfd
from tfstyle_dist.core import network

DEVICE = os.environ.get("TFSTYLE_FOREIGN_DEVICE", "cpu")
TWO = ("cpu:0", "cpu:1") if DEVICE == "cpu" else (f"{DEVICE}:0#0", f"{DEVICE}:0#1")
APART = bool(os.environ.get("TFSTYLE_FOREIGN_NCCL"))
"""Whether two ranks sum with NCCL on one GPU."""
if DEVICE == "pretend":
    from pretend_accelerator import load

    load()
PROCESSES = {"one": 1, "replicas": 1, "central": 1, "shared": 2, "ranks": 2, "grouped": 2, "elastic": 2, "servers": 1}
GRACE = 10.0  # seconds that a process has to say itself where it hangs


def strategy_of(form: str) -> Any:
    """A new strategy of a form; in processes with torchrun's variables, or ``TF_CONFIG``, where it has several."""
    if form == "replicas":
        return tfd.MirroredStrategy(TWO)
    if form == "central":
        return tfd.experimental.CentralStorageStrategy(TWO)
    if form == "shared":
        return tfd.experimental.CentralStorageStrategy()
    if form == "grouped":
        return tfd.MultiWorkerMirroredStrategy(devices=TWO)
    if form == "elastic":
        return tfd.MultiWorkerMirroredStrategy(elastic=tfd.experimental.Elastic(replicas=REPLICAS[form]))
    if form == "servers":
        return servers.strategy()
    if DEVICE != "cpu":  # the library between devices needs one for each rank
        options = tfd.experimental.CommunicationOptions(implementation="AUTO" if APART else "RING")
        return tfd.MirroredStrategy([f"{DEVICE}:0"], communication_options=options)
    return tfd.MirroredStrategy()


def execute(case: Case, form: str, dtype: str, shares: int = 1) -> dict[str, Any]:
    """Runs a case in this process.

    Raises:
        Exception: what the case raises.
    """
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if dtype == "fp64" else torch.float32)
    if DEVICE != "cpu":
        torch.set_default_device(f"{DEVICE}:0")
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        strategy = None if form == "one" else stack.enter_context(strategy_of(form))
        if strategy is not None and strategy.num_replicas_in_sync != REPLICAS[form]:
            raise AssertionError(f"{strategy} has not {REPLICAS[form]} replicas")
        torch.manual_seed(0)
        run = servers.ServersRun(strategy) if form == "servers" else Run(form, strategy, shares)
        return values_of(case.program(run))


def values_of(result: Any) -> dict[str, Any]:
    """What a program returned, as tensors and strings."""
    if not isinstance(result, dict):
        result = {"result": result}
    kept: dict[str, Any] = {}
    for key, value in result.items():
        if isinstance(value, Each):
            kept[key] = Each(v.clone().cpu() for v in value)
        else:
            kept[key] = value if isinstance(value, str) else flat(value).cpu()
    return kept


def _in_child(work: Callable[[], Any], place: Path, limit: float, environment: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(environment)
        log = place.with_suffix(".log").open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        warnings.simplefilter("ignore")
        faulthandler.dump_traceback_later(limit, exit=True, file=log)
        try:
            answer: Answer = ("values", work())
        except BaseException as error:
            traceback.print_exc()
            answer = ("raised", said_of(error))
        torch.save(answer, place.with_suffix(".new"))
        place.with_suffix(".new").rename(place)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)


def _await(pids: Sequence[int], limit: float) -> None:
    deadline = time.monotonic() + limit
    left = list(pids)
    while left:
        left = [pid for pid in left if os.waitpid(pid, os.WNOHANG)[0] == 0]
        if left and time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return
        if left:
            time.sleep(0.005)


def _answer(place: Path) -> Answer:
    if place.exists():
        answer: Answer = torch.load(place, weights_only=False)
        return answer
    log = place.with_suffix(".log")
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    own = [line for line in said if "File" in line and "/lib/python" not in line]  # the innermost call comes first
    return "hang", " ".join(" ".join(own or said).split())[:600] or "the process ended and said nothing"


def rank_environments(count: int) -> Iterator[dict[str, str]]:
    """What torchrun gives to each process of a host."""
    port = str(network.free_ports(1)[0])
    for rank in range(count):
        yield {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "TORCHELASTIC_RUN_ID": f"foreign-{port}",
            **(on_a_host_of_its_own(rank) if APART else {}),
        }


def worker_environments(count: int) -> Iterator[dict[str, str]]:
    """What tells each worker of a host who the others are."""
    workers = [f"127.0.0.1:{port}" for port in network.free_ports(count)]
    for index in range(count):
        told = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        yield {"TF_CONFIG": json.dumps(told)}


def _execute_titled(title: str, form: str, dtype: str, shares: int) -> dict[str, Any]:
    return execute(CASES[title], form, dtype, shares)


STAYING = Staying(_execute_titled, GRACE)


def answers_of(
    case: Case, form: str, dtype: str, folder: Path, shares: int = 1, together: bool = False
) -> list[Answer]:
    """Runs a case in one form, and returns the answer of each of its processes; ``together``: see ``measure.py``."""
    count = PROCESSES[form]
    environments = list((worker_environments if form == "elastic" else rank_environments)(count)) if count > 1 else [{}]
    if together:
        return STAYING.answers((case.title, form, dtype, shares), environments, case.limit)
    places = [folder / f"{form}-{dtype}-{shares}-{rank}" for rank in range(count)]
    for place in places:
        place.unlink(missing_ok=True)

    def work() -> dict[str, Any]:
        return execute(case, form, dtype, shares)

    pairs = zip(places, environments, strict=True)
    pids = [_in_child(work, place, case.limit, environment) for place, environment in pairs]
    _await(pids, case.limit + GRACE)
    return [_answer(place) for place in places]
