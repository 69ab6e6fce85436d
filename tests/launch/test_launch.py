"""The launcher: roles, prefixed logs, first failure, signals; nothing is left behind."""

from __future__ import annotations

import json
import re
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.launch.__main__ import parse
from tfstyle_dist.parameter_server.client.server_link import ServerLink
from tfstyle_dist.parameter_server.protocol import zeromq_sockets

pytestmark = pytest.mark.timeout(90)


def test_every_task_gets_its_tf_config_and_its_own_port(launch: Any) -> None:
    source = "print(json.dumps([config, 'RANK' in os.environ, os.environ.get('CUDA_VISIBLE_DEVICES')]))"
    code, out, err = launch(source, "--workers", "2", "--ps", "1", "--chief", "--evaluator").end()
    assert code == 0, err
    said = {name: json.loads(text) for name, text in re.findall(r"^\[(\w+ \d)\] (.*)$", out, re.MULTILINE)}
    assert said.keys() >= {"chief 0"}  # the chief's end ends the job: the others may be stopped before they speak
    cluster = said["chief 0"][0]["cluster"]
    assert {job: len(tasks) for job, tasks in cluster.items()} == {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}
    addresses = [address for tasks in cluster.values() for address in tasks]
    assert len(set(addresses)) == 5
    for name, (config, has_rank, gpus) in said.items():
        assert f"{config['task']['type']} {config['task']['index']}" == name
        assert config["cluster"] == cluster
        assert not has_rank
        assert gpus in (None, "") or name.startswith(("chief", "worker"))


KEY = """
path = os.environ.get("TFSTYLE_PS_KEYS")
mode = None if path is None else oct(os.stat(path).st_mode & 0o777)
print(json.dumps([path, mode, path and open(path).read(), os.environ.get("TFSTYLE_PS_TCP")]))
"""


def keys_of(one: Any) -> list[Any]:
    """What the tasks of a job say of their key; it must be the same for all."""
    code, out, err = one.end()
    assert code == 0, err
    said = [json.loads(text) for text in re.findall(r"^\[\w+ \d\] (.*)$", out, re.MULTILINE)]
    assert said
    assert all(entry == said[0] for entry in said)
    return list(said[0])


def test_a_job_with_parameter_servers_gets_a_key_of_its_own(
    launch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TFSTYLE_PS_KEYS", raising=False)
    first, second = (keys_of(launch(KEY, "--workers", "1", "--ps", "1")) for _ in range(2))
    assert first[1] == "0o600"
    assert first[3] == "always"
    assert first[2] != second[2]
    assert not Path(first[0]).parent.exists()
    assert keys_of(launch(KEY, "--workers", "2")) == [None, None, None, None]
    monkeypatch.setenv("TFSTYLE_PS_INSECURE", "1")
    assert keys_of(launch(KEY, "--workers", "1", "--ps", "1"))[0] is None
    monkeypatch.delenv("TFSTYLE_PS_INSECURE")
    given = tmp_path / "own.key"
    given.write_text("mine")
    given.chmod(0o640)
    monkeypatch.setenv("TFSTYLE_PS_KEYS", str(given))
    assert keys_of(launch(KEY, "--workers", "1", "--ps", "1")) == [str(given), "0o640", "mine", None]


def test_other_processes_of_the_machine_are_refused(launch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TFSTYLE_PS_KEYS", raising=False)
    source = """
import tfstyle_dist as td
if job == "ps":
    server = td.Server(config["cluster"], job, index)
    print("ready", config["cluster"]["ps"][0], flush=True)
    server.join()
time.sleep(600)
"""
    job = launch(source, "--workers", "1", "--ps", "1")
    line = ""
    while "ready" not in line:
        line = job.process.stdout.readline()
        assert line, job.end()
    context = zeromq_sockets.Context(None)
    hello = {"role": "coordinator", "task": "chief", "session": "a stranger's"}
    link = ServerLink(context, line.split()[-1], "/job:ps/task:0", hello, timedelta(seconds=5))
    try:
        with pytest.raises((UnavailableError, DeadlineExceededError), match="TFSTYLE_PS_KEYS"):
            link.connect()
    finally:
        context.close()
        job.process.send_signal(signal.SIGTERM)
        job.end()


def test_both_streams_are_forwarded_line_by_line(launch: Any) -> None:
    source = """
print("to stdout")
print("to stderr", file=sys.stderr)
print("10%\\r50%\\r100%")
sys.stdout.write("no newline at the end")
"""
    code, out, err = launch(source, "--workers", "1").end()
    assert code == 0
    assert out.splitlines() == ["[worker 0] to stdout", "[worker 0] 100%", "[worker 0] no newline at the end"]
    assert err == "[worker 0] to stderr\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            ("--workers", "abc"),
            "argument --workers: must be a whole number that is not negative, got 'abc'; write e.g. 2",
        ),
        (("--ps", "-1"), "argument --ps: must be a whole number that is not negative, got '-1'; write e.g. 2"),
        (("--grace", "nan"), "argument --grace: must be a number of seconds that is not negative, got 'nan'"),
        (("--grace", "-5"), "argument --grace: must be a number of seconds that is not negative, got '-5'"),
        (("--evaluator-grace", "x"), "argument --evaluator-grace: must be a number of seconds"),
    ],
)
def test_wrong_numbers_are_refused(option: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([*option, "train.py"])
    assert message in capsys.readouterr().err


def test_the_first_failure_stops_all_and_is_shown(launch: Any) -> None:
    source = """
if index == 1:
    time.sleep(0.3)
    raise ValueError("worker 1 has bad data")
time.sleep(600)
"""
    code, _, err = launch(source, "--workers", "3").end()
    assert code == 1
    *_, head, first, where, line, error = err.splitlines()
    assert re.fullmatch(
        r"\[launch\] worker 1 \(pid \d+\) failed first: it exited with 1; all tasks were stopped.", head
    )
    assert first == "[worker 1] Traceback (most recent call last):"
    assert "program0.py" in where
    assert "raise ValueError" in line
    assert error == "[worker 1] ValueError: worker 1 has bad data"


def test_a_task_that_only_lost_the_failing_one_is_not_blamed(launch: Any) -> None:
    source = """
class PeerLostError(Exception): pass
PeerLostError.__module__ = "tfstyle_dist.core.errors"
begun = __file__ + ".begun"
if index == 0:
    while not os.path.exists(begun):
        time.sleep(0.01)
    raise PeerLostError("Worker 1 is missing")
open(begun, "w").close()
raise KeyError("the cause")
"""
    code, _, err = launch(source, "--workers", "2").end()
    assert code == 1
    assert "[launch] worker 1 (pid" in err
    assert err.splitlines()[-1] == "[worker 1] KeyError: 'the cause'"


def test_a_killed_task_is_named_with_its_signal(launch: Any) -> None:
    source = """
if index == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    code, _, err = launch(source, "--workers", "2").end()
    assert code == 128 + signal.SIGKILL
    assert "worker 0 (pid" in err
    assert "was ended by signal 9 (SIGKILL)" in err


def test_an_elastic_job_goes_on_without_the_workers_that_die(launch: Any) -> None:
    source = """
if index == 0:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(1)
if index == 1:
    raise KeyError("lost")
time.sleep(1)
print("came to the end")
"""
    code, out, err = launch(source, "--workers", "3", "--elastic", "--max-restarts", "0").end()
    assert code == 0
    assert "[worker 2] came to the end" in out
    assert re.search(r"\[launch\] worker 0 \(pid \d+\) ended with 137; the others go on without it", err)
    assert re.search(r"\[launch\] worker 1 \(pid \d+\) ended with 1; the others go on without it", err)


def test_an_elastic_job_that_lost_all_workers_has_failed(launch: Any) -> None:
    source = """
time.sleep(0.5 * index)
raise KeyError(f"worker {index}")
"""
    code, _, err = launch(source, "--workers", "2", "--elastic", "--max-restarts", "0").end()
    assert code == 1
    assert "[launch] worker 0 (pid" in err


def test_lost_workers_of_an_elastic_job_are_started_again(launch: Any, tmp_path: Path) -> None:
    source = f"""
lives = os.path.join({str(tmp_path)!r}, f"lives-{{index}}")
with open(lives, "a") as file:
    file.write("x")
life = os.path.getsize(lives)
print(f"life {{life}}")
if index == 0 and life < 3:
    os.kill(os.getpid(), signal.SIGKILL)
if index == 1:
    while not os.path.exists(os.path.join({str(tmp_path)!r}, "end")):
        time.sleep(0.01)
open(os.path.join({str(tmp_path)!r}, "end"), "w").close()
"""
    code, out, err = launch(source, "--workers", "2", "--elastic").end()
    assert code == 0
    assert re.findall(r"\[worker 0\] life (\d)", out) == ["1", "2", "3"]
    assert re.findall(r"worker 0 \(pid \d+\) ended with 137; it is started again in ([\d.]+) s", err) == ["0.2", "0.4"]
    assert out.count("[worker 1] life") == 1


def test_a_worker_that_is_being_started_again_is_told_that_the_others_have_come_to_the_end(
    launch: Any, tmp_path: Path
) -> None:
    source = f"""
from tfstyle_dist.core import launch_env
lives = os.path.join({str(tmp_path)!r}, f"lives-{{index}}")
with open(lives, "a") as file:
    file.write("x")
if index == 0 and os.path.getsize(lives) == 1:
    os.kill(os.getpid(), signal.SIGKILL)
if index == 0:
    print(f"before: {{launch_env.job_has_ended()}}")
    open(os.path.join({str(tmp_path)!r}, "looked"), "w").close()
    while not launch_env.job_has_ended():
        time.sleep(0.01)
    print("told")
while not os.path.exists(os.path.join({str(tmp_path)!r}, "looked")):
    time.sleep(0.01)
"""
    code, out, _ = launch(source, "--workers", "2", "--elastic").end()
    assert code == 0
    assert "[worker 0] before: False" in out
    assert "[worker 0] told" in out


def test_restarts_have_an_end(launch: Any, tmp_path: Path) -> None:
    source = f"""
from pathlib import Path
lives = Path({str(tmp_path / "lives")!r})
if index == 0:
    with lives.open("a") as file:
        file.write("x")
    raise KeyError("lost")
while not lives.exists() or lives.stat().st_size < 3:
    time.sleep(0.1)
time.sleep(2)
"""
    code, _, err = launch(source, "--workers", "2", "--elastic", "--max-restarts", "2").end()
    assert code == 0
    assert err.count("it is started again in") == 2
    assert err.count("the others go on without it") == 1


def test_restarts_are_for_elastic_jobs(launch: Any) -> None:
    code, _, err = launch("", "--max-restarts", "2").end()
    assert code == 2
    assert "--max-restarts is for elastic jobs" in err


def test_stubborn_tasks_and_their_children_are_killed(launch: Any) -> None:
    source = """
import subprocess
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", child, sys.argv[1]])
begun = __file__ + ".begun"
if index == 1:
    while not os.path.exists(begun):
        time.sleep(0.01)
    sys.exit(5)
open(begun, "w").close()
time.sleep(600)
"""
    started = launch(source, "--workers", "2", "--grace", "2")
    code, _, err = started.end()
    assert code == 5
    assert "[launch] worker 0 did not stop: killed" in err
    assert not started.left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_all(launch: Any, number: signal.Signals) -> None:
    source = """
try:
    print("ready", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    sys.exit(3)
"""
    started = launch(source, "--workers", "2")
    started.wait_for(2)
    started.process.send_signal(number)
    code, out, err = started.end(30)
    assert code == 128 + number, err
    assert f"[launch] {number.name}: stopping all tasks" in err
    assert out.count("interrupted") == (2 if number == signal.SIGINT else 0)
    assert not started.left()


def test_a_killed_launcher_takes_its_tasks_along(launch: Any) -> None:
    started = launch("print('ready', flush=True)\ntime.sleep(600)", "--workers", "2")
    started.wait_for(2)
    started.process.kill()
    assert not started.left()


def test_servers_end_with_the_training_and_the_evaluator_is_given_time(launch: Any) -> None:
    source = """
if job == "ps":
    time.sleep(600)
if job == "evaluator":
    time.sleep(1.5)
    print("evaluated")
"""
    code, out, err = launch(source, "--workers", "1", "--ps", "2", "--evaluator").end()
    assert code == 0, err
    assert "[evaluator 0] evaluated" in out
    endless = launch(
        "if job == 'evaluator': time.sleep(600)", "--workers", "1", "--evaluator", "--evaluator-grace", "1"
    )
    code, _, err = endless.end()
    assert code == 0
    assert "the training is over and evaluator 0 goes on: stopping it" in err


def test_a_cluster_without_training_is_refused(launch: Any) -> None:
    code, _, err = launch("", "--workers", "0", "--ps", "1").end()
    assert code == 2
    assert "there is nobody to train: give --workers N or --chief" in err
