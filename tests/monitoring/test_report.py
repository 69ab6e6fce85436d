"""What a report says, and its other forms: TensorBoard, a trace, a picture."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tfstyle_dist as tfd
from tfstyle_dist.monitoring import ReplicaTimes, figure, scalars
from tfstyle_dist.monitoring.diagnosis import diagnose


def times(
    replica: int,
    *,
    input: float = 0.1,
    compute: float = 8,
    comm: float = 0.4,
    wait: float = 0,
    update: float = 1,
    other: float = 0.1,
) -> ReplicaTimes:
    return ReplicaTimes(replica, replica // 2, f"cpu:{replica % 2}", (input, compute, comm, wait, update, other), 0)


def kinds(*replicas: ReplicaTimes) -> list[str]:
    return [finding.kind for finding in diagnose(replicas)]


def test_nothing_stands_out() -> None:
    assert kinds(*(times(r) for r in range(4))) == []
    assert diagnose([times(0, input=0, compute=0, comm=0, update=0, other=0)]) == []


def test_each_reason_is_found() -> None:
    assert kinds(times(0, input=3), times(1, input=3)) == ["input"]
    assert kinds(times(0, comm=5), times(1, comm=5)) == ["communication"]
    assert kinds(times(0, update=9), times(1, update=9)) == ["update"]
    assert kinds(times(0, other=9, input=5)) == ["other", "input"], "the largest first"
    assert kinds(times(0, comm=5)) == [], "one replica has nobody to talk to"


def test_waiting_for_the_turn_is_no_communication(capsys: pytest.CaptureFixture[str]) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        strategy.monitor.every = 1
        for _ in range(4):
            strategy.run(lambda: time.sleep(0.02))
        report = strategy.monitor.report()
        assert report.mean("wait") > 0.015
        assert "communication" not in [finding.kind for finding in report.findings]
        assert "of 2 replicas of a process; they take turns" in str(report)


def test_a_straggler_is_named_with_its_reason() -> None:
    # Where nothing tells waiting from transfer (sockets), the time in the collective differs by who came last.
    fast = [times(r, comm=8.4) for r in (0, 1, 3)]
    for name, slow in (("compute", times(2, compute=16)), ("input", times(2, input=8.1))):
        (finding,) = diagnose([*fast[:2], slow, fast[2]])
        assert (finding.kind, finding.replica) == ("straggler", 2)
        assert "replica 2 (worker 1, cpu:0)" in finding.text
        assert f"Its {name} takes" in finding.text


def step_of(strategy: tfd.Strategy) -> tuple[nn.Module, Any]:
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(delay: float = 0.0) -> None:
        time.sleep(delay)
        optimizer.zero_grad()
        model(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    return model, train_step


@pytest.mark.distributed(workers=2)
def test_ranks_agree_who_is_slow_and_only_the_chief_prints(
    strategy: tfd.Strategy, rank: int, shared_tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, train_step = step_of(strategy)
    for _ in range(5):
        strategy.run(train_step, args=(0.3 * rank,))
    report = strategy.report()
    printed = capsys.readouterr().out
    straggler = next(f for f in report.findings if f.kind == "straggler")
    assert straggler.replica == 1
    assert ("Where the time of 'train_step' goes" in printed) == (rank == 0)
    assert report.replicas[0].seconds[3] > 0.02, "replica 0 waits where both meet"
    with strategy.monitor.trace(shared_tmp_path):
        strategy.run(train_step)
    names = {e.get("name", "") for e in json.loads((shared_tmp_path / f"worker{rank}.json").read_text())["traceEvents"]}
    assert {"tfstyle_dist: run train_step", "tfstyle_dist: all_reduce in shared memory gradients[0]"} <= names


def test_a_trace_shows_all_replicas(tmp_path: Path) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        _, train_step = step_of(strategy)
        strategy.run(train_step)
        with strategy.monitor.trace(tmp_path / "new"):
            strategy.run(train_step)
    events = json.loads((tmp_path / "new" / "worker0.json").read_text())["traceEvents"]
    meets = [e for e in events if e.get("name") == "tfstyle_dist: meet for gradient reduction"]
    assert len({e["tid"] for e in meets}) == 2, "one for each replica's thread"
    assert any(e.get("name") == "tfstyle_dist: joint gradient reduction" for e in events)


def test_report_texts(capsys: pytest.CaptureFixture[str]) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        assert str(strategy.report(quiet=True)).startswith("No step was counted")
        assert capsys.readouterr().out == ""
        for work in (len, sum):
            for _ in range(3):
                strategy.run(work, args=([],))
        text = str(strategy.report("len"))
        assert text in capsys.readouterr().out
        for part in (
            "'len' goes: 2 of 3 steps on 2 replica(s)",
            "waiting for other replicas",
            "Also: 'sum', 3 steps of",
        ):
            assert part in text
        with pytest.raises(ValueError, match=r"No step of 'eval' was counted; there are \['len', 'sum'\]"):
            strategy.report("eval")
        with pytest.raises(RuntimeError, match=r"Strategy\.report must be called in cross-replica context"):
            strategy.run(strategy.report)


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with pytest.raises(ValueError, match="nothing to draw"):
            strategy.report(quiet=True).plot(tmp_path / "empty.png")
        for _ in range(3):
            strategy.run(lambda: None)
        report = strategy.report(quiet=True)
    if importlib.util.find_spec("matplotlib") is not None:
        report.plot(tmp_path / "steps.png")
        assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(figure.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(ModuleNotFoundError, match=r"pip install matplotlib \(the extra 'plot'"):
        report.plot(tmp_path / "none.png")


def test_tensorboard(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tfd.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy:
        with strategy.monitor.tensorboard(tmp_path, every=2):
            for _ in range(6):
                strategy.run(lambda: time.sleep(0.002))
        strategy.run(lambda: None)  # no longer written
        with pytest.raises(ValueError, match="every must be a positive number of steps, got 0"):
            strategy.monitor.tensorboard(tmp_path, every=0)
    found = reading.EventAccumulator(str(tmp_path))
    found.Reload()
    (name,) = {tag.split("/")[1] for tag in found.Tags()["scalars"]}
    points = {p: found.Scalars(f"step_time/{name}/{p}") for p in ("compute", "wait", "input", "other", "total")}
    assert [p.step for p in points["total"]] == [3, 5, 6], "the first call is not counted"
    assert all(p.value >= 2.0 for p in points["total"]), "milliseconds; a sleep is never shorter"


def test_tensorboard_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scalars.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with tfd.OneDeviceStrategy("cpu:0") as strategy:
        with pytest.raises(ModuleNotFoundError, match=r"pip install tensorboard \(the extra 'tensorboard'"):
            strategy.monitor.tensorboard(tmp_path)
        assert strategy.monitor._listeners == []
