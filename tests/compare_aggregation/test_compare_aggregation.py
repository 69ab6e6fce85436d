"""``python -m tfstyle_dist.compare_aggregation``."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tfstyle_dist.compare_aggregation import report, training, workload
from tfstyle_dist.compare_aggregation.__main__ import main
from tfstyle_dist.monitoring import figure as pictures

OWN = """
import torch

def workload():
    model = torch.nn.Linear(4, 1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10, 4, generator=generator)  # 10 examples: uneven shares
    return model, lambda model, x, y: (model(x)[:, 0] - y) ** 2, [(x, x.sum(1))]

def raising():
    import a_module_that_is_not_there

def other():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_workload.py").write_text(OWN, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    sys.modules.pop("own_workload", None)
    return tmp_path


def test_own_workload(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = ["--plot", "out.png"] if importlib.util.find_spec("matplotlib") else []
    assert main(["own_workload:workload", "--steps", "6", "--replicas", "3", "--json", "out.json", *picture]) == 0
    printed = capsys.readouterr().out
    assert "| OneDeviceStrategy | - |" in printed
    assert "| CentralStorageStrategy, 3 on the CPU | EXPERIMENTAL_ACCUMULATE_N |" in printed
    assert "DEFAULT: ADD_N in torch on cpu, as all contributions are at hand: N = 3" in printed
    assert "Every run converges, to the same losses." in printed
    written = json.loads((own / "out.json").read_text())
    assert len(written["runs"]) == 9
    assert written["problems"] == []
    for run in written["runs"]:
        assert len(run["losses"]) == 7
        assert len(run["seconds"]) == 6
        assert run["losses"] == pytest.approx(written["runs"][0]["losses"], rel=1e-4)
        assert run["losses"][-1] < run["losses"][0]
    if picture:
        assert (own / "out.png").read_bytes().startswith(b"\x89PNG")


def test_exit_status_tells_a_loss_that_does_not_go_down(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["own_workload:workload", "--steps", "3", "--replicas", "2", "--methods", "ADD_N", "--lr", "-0.1"]
    assert main(options) == 1
    assert "the loss did not go down" in capsys.readouterr().out


def test_different_losses_are_a_problem() -> None:
    def run(name: str, *losses: float) -> training.Run:
        return training.Run(name, "ADD_N", 2, 1, 4, lambda _: torch.zeros(()), [], [0.1, 0.2], list(losses))

    found = report.find([run("a", 1.0, 0.5, 0.25), run("b", 1.0, 0.5, 0.27)])
    assert report.problems(found, 0.03) == []
    (problem,) = report.problems(found, 0.01)
    assert problem.startswith("b, ADD_N: a loss differs from that of a, ADD_N by 2.0e-02")


def test_a_loss_that_is_not_finite_is_named() -> None:
    bad = training.Run("a", "ADD_N", 2, 1, 4, lambda _: torch.tensor(torch.nan), [[]])
    with pytest.raises(FloatingPointError, match=r"a, ADD_N: the loss is nan after 0 steps; try a smaller --lr"):
        training.train([bad], 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nothing"], "is no module:function"),
        (["no_such_module:f"], "there is no module 'no_such_module'"),
        (["own_workload:absent"], "has no function 'absent'"),
        (["--replicas", "1"], "give at least 2"),
        (["--steps", "0"], "give at least 1"),
    ],
)
def test_refusals(own: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(options)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_wrong_results_of_a_workload(own: Path) -> None:
    with pytest.raises(ValueError, match=r"own_workload:other returned a int, not \(model, loss, batches\)"):
        workload.find("own_workload:other")()
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        workload.find("own_workload:raising")()


def test_plot_without_matplotlib(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        main(["--plot", "out.png"])
    assert "matplotlib is not installed: pip install matplotlib (the extra 'plot'" in capsys.readouterr().err


def test_built_in_workload_can_be_learned() -> None:
    torch.manual_seed(0)
    built = workload.find("")()
    assert sum(p.numel() for p in built.model.parameters()) > 800_000
    losses = built.loss(built.model, *built.batches[0])
    assert isinstance(built.model, nn.Module)
    assert isinstance(losses, Tensor)
    assert losses.shape == (128,)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_command_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tfstyle_dist.compare_aggregation", "--steps", "4", "--replicas", "2"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MirroredStrategy, 2 on the CPU" in result.stdout
