"""What TPUStrategy says where torch_xla is absent or does not fit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

import tfstyle_dist as tfd


@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed")
@pytest.mark.parametrize("make", [tfd.TPUStrategy, tfd.experimental.TPUStrategy])
def test_absent_torch_xla(make: type) -> None:
    with pytest.raises(ImportError, match="make venv-xla") as raised:
        make()
    assert raised.value.name == "torch_xla"


def test_torch_xla_of_another_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch_xla.py").write_text("raise AssertionError('imported although it cannot work')")
    info = tmp_path / "torch_xla-1.13.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-xla\nVersion: 1.13.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=r"torch_xla 1\.13\.0 works with torch 1\.13 only") as raised:
        tfd.TPUStrategy()
    assert str(torch.__version__) in str(raised.value)
