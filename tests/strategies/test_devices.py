"""Device strings of TensorFlow and torch."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import tfstyle_dist as td
from tfstyle_dist.core import devices
from tfstyle_dist.core.devices import ReplicaDevice, parse, parse_replica_devices
from tfstyle_dist.strategies.mirrored import own_devices

pytestmark = pytest.mark.cpu_only("it is about the names of devices themselves")

kinds = st.sampled_from(
    [("cpu", "cpu"), ("CPU", "cpu"), ("gpu", "cuda"), ("GPU", "cuda"), ("cuda", "cuda"), ("xla", "xla")]
)
numbers = st.integers(0, 10**6)
jobs = st.sampled_from(["worker", "ps", "chief", "localhost", "w_0", "Job7"])


@st.composite
def tf_names(draw: st.DrawFn) -> tuple[str, ReplicaDevice]:
    """A TensorFlow device string, with any of its parts left out, and what it means."""
    spelled, kind = draw(kinds)
    index = draw(st.none() | numbers)
    name = ""
    for part, values in (("job", jobs), ("replica", numbers), ("task", numbers)):
        if draw(st.booleans()):
            name += f"/{part}:{draw(values)}"
    name += draw(st.sampled_from(["/", "/device:"] if name else ["", "/", "/device:", "device:"]))
    name += spelled + ("" if index is None else f":{index}")
    slot = draw(st.none() | st.integers(0, 99))
    return name + ("" if slot is None else f"#{slot}"), ReplicaDevice(kind, index or 0, slot or 0)


@settings(deadline=None)
@given(tf_names())
def test_tensorflow_names(case: tuple[str, ReplicaDevice]) -> None:
    name, device = case
    assert parse(name) == device


@settings(deadline=None)
@given(st.builds(ReplicaDevice, st.sampled_from(["cpu", "cuda", "xla", "meta"]), numbers, st.integers(0, 99)))
def test_round_trip(device: ReplicaDevice) -> None:
    assert parse(str(device)) == device
    assert parse(device) is device


@settings(deadline=None)
@given(st.sampled_from(["cpu", "cuda", "meta"]), st.none() | st.integers(0, 100))
def test_torch_devices(kind: str, index: int | None) -> None:
    device = torch.device(kind) if index is None else torch.device(kind, index)
    assert parse(device) == ReplicaDevice(kind, index or 0)
    assert parse(str(device)) == parse(device)


@settings(deadline=None)
@given(st.text(max_size=12))
def test_other_text_is_refused_with_advice(text: str) -> None:
    known = re.search("cpu|gpu|cuda|xla|mps|xpu|meta", text, re.IGNORECASE)
    if known is not None:  # a needle in this haystack, and it may be a device
        return
    with pytest.raises(ValueError, match="Write 'cpu:0'") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8, unique=True))
def test_logical_cpus(indices: list[int]) -> None:
    devices = parse_replica_devices([f"cpu:{i}" for i in indices])
    assert [d.index for d in devices] == indices
    assert {d.torch_device for d in devices} == {torch.device("cpu")}


def test_several_replicas_on_one_device() -> None:
    with td.MirroredStrategy(["cpu:0#0", "cpu:0#1"]) as strategy:
        assert strategy.num_replicas_in_sync == 2
        assert strategy.extended.worker_devices == ("cpu:0", "cpu:0#1")
    with pytest.raises(ValueError, match="cpu:0#1 is given more than once"):
        parse_replica_devices(["cpu:0#1", "cpu:0#1"])


def launched(monkeypatch: pytest.MonkeyPatch, gpus: int, rank: int, count: int) -> None:
    """This process is one of several of a host, and sees some GPUs."""
    found = tuple(ReplicaDevice("cuda", number) for number in range(gpus))
    monkeypatch.setattr(devices, "find_local_devices", lambda: found)
    told = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count}
    for name, value in told.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_each_rank_has_its_own_device(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    launched(monkeypatch, 4, rank, 4)
    assert own_devices() == (ReplicaDevice("cuda", rank),)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_sees_one_device_alone_takes_it(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm shows each task its own; whether others see the same one is found when they meet."""
    launched(monkeypatch, 1, rank, 4)
    assert own_devices() == (ReplicaDevice("cuda", 0),)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_too_few_devices_are_refused_by_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By those that would have one too: they would wait for the others."""
    launched(monkeypatch, 2, rank, 4)
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE=4, but each process of this host sees 2 devices"):
        own_devices()


def test_a_current_device_that_was_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Members of a group that is there already take their current devices; ``set_visible_devices`` has left another."""
    monkeypatch.setattr(devices, "find_local_devices", lambda: (ReplicaDevice("cuda", 1),))
    current = SimpleNamespace(current_device=lambda: 0)
    monkeypatch.setattr(devices, "accelerator", lambda kind: current)
    group: Any = SimpleNamespace(size=2)
    with pytest.raises(ValueError, match=r"cuda:0, is none of those that set_visible_devices has left, \['cuda:1'\]"):
        own_devices(group)
    current.current_device = lambda: 1
    assert own_devices(group) == (ReplicaDevice("cuda", 1),)
