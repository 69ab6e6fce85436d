"""The rank processes of one pytest session, which live from test to test."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from tfstyle_dist.testing import messages
from tfstyle_dist.testing.gather import Gathered, gather, problems
from tfstyle_dist.testing.options import DistributedOptions
from tfstyle_dist.testing.rank_process import RankProcess
from tfstyle_dist.testing.session_options import start_message

# Starting an interpreter and importing torch may take long on a busy machine, and no test is to blame for it.
_STARTUP_TIMEOUT = 120.0
_RESET_TIMEOUT = 10.0
_EXIT_PATIENCE = 3.0


@dataclass(frozen=True)
class RankResult:
    """What became of one rank in one test.

    Attributes:
        rank: The rank.
        finished: Its reports, or None if it gave none.
        problem: Why it could not even begin, or None.
        death: What ended it, or None.
        death_expected: Whether its silence belongs to the test.
        stacks: The stacks of its threads if it was silent to the end, or None.
        stdout: What it printed during the test.
        stderr: What it printed to standard error during the test.
    """

    rank: int
    finished: messages.Finished | None = None
    problem: str | None = None
    death: str | None = None
    death_expected: bool = False
    stacks: str | None = None
    stdout: str = ""
    stderr: str = ""


class RankPool:
    """Rank processes that are started when a test first needs them and reused until they are lost.

    A process that died, or that a test leaves unfit for another one, is replaced; after a hang all of them are.

    Args:
        config: The configuration of the pytest session that the pool belongs to.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._base = _base_directory(config)
        self._seed = secrets.randbits(32)
        self._processes: dict[int, RankProcess] = {}
        self._num_started = 0
        self._num_tests = 0

    def run(self, item: pytest.Item, options: DistributedOptions) -> list[RankResult]:
        """Runs one test on its ranks.

        Args:
            item: The test.
            options: Its marker.

        Returns:
            One result per rank, in the order of the ranks.
        """
        try:
            results = self._run(item, options)
        except BaseException:
            # Ctrl-C or another plugin's time limit: the ranks are in the middle of something.
            self.kill()
            raise
        return results

    def _run(self, item: pytest.Item, options: DistributedOptions) -> list[RankResult]:
        ranks, started = self._collected(item, options)
        if problems(started.answers) and any(process.files != {str(item.path)} for process in ranks):
            # A conftest may do once in a process what cannot be done again for another file.
            self.kill()
            ranks, started = self._collected(item, options)
        if not started.all_answered or problems(started.answers):
            results = _results(ranks, started)
            self.kill()
            return results
        gathered = self._run_collected(ranks, item, options)
        results = _results(ranks, gathered)
        if gathered.stacks:
            self.kill()
            return results
        answered = {result.rank for result in results if result.finished is not None and not result.finished.crash}
        fit = self._reset([process for process in ranks if process.rank in answered])
        self._kill([process for process in ranks if process.rank not in fit])
        return results

    def _collected(self, item: pytest.Item, options: DistributedOptions) -> tuple[list[RankProcess], Gathered]:
        """The ranks of a test, and what they said when they were asked to collect it."""
        ranks, started = self._ranks(options.workers)
        for process in ranks:
            process.mark_output()
        if not started.all_answered:
            return ranks, started
        for process in ranks:
            process.send(_collect_message(process, item, options))
        return ranks, gather(ranks, _STARTUP_TIMEOUT)

    def _run_collected(self, ranks: list[RankProcess], item: pytest.Item, options: DistributedOptions) -> Gathered:
        self._num_tests += 1
        directory = self._base / f"test-{self._num_tests}"
        shared = directory / "shared"
        shared.mkdir(parents=True)
        pids_path = directory / "pids"
        _write_pids(pids_path, ranks)
        runs = []
        for process in ranks:
            environment = {
                "TFSTYLE_RENDEZVOUS_FILE": str(directory / "rendezvous"),
                "TFSTYLE_TIMEOUT_SECONDS": f"{options.deadline:g}",
                **_environment(process.rank, options),
            }
            runs.append(
                messages.Run(
                    nodeid=item.nodeid,
                    rank=process.rank,
                    env=environment,
                    world_size=len(ranks),
                    pids_path=str(pids_path),
                    shared_dir=str(shared),
                    devices=options.devices,
                    replicas=options.replicas,
                    backend=options.backend,
                )
            )
            process.send(runs[-1])

        def restart(rank: int) -> RankProcess:
            process = ranks[rank] = self._successor(ranks[rank])
            _write_pids(pids_path, ranks)
            runs[rank] = replace(runs[rank], attempt=runs[rank].attempt + 1)
            process.send(_collect_message(process, item, options))
            process.send(runs[rank])
            return process

        return gather(ranks, options.timeout, options.may_die, restart)

    def _ranks(self, workers: int) -> tuple[list[RankProcess], Gathered]:
        # Something outside of any test may have ended an idle rank.
        self._kill([process for process in self._processes.values() if process.exited()])
        new = [self._started(rank) for rank in range(workers) if rank not in self._processes]
        return [self._processes[rank] for rank in range(workers)], gather(new, _STARTUP_TIMEOUT)

    def _started(self, rank: int) -> RankProcess:
        self._num_started += 1
        directory = self._base / f"process-{self._num_started}"
        directory.mkdir(parents=True)
        process = RankProcess(rank, directory, self._config.invocation_params.dir)
        process.send(start_message(self._config, directory / "tmp", self._seed))
        self._processes[rank] = process
        return process

    def _successor(self, process: RankProcess) -> RankProcess:
        """Kills the process of a rank and starts another one."""
        process.kill()
        successor = self._started(process.rank)
        successor.earlier_output = {name: process.new_output(name) for name in ("stdout", "stderr")}
        return successor

    def _reset(self, ranks: list[RankProcess]) -> set[int]:
        """Makes ranks ready for the next test; returns those that are."""
        answered = _ask(ranks, messages.Reset(), _RESET_TIMEOUT)
        return answered.answers.keys() - problems(answered.answers).keys()

    def _kill(self, ranks: Iterable[RankProcess]) -> None:
        for process in ranks:
            process.kill()
            del self._processes[process.rank]

    def kill(self) -> None:
        """Kills all rank processes and their descendants; the next test starts new ones."""
        self._kill(list(self._processes.values()))

    def close(self) -> None:
        """Lets the rank processes end their sessions, and kills what is left of them."""
        for process in self._processes.values():
            process.send(messages.Exit())
        for process in self._processes.values():
            process.wait(_EXIT_PATIENCE)
        self.kill()


def _environment(rank: int, options: DistributedOptions) -> dict[str, str | None]:
    """What a rank finds in its environment, from the import of the test file on."""
    number, size = str(rank), str(options.workers)
    return {"RANK": number, "WORLD_SIZE": size, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": size, **options.env}


def _collect_message(process: RankProcess, item: pytest.Item, options: DistributedOptions) -> messages.Collect:
    process.files.add(str(item.path))
    return messages.Collect(str(item.path), item.nodeid, _environment(process.rank, options))


def _write_pids(path: Path, ranks: list[RankProcess]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps([process.pid for process in ranks]))
    os.replace(new, path)


def _ask(ranks: list[RankProcess], question: object, timeout: float) -> Gathered:
    for process in ranks:
        process.send(question)
    return gather(ranks, timeout)


def _results(ranks: list[RankProcess], gathered: Gathered) -> list[RankResult]:
    complaints = problems(gathered.answers)
    results = []
    for process in ranks:
        answer = gathered.answers.get(process.rank)
        results.append(
            RankResult(
                rank=process.rank,
                finished=answer if isinstance(answer, messages.Finished) else None,
                problem=complaints.get(process.rank),
                death=gathered.deaths.get(process.rank),
                death_expected=process.rank in gathered.expected,
                stacks=gathered.stacks.get(process.rank),
                stdout=process.new_output("stdout"),
                stderr=process.new_output("stderr"),
            )
        )
    return results


def _base_directory(config: pytest.Config) -> Path:
    # Beside the session's own temporary directories, so that pytest removes it by the same rules; pytest has
    # no public name for it outside of fixtures.
    factory: pytest.TempPathFactory | None = getattr(config, "_tmp_path_factory", None)
    if factory is None:
        directory = Path(tempfile.mkdtemp(prefix="tfstyle_dist-"))
        config.add_cleanup(partial(shutil.rmtree, directory, ignore_errors=True))
        return directory
    return factory.mktemp("distributed")
