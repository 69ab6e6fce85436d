"""The rank processes of one pytest session, which live from test to test."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from tfstyle_dist.testing import messages, processes
from tfstyle_dist.testing.gather import Gathered, gather, problems
from tfstyle_dist.testing.options import DistributedOptions
from tfstyle_dist.testing.rank_process import POOL_VARIABLE, RankProcess
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


@dataclass
class _Generation:
    """The processes between two rebuilds; the token is in their environment and in their children's."""

    directory: Path
    token: str = field(default_factory=lambda: uuid.uuid4().hex)
    ranks: list[RankProcess] = field(default_factory=list)
    num_started: int = 0


class RankPool:
    """Rank processes that are started when a test first needs them and reused until one of them is lost.

    Args:
        config: The configuration of the pytest session that the pool belongs to.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._base = _base_directory(config)
        self._generation: _Generation | None = None
        self._num_generations = 0
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
        ranks, started = self._ranks(options.workers)
        for process in ranks:
            process.mark_output()
        if started.all_answered:
            question = messages.Collect(str(item.path), item.nodeid)
            started = _ask(ranks, question, _STARTUP_TIMEOUT)
        if not started.all_answered or problems(started.answers):
            results = _results(ranks, started)
            self.kill()
            return results
        gathered = self._run_collected(ranks, item, options)
        results = _results(ranks, gathered)
        crashed = any(result.finished is not None and result.finished.crash for result in results)
        if not gathered.all_answered or crashed or not self._reset(ranks):
            self.kill()
        return results

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
                "RANK": str(process.rank),
                "WORLD_SIZE": str(len(ranks)),
                "LOCAL_RANK": str(process.rank),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
                "TFSTYLE_RENDEZVOUS_FILE": str(directory / "rendezvous"),
                "TFSTYLE_TIMEOUT_SECONDS": f"{options.deadline:g}",
                **options.env,
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
            process.send(messages.Collect(str(item.path), item.nodeid))
            process.send(runs[rank])
            return process

        return gather(ranks, options.timeout, options.may_die, restart)

    def _ranks(self, workers: int) -> tuple[list[RankProcess], Gathered]:
        if self._generation is not None and any(process.exited() for process in self._generation.ranks):
            # Something outside of any test ended an idle rank.
            self.kill()
        if self._generation is None:
            self._num_generations += 1
            self._generation = _Generation(self._base / f"ranks-{self._num_generations}")
        generation = self._generation
        new = []
        for rank in range(len(generation.ranks), workers):
            process = self._started(generation, rank)
            generation.ranks.append(process)
            new.append(process)
        return generation.ranks[:workers], gather(new, _STARTUP_TIMEOUT)

    def _started(self, generation: _Generation, rank: int) -> RankProcess:
        generation.num_started += 1
        directory = generation.directory / f"process-{generation.num_started}"
        directory.mkdir(parents=True)
        process = RankProcess(rank, directory, generation.token, self._config.invocation_params.dir)
        process.send(start_message(self._config, directory / "tmp"))
        return process

    def _successor(self, process: RankProcess) -> RankProcess:
        """Kills the process of a rank and starts another one."""
        assert self._generation is not None, "a test is running"
        process.kill()
        successor = self._started(self._generation, process.rank)
        successor.earlier_output = {name: process.new_output(name) for name in ("stdout", "stderr")}
        self._generation.ranks[process.rank] = successor
        return successor

    def _reset(self, ranks: list[RankProcess]) -> bool:
        answered = _ask(ranks, messages.Reset(), _RESET_TIMEOUT)
        return answered.all_answered and not problems(answered.answers)

    def kill(self) -> None:
        """Kills all rank processes and their descendants; the next test starts new ones."""
        if self._generation is None:
            return
        generation, self._generation = self._generation, None
        for process in generation.ranks:
            process.kill()
        processes.kill_with_environment(POOL_VARIABLE, generation.token)

    def close(self) -> None:
        """Lets the rank processes end their sessions, and kills what is left of them."""
        if self._generation is not None:
            for process in self._generation.ranks:
                process.send(messages.Exit())
            for process in self._generation.ranks:
                process.wait(_EXIT_PATIENCE)
        self.kill()


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
        return Path(tempfile.mkdtemp(prefix="tfstyle_dist-"))
    return factory.mktemp("distributed")
