"""Objects that are attached after ``restore`` take their saved state then, as in TensorFlow."""

from __future__ import annotations

import copy
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError, NotFoundError
from tfstyle_dist.train import Checkpoint

READ, SUM = td.VariableSynchronization.ON_READ, td.VariableAggregation.SUM


def variable(value: float = 0.0) -> td.Variable:
    return td.Variable(value)


def saved(folder: Path) -> str:
    """One of everything that objects can be attached to."""
    inner = Checkpoint(x=variable(6.0))
    return Checkpoint(
        v=variable(1.0), w=variable(2.0), l=[variable(3.0), variable(4.0)], d={"a": variable(5.0)}, inner=inner, n=7
    ).save(folder / "ckpt")


def test_an_attribute_is_restored_when_it_is_set(tmp_path: Path) -> None:
    checkpoint = Checkpoint(w=variable())
    status = checkpoint.restore(saved(tmp_path))
    status.assert_existing_objects_matched()
    with pytest.raises(AssertionError, match="no object took: v, l/0, l/1, d/a, inner/x, n"):
        status.assert_consumed()
    checkpoint.v = variable()
    checkpoint.l = [variable(), variable()]
    checkpoint.d = {"a": variable()}
    checkpoint.inner = Checkpoint(x=variable())
    given = [checkpoint.v, checkpoint.w, *checkpoint.l, checkpoint.d["a"], checkpoint.inner.x]
    assert [float(entry) for entry in given] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert status.matched == 6
    assert status.unused == ("n",)


def test_only_the_first_object_of_a_name_is_restored(tmp_path: Path) -> None:
    checkpoint = Checkpoint(w=variable())
    checkpoint.restore(saved(tmp_path)).expect_partial()
    first = variable()
    checkpoint.v = first
    first.assign(9.0)
    checkpoint.v = first
    assert float(first) == 9.0
    checkpoint.v, checkpoint.w = variable(), variable()
    assert (float(checkpoint.v), float(checkpoint.w)) == (0.0, 0.0)


def test_plain_values_stay_what_they_were_set_to(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.restore(saved(tmp_path)).expect_partial()
    checkpoint.n = 0
    assert checkpoint.n == 0


def test_what_the_checkpoint_does_not_have_is_missing(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    status = checkpoint.restore(saved(tmp_path))
    status.assert_existing_objects_matched()
    checkpoint.z = variable(8.0)
    with pytest.raises(AssertionError, match="does not have z;"):
        status.assert_existing_objects_matched()
    assert float(checkpoint.z) == 8.0


def test_an_object_that_does_not_fit_is_named(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.restore(saved(tmp_path)).expect_partial()
    with pytest.raises(InvalidArgumentError, match=r"do not fit: v has shape \[2\], saved was \[\]"):
        checkpoint.v = td.Variable([1.0, 2.0])


@pytest.mark.parametrize("call", ["restore", "read"])
def test_the_checkpoint_that_was_restored_last_counts(tmp_path: Path, call: str) -> None:
    first = saved(tmp_path)
    second = Checkpoint(v=variable(11.0)).write(tmp_path / "second")
    checkpoint = Checkpoint()
    statuses = [getattr(checkpoint, call)(path) for path in (first, second)]
    checkpoint.v, checkpoint.w = variable(), variable()
    assert (float(checkpoint.v), float(checkpoint.w)) == (11.0, 2.0)
    statuses[1].assert_nontrivial_match()
    assert statuses[0].matched == 2
    for _ in range(5):  # an evaluator's loop: nothing piles up
        getattr(checkpoint, call)(first).expect_partial()
    assert len(checkpoint._later) == 1


def test_a_nested_checkpoint_gets_objects_of_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path)
    there = Checkpoint(inner=Checkpoint())
    there.restore(path).expect_partial()
    there.inner.x = variable()
    assert float(there.inner.x) == 6.0
    late = Checkpoint()
    late.restore(path).expect_partial()
    late.inner = Checkpoint()
    late.inner.x = variable()
    assert float(late.inner.x) == 6.0
    in_a_list = Checkpoint(l=[Checkpoint(y=variable(4.0))])
    path = in_a_list.save(tmp_path / "list")
    again = Checkpoint(l=[Checkpoint()])
    again.restore(path).expect_partial()
    again.l[0].y = variable()
    assert float(again.l[0].y) == 4.0


def test_a_copy_restores_its_own(tmp_path: Path) -> None:
    checkpoint = Checkpoint()
    checkpoint.restore(saved(tmp_path)).expect_partial()
    twin = copy.deepcopy(checkpoint)
    twin.v = variable()
    assert float(twin.v) == 1.0


def test_empty_containers_need_not_be_in_it(tmp_path: Path) -> None:
    path = Checkpoint(a=[], c={}).save(tmp_path / "ckpt")
    again = Checkpoint(b=[], d=[[], {}])
    again.restore(path).assert_consumed().assert_existing_objects_matched().assert_nontrivial_match()


# ---- modules and optimizers ---------------------------------------------------------------------------------------


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))


def trained(folder: Path) -> tuple[torch.nn.Module, torch.optim.Optimizer, str]:
    made = model()
    optimizer = torch.optim.Adam(made.parameters(), lr=0.1)
    made(torch.randn(5, 2)).sum().backward()
    optimizer.step()
    return made, optimizer, Checkpoint(model=made, optimizer=optimizer).save(folder / "ckpt")


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


@pytest.mark.parametrize("first", ["model", "optimizer"])
def test_a_model_and_its_optimizer_in_any_order(tmp_path: Path, first: str) -> None:
    before, stepped, path = trained(tmp_path)
    checkpoint, made = Checkpoint(), model()
    optimizer = torch.optim.Adam(made.parameters())
    status = checkpoint.restore(path)
    given = {"model": made, "optimizer": optimizer}
    setattr(checkpoint, first, given.pop(first))
    setattr(checkpoint, *given.popitem())
    status.assert_consumed()
    assert equal(made, before)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for one, other in zip(made.parameters(), before.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], stepped.state[other]["exp_avg"])


def test_an_optimizer_that_has_trained_keeps_what_it_has(tmp_path: Path) -> None:
    one, two = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1, momentum=0.9)
    two(one(torch.ones(1, 2))).sum().backward()
    optimizer.step()
    path = Checkpoint(one=one, two=two, optimizer=optimizer).save(tmp_path / "ckpt")
    momentum = optimizer.state[two.weight]["momentum_buffer"]
    for split in (False, True):
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        again = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5, momentum=0.9)
        checkpoint = Checkpoint(one=first, optimizer=again)
        checkpoint.restore(path).expect_partial()
        again.param_groups[0]["lr"] = 0.01
        first(torch.ones(1, 2)).sum().backward()
        again.step()
        if split:
            again.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        trained = again.state[first.weight]["momentum_buffer"].clone()
        checkpoint.two = second
        assert again.param_groups[0]["lr"] == 0.01
        assert torch.equal(again.state[first.weight]["momentum_buffer"], trained)
        assert torch.equal(again.state[second.weight]["momentum_buffer"], momentum)
        assert torch.equal(second.weight, two.weight)


def test_a_checkpoint_that_was_deleted_since_is_told(tmp_path: Path) -> None:
    path = saved(tmp_path)
    checkpoint = Checkpoint()
    checkpoint.restore(path).expect_partial()
    for file in tmp_path.iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with pytest.raises(NotFoundError, match=r"'v' was attached to a Checkpoint that was restored from .*deleted since"):
        checkpoint.v = variable()
    checkpoint.other = variable()


def test_a_restored_checkpoint_can_be_pickled(tmp_path: Path) -> None:
    checkpoint = Checkpoint(x=torch.zeros(2))
    checkpoint.restore(saved(tmp_path)).expect_partial()
    again = pickle.loads(pickle.dumps(checkpoint))
    again.v = torch.ones(())
    again.restore(saved(tmp_path)).expect_partial()
    assert float(again.v) == 1.0


def test_what_a_module_gets_later_is_its_own(tmp_path: Path) -> None:
    _, _, path = trained(tmp_path)
    made = torch.nn.Sequential(torch.nn.Linear(2, 3))
    Checkpoint(model=made).restore(path).expect_partial()
    made.append(torch.nn.BatchNorm1d(4))
    assert torch.equal(made[1].weight, torch.ones(4))


# ---- strategies ---------------------------------------------------------------------------------------------------


def strategies() -> list[Any]:
    return [
        td.OneDeviceStrategy("cpu"),
        td.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
        td.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
    ]


@pytest.mark.parametrize("number", range(3))
def test_every_replica_gets_it(tmp_path: Path, number: int) -> None:
    before, _, path = trained(tmp_path)
    strategy = strategies()[number]
    with strategy.scope():
        checkpoint, part = Checkpoint(), model()
        checkpoint.restore(path).expect_partial()
        checkpoint.model = part
    given = strategy.experimental_local_results(strategy.run(lambda: [p.detach().clone() for p in part.parameters()]))
    for replica in given if isinstance(given[0], list) else [given]:
        for one, other in zip(replica, before.parameters(), strict=True):
            assert torch.equal(one, other)


def test_variables_of_replicas(tmp_path: Path) -> None:
    path = Checkpoint(seen=variable(6.0)).save(tmp_path / "ckpt")
    strategy = td.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        checkpoint = Checkpoint()
        checkpoint.restore(path).expect_partial()
        checkpoint.seen = td.Variable(0.0, synchronization=READ, aggregation=SUM)
        assert [float(v) for v in strategy.experimental_local_results(checkpoint.seen)] == [3.0, 3.0]
        checkpoint.restore(path).expect_partial()
        with pytest.raises(RuntimeError, match="Attaching an object to a Checkpoint that was restored must be called"):
            strategy.run(lambda: setattr(fresh(path), "seen", checkpoint.seen))


def fresh(path: str) -> Checkpoint:
    checkpoint = Checkpoint()
    strategy = td.get_strategy()
    td.get_replica_context().merge_call(lambda _: checkpoint.restore(path).expect_partial())
    assert strategy is td.get_strategy()
    return checkpoint


@pytest.mark.distributed(workers=2, timeout=60, deadline=20)
def test_workers_attach_together(rank: int, shared_tmp_path: Path) -> None:
    strategy = td.MultiWorkerMirroredStrategy()
    with strategy.scope():
        before = torch.nn.Linear(2, 1)
        seen = td.Variable(3.0, synchronization=READ, aggregation=SUM)
        path = Checkpoint(model=before, seen=seen).save(shared_tmp_path / "ckpt")
        checkpoint = Checkpoint()
        status = checkpoint.restore(path)
        checkpoint.model = torch.nn.Linear(2, 1)
        checkpoint.seen = td.Variable(0.0, synchronization=READ, aggregation=SUM)
        status.assert_consumed()
        assert equal(checkpoint.model, before)
        assert float(checkpoint.seen.values[0]) == 3.0
        assert float(checkpoint.seen) == 6.0
