"""Checkpoints that do not fit the objects they are restored to, and reading them without objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.checkpoint import files
from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.train import Checkpoint


def test_status_of_a_partial_restore(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = Checkpoint(model=torch.nn.Linear(2, 1), step=1).save(tmp_path / "ckpt")
    more = torch.nn.Sequential(torch.nn.Linear(2, 1))
    status = Checkpoint(model=torch.nn.Linear(2, 1)).restore(path)
    status.assert_existing_objects_matched().assert_nontrivial_match()
    with pytest.raises(AssertionError, match="no object took: step"):
        status.assert_consumed()
    status = Checkpoint(net=more, step=0).restore(path)
    with pytest.raises(AssertionError, match=r"does not have net.*model/weight"):
        status.assert_existing_objects_matched()
    status = Checkpoint(model=more).restore(path)
    with pytest.raises(AssertionError, match=r"does not have model/0\.weight, model/0\.bias"):
        status.assert_consumed()
    with pytest.raises(AssertionError, match="Nothing of checkpoint"):
        Checkpoint(other=1).restore(path).assert_nontrivial_match()
    caplog.clear()
    Checkpoint(net=more).restore(path).expect_partial()
    assert not caplog.records
    Checkpoint(net=more).restore(path)
    (record,) = caplog.records
    assert "not in it: net; in it and not used: model/weight, model/bias, step" in record.getMessage()


def test_nothing_to_restore() -> None:
    status = Checkpoint(step=1).restore(None)
    with pytest.raises(AssertionError, match="path is None"):
        status.assert_consumed()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.nn.Linear(3, 1), r"object/weight has shape \[1, 3\], saved was \[1, 2\]"),
        (lambda: torch.nn.LazyLinear(1), "object/weight has no shape yet: run the lazy module once"),
        (lambda: torch.zeros(2), "object is of kind tensor, saved was a module"),
    ],
)
def test_a_misfit_changes_nothing(tmp_path: Path, make: Any, message: str) -> None:
    path = Checkpoint(first=1, object=torch.nn.Linear(2, 1)).save(tmp_path / "ckpt")
    checkpoint = Checkpoint(first=2, object=make())
    with pytest.raises(InvalidArgumentError, match=message):
        checkpoint.restore(path)
    assert checkpoint.first == 2


def test_a_variable_of_another_dtype(tmp_path: Path) -> None:
    path = Checkpoint(v=td.Variable(1.0)).save(tmp_path / "ckpt")
    with pytest.raises(InvalidArgumentError, match="v has dtype int64, saved was float32"):
        Checkpoint(v=td.Variable(1)).restore(path)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    Checkpoint(step=1).save(tmp_path / "ckpt")
    with pytest.raises(NotFoundError, match=r"no checkpoint .*ckpt-7.*holds ckpt-1"):
        Checkpoint(step=1).restore(tmp_path / "ckpt-7")


@pytest.mark.parametrize("name", ["save", "write", "restore", "read"])
def test_a_call_inside_run_is_refused_by_its_name(tmp_path: Path, name: str) -> None:
    call = getattr(Checkpoint(step=1), name)
    with (
        td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        pytest.raises(RuntimeError, match=rf"Checkpoint\.{name} must be called in cross-replica context"),
    ):
        strategy.run(lambda: call(tmp_path / "ckpt"))


def test_a_manager_inside_run_is_refused_by_its_name(tmp_path: Path) -> None:
    manager = td.train.CheckpointManager(Checkpoint(step=1), tmp_path, max_to_keep=1)
    with (
        td.MirroredStrategy(["cpu:0", "cpu:1"]) as strategy,
        pytest.raises(RuntimeError, match=r"CheckpointManager\.save must be called in cross-replica context"),
    ):
        strategy.run(manager.save)


def test_slots_that_were_not_saved_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def made(updates: int) -> Checkpoint:
        layer, optimizer = torch.nn.Linear(2, 1), td.train.MomentumOptimizer(0.1, 0.9)
        for _ in range(updates):
            optimizer.minimize(layer(torch.ones(1, 2)).sum(), var_list=list(layer.parameters()))
        return Checkpoint(model=layer, optimizer=optimizer)

    path = made(0).save(tmp_path / "ckpt")
    status = made(1).restore(path)
    with pytest.raises(AssertionError, match=r"does not have optimizer/slots/model/bias, optimizer/slots/model/weight"):
        status.assert_consumed()
    made(1).restore(path)
    assert "not in it: optimizer/slots/model/bias" in caplog.text
    made(0).restore(path).assert_consumed()
    made(0).restore(made(1).save(tmp_path / "ckpt")).assert_consumed()


# ---- without the objects ------------------------------------------------------------------------------------------


def test_reading_without_the_objects(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    Checkpoint(model=model, step=4).save(tmp_path / "ckpt")
    assert td.train.list_variables(tmp_path) == [("model/bias", [1]), ("model/weight", [1, 2])]
    assert torch.equal(td.train.load_variable(tmp_path, "model/weight"), model.weight.detach())
    reader = td.train.load_checkpoint(tmp_path)
    again = torch.nn.Linear(2, 1)
    again.load_state_dict(reader.state_dict("model"))
    assert torch.equal(again.weight, model.weight)
    assert reader.state_dict("step") == 4
    assert reader.get_variable_to_dtype_map()["model/bias"] is torch.float32
    assert not reader.has_tensor("model")
    with pytest.raises(NotFoundError, match="no tensor"):
        reader.get_tensor("model")
    with pytest.raises(NotFoundError, match="has no 'modle'"):
        reader.state_dict("modle")


def test_plain_torch_reads_it_too(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model = torch.nn.Linear(2, 1)
    path = Checkpoint(model=model).save(tmp_path / "ckpt")
    folder = files.data_folder(path, files.read_index(path))
    state = {"model/weight": torch.zeros(1, 2)}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(state, checkpoint_id=folder)
    assert torch.equal(state["model/weight"], model.weight.detach())
    dcp_to_torch_save(folder, tmp_path / "flat.pt")
    assert torch.equal(torch.load(tmp_path / "flat.pt")["model/bias"], model.bias.detach())
