"""The life of the rank processes: reuse, hangs, deaths, fault injection, the end of the session."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest
from inner_pytest import InnerPytest

from tfstyle_dist.testing import processes

_NOTE_PIDS = """
    import os
    import signal
    import subprocess
    import sys
    import threading
    import time
    from pathlib import Path

    import pytest

    def note(rank):
        with open(Path(__file__).parent / f"pids-{rank}", "a") as stream:
            stream.write(f"{os.getpid()}\\n")
"""


def _alive(pid: str) -> bool:
    return processes.state(int(pid)) not in ("", "Z")


def _wait_until_gone(pids: list[str]) -> list[str]:
    end = time.monotonic() + 10
    while (alive := [pid for pid in pids if _alive(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return alive


def test_processes_are_reused_and_gone_at_the_end(inner: InnerPytest) -> None:
    result = inner.run(
        source=_NOTE_PIDS
        + """
    @pytest.mark.distributed
    def test_first(rank):
        note(rank)
        assert False, "an ordinary failure costs no process"

    @pytest.mark.distributed(workers=3)
    def test_more(rank):
        note(rank)

    @pytest.mark.distributed
    def test_fewer(rank):
        note(rank)
        if rank == 0:
            # Survives a process group and a parent.
            child = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open(Path(__file__).parent / "pids-child", "w") as stream:
                stream.write(f"{child.pid}\\n")
    """,
    )
    result.assert_outcomes(failed=1, passed=2)
    pids = [inner.lines(f"pids-{rank}") for rank in range(3)]
    assert [len(each) for each in pids] == [3, 3, 1]
    assert len({pid for each in pids for pid in each}) == 3
    assert _wait_until_gone([each[0] for each in pids] + inner.lines("pids-child")) == []


def test_fresh_ranks(inner: InnerPytest) -> None:
    result = inner.run(
        "--fresh-ranks",
        source=_NOTE_PIDS
        + """
    @pytest.mark.distributed(workers=1)
    @pytest.mark.parametrize("turn", [1, 2])
    def test_it(rank, turn):
        note(rank)
    """,
    )
    result.assert_outcomes(passed=2)
    assert len(set(inner.lines("pids-0"))) == 2


def test_hang_shows_stacks_and_spares_the_session(inner: InnerPytest) -> None:
    result = inner.run(
        source=_NOTE_PIDS
        + """
    def sleep_for_ever(rank):
        time.sleep(3600)

    @pytest.mark.distributed(workers=3, timeout=8)
    def test_hangs(rank, ranks):
        note(rank)
        print(f"{rank} was here")
        if rank == 1:
            threading.Thread(target=sleep_for_ever, args=(1,), name="helper", daemon=True).start()
            sleep_for_ever(rank)
        if rank == 2:
            ranks.stop(2)

    @pytest.mark.distributed(workers=3)
    def test_next(rank):
        note(rank)
    """,
    )
    result.assert_outcomes(failed=1, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*rank 1 of 3 did not report in time (timeout=8 s)*",
            "Thread 0x*",
            '  File "*", line * in sleep_for_ever',
            "Current thread 0x*",
            '  File "*", line * in sleep_for_ever',
            '  File "*", line * in test_hangs',
            "*rank 2 of 3 did not report in time*",
            '  File "*", line * in stop',
            "rank 0: passed",
            "1 was here",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_runtestloop*")
    for rank in range(3):
        before, after = inner.lines(f"pids-{rank}")
        assert before != after
        assert not _alive(before)


def test_unexpected_deaths_are_named(inner: InnerPytest) -> None:
    result = inner.run(
        source=_NOTE_PIDS
        + """
    @pytest.mark.distributed
    def test_killed(rank):
        print(f"last words of {rank}")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ConnectionError("the peer is gone")

    @pytest.mark.distributed
    def test_exits(rank):
        if rank == 0:
            os._exit(3)

    @pytest.mark.distributed(timeout=600)
    def test_peer_waits_in_vain(rank):
        if rank == 0:
            time.sleep(3600)
        os._exit(4)

    @pytest.mark.distributed
    def test_ends_session():
        pytest.exit("enough")

    @pytest.mark.distributed
    def test_next():
        pass
    """,
    )
    result.assert_outcomes(failed=4, passed=1)
    result.stdout.fnmatch_lines(
        [
            "*rank 1 of 2 died with signal SIGKILL before it reported*",
            "*rank 0 of 2 failed*",
            "E*ConnectionError: the peer is gone",
            "last words of 1",
            "*rank 0 of 2 died with exit code 3 before it reported*",
            "*rank 1 of 2 died with exit code 4 before it reported*",
            "*rank 0 of 2 did not report in time*",
            "*in test_peer_waits_in_vain",
            "*rank 0 of 2: the test ended the rank's pytest session*",
        ]
    )


def test_injected_faults_are_no_failures(inner: InnerPytest) -> None:
    # Without the special treatment each of these would end at the timeout, as a failure.
    result = inner.run(
        source=_NOTE_PIDS
        + """
    pytestmark = pytest.mark.distributed(workers=2, timeout=600)

    @pytest.mark.distributed(workers=2, timeout=600, may_die=(1,))
    @pytest.mark.parametrize("fault", ["kill", "stop"])
    def test_may_die(rank, ranks, fault):
        if rank == 1:
            getattr(ranks, fault)(1)

    @pytest.mark.distributed(workers=2, timeout=600, may_die=(1,))
    def test_silent_survivor(rank):
        if rank == 1:
            time.sleep(3600)

    def test_expect_death(rank, ranks, shared_tmp_path):
        if rank == 1:
            time.sleep(3600)
        ranks.expect_death(1)
        ranks.kill(1)

    def test_stop_and_resume(rank, ranks, shared_tmp_path):
        note(rank)
        if rank == 1:
            (shared_tmp_path / "stopping").touch()
            ranks.stop(1)
            (shared_tmp_path / "resumed").touch()
        else:
            while not (shared_tmp_path / "stopping").exists():
                time.sleep(0.01)
            while Path(f"/proc/{ranks.pids[1]}/stat").read_text().split()[2] != "T":
                time.sleep(0.01)
            assert not (shared_tmp_path / "resumed").exists()
            ranks.resume(1)
            with pytest.raises(ValueError, match="rank 2 does not exist"):
                ranks.kill(2)

    @pytest.fixture
    def failed(rank, shared_tmp_path):
        yield shared_tmp_path / "failed"
        if rank == 1:
            (shared_tmp_path / "failed").touch()

    @pytest.mark.distributed(workers=2, timeout=600, may_die=(1,))
    def test_survivor_that_fails(rank, failed):
        while rank == 0 and not failed.exists():
            time.sleep(0.01)
        assert rank == 0, "may die, but not fail"

    @pytest.mark.distributed(workers=2, timeout=600, may_die=(0, 1))
    def test_nobody_left(rank, ranks):
        ranks.kill(rank)
    """,
    )
    result.assert_outcomes(passed=5, failed=2)
    result.stdout.fnmatch_lines(["E*may die, but not fail*", "*no rank reported: rank 0 silent as expected*"])


def test_ranks_die_with_a_killed_session(inner: InnerPytest) -> None:
    inner.pytester.makepyfile(
        _NOTE_PIDS
        + """
    @pytest.mark.distributed
    def test_long(rank):
        note(rank)
        time.sleep(3600)
    """
    )
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "tfstyle_dist.testing.plugin"],
        cwd=inner.path,
        stdout=subprocess.DEVNULL,
    )
    try:
        files = [inner.path / f"pids-{rank}" for rank in range(2)]
        end = time.monotonic() + 60
        while not all(file.exists() and file.read_text().endswith("\n") for file in files):
            assert session.poll() is None, "the session ended before its ranks began"
            assert time.monotonic() < end, "the ranks did not begin"
            time.sleep(0.05)
    finally:
        session.send_signal(signal.SIGKILL)
        session.wait()
    assert _wait_until_gone([file.read_text().strip() for file in files]) == []


def test_process_with_leftovers_is_replaced(inner: InnerPytest) -> None:
    result = inner.run(
        source=_NOTE_PIDS
        + """
    @pytest.mark.distributed(workers=1)
    def test_leaves_a_thread(rank):
        note(rank)
        threading.Thread(target=time.sleep, args=(3600,)).start()

    @pytest.mark.distributed(workers=1)
    def test_next(rank):
        note(rank)
        assert threading.active_count() == 1
    """,
    )
    result.assert_outcomes(passed=2)
    assert len(set(inner.lines("pids-0"))) == 2


def test_time_limit_of_the_session_ends_the_ranks(inner: InnerPytest) -> None:
    pytest.importorskip("pytest_timeout")
    result = inner.run(
        "-p",
        "pytest_timeout",
        "-o",
        "timeout_method=signal",
        source=_NOTE_PIDS
        + """
    @pytest.mark.distributed(workers=1)
    def test_warm_up():
        pass

    @pytest.mark.timeout(600)
    @pytest.mark.distributed(workers=1)
    def test_long(rank):
        note(rank)
        os.kill(os.getppid(), signal.SIGALRM)  # as if the time were up
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        time.sleep(3600)

    @pytest.mark.distributed(workers=1)
    def test_next(rank):
        note(rank)
    """,
    )
    result.assert_outcomes(failed=1, passed=2)
    before, after = inner.lines("pids-0")
    assert before != after
    assert not _alive(before)
