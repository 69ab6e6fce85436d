"""``CommunicationOptions`` and its older name."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest
import torch

from tfstyle_dist.comm import CollectiveHints, CommunicationImplementation, CommunicationOptions
from tfstyle_dist.comm.rendezvous.bootstrap import effective_timeout, make_group


def test_defaults() -> None:
    options = CommunicationOptions()
    assert (options.bytes_per_pack, options.timeout_seconds, options.timeout) == (0, None, None)
    assert options.implementation is CommunicationImplementation.AUTO
    assert "bytes_per_pack=0, timeout_seconds=None" in repr(options)


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", CommunicationImplementation.RING])
def test_implementation_by_name(name: Any) -> None:
    assert CommunicationOptions(implementation=name).implementation is CommunicationImplementation.RING


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack must be >= 0, got -1; 0 lets the strategy choose"),
        ({"timeout_seconds": 0}, "timeout_seconds must be > 0 or None, got 0"),
        ({"timeout_seconds": -2.5}, "got -2.5"),
        ({"timeout_seconds": math.nan}, "got nan; None takes the strategy's default"),
        ({"timeout_seconds": math.inf}, "got inf; None takes the strategy's default, which TFSTYLE_TIMEOUT_SECONDS=0"),
        ({"timeout_seconds": 1e300}, "got 1e[+]300"),
        ({"implementation": "MPI"}, r"must be one of \['AUTO', 'RING', 'NCCL'\], got 'MPI'"),
        ({"implementation": 3}, "must be a CommunicationImplementation or its name, got int"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CommunicationOptions(**options)


@pytest.mark.parametrize("value", [None, "1", 1.5, math.nan, [1]])
def test_what_is_no_whole_number_of_bytes(value: Any) -> None:
    with pytest.raises(TypeError, match=r"bytes_per_pack must be a whole number of bytes, got .*; write e.g."):
        CommunicationOptions(bytes_per_pack=value)
    assert CommunicationOptions(bytes_per_pack=1e6).bytes_per_pack == 1000000  # type: ignore[arg-type]


def test_what_is_no_number_of_seconds() -> None:
    with pytest.raises(TypeError, match="timeout_seconds must be a number of seconds or None, got '1'"):
        CommunicationOptions(timeout_seconds="1")  # type: ignore[arg-type]


def test_hints_are_options() -> None:
    hints = CollectiveHints(bytes_per_pack=7, timeout_seconds=3.0)
    assert isinstance(hints, CommunicationOptions)
    assert (hints.bytes_per_pack, hints.timeout) == (7, timedelta(seconds=3))


def test_own_timeout_comes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "40")
    assert effective_timeout(CommunicationOptions()) == timedelta(seconds=40)
    assert effective_timeout(CommunicationOptions(timeout_seconds=2)) == timedelta(seconds=2)
    monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", "0")
    assert effective_timeout(CommunicationOptions()) is None


def test_nccl_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TFSTYLE_RENDEZVOUS_FILE", str(tmp_path / "rendezvous"))
    with pytest.raises(ValueError, match=r"NCCL was asked for, but the replicas are on cpu .*Use AUTO or RING"):
        make_group(torch.device("cpu"), CommunicationOptions(implementation="nccl"))
