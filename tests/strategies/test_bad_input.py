"""What a user gets wrong, and what the error says about it: what was given, why not, and what to write."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tfstyle_dist as td
from tfstyle_dist.core import logging
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.values import PerReplica

# ---- devices -----------------------------------------------------------------------------------------------


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
@pytest.mark.parametrize(
    ("devices", "error", "message"),
    [
        (["tpu9:0"], ValueError, r"Unknown device 'tpu9:0'. Write 'cpu:0', 'cuda:1'"),
        (["cpu:zero"], ValueError, "Unknown device 'cpu:zero'"),
        ([""], ValueError, "Unknown device ''"),
        (["gpu:*"], ValueError, r"Unknown device 'gpu:\*'"),
        (["cpu:0", "cpu:0"], ValueError, r"must be unique, but cpu:0 is given more than once.*write e.g."),
        (["cpu:0", "/device:CPU:0"], ValueError, "cpu:0 is given more than once"),
        (["cpu:0", "meta:0"], ValueError, r"all be on one kind of device, got \['cpu', 'meta'\]"),
        (
            ["xla:0"],
            ValueError,
            "Device xla:0 is not supported by this strategy; use the CPU or an accelera",
        ),
        ("cpu:0", ValueError, r"must be a sequence of devices, got 'cpu:0'; write \['cpu:0'\]"),
        (torch.device("cpu"), ValueError, r"must be a sequence of devices.*write \['cpu'\]"),
        # A sequence of texts itself: it was two devices, its own and the first one of its kind.
        (
            td.config.LogicalDevice("/device:CPU:1", "CPU"),
            ValueError,
            r"got LogicalDevice\(name='/device:CPU:1', device_type='CPU'\); write \['/device:CPU:1'\]",
        ),
        ([], ValueError, "devices is empty: give at least one device, or leave devices=None"),
        ([3], (TypeError, ValueError), "3"),
    ],
)
def test_devices(devices: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        td.MirroredStrategy(devices)


def test_absent_device() -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    with pytest.raises(ValueError, match=f"Device cuda:{count} was asked for, but this process sees {count} CUDA"):
        td.MirroredStrategy([f"/gpu:{count}"])
    with pytest.raises(ValueError, match=f"Device cuda:{count} was asked for"):
        td.OneDeviceStrategy(f"cuda:{count}")


@pytest.mark.cpu_only("it names devices of the CPU in what it expects")
def test_mixed_kinds_are_refused_before_their_presence_is_checked() -> None:
    with pytest.raises(ValueError, match=r"all be on one kind of device, got \['cpu', 'cuda'\]"):
        td.MirroredStrategy(["cpu:0", "cuda:0"])


@pytest.mark.parametrize("ops", ["nccl", td.ReductionToOneDevice, 1])
def test_cross_device_ops(ops: Any) -> None:
    with pytest.raises(TypeError, match=r"must be an instance of CrossDeviceOps, e.g. ReductionToOneDevice\(\), got"):
        td.MirroredStrategy(["cpu:0"], cross_device_ops=ops)


def test_run_replicas(caplog: pytest.LogCaptureFixture) -> None:
    logging._said.discard("run_replicas")
    for value in ("threads", "serial", "threads"):
        td.MirroredStrategy(["cpu:0", "cpu:1"], run_replicas=value).close()
    assert caplog.text.count("has no effect any more: the replicas of one process take turns") == 1


def test_timeout_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, message in [("soon", "is not a number of seconds"), ("-1", "is negative")]:
        monkeypatch.setenv("TFSTYLE_TIMEOUT_SECONDS", text)
        with pytest.raises(ValueError, match=f"TFSTYLE_TIMEOUT_SECONDS='{text}' {message}"):
            td.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("rank", "world", "message"),
    [("2", "2", "RANK=2 does not fit WORLD_SIZE=2"), ("x", "2", "RANK='x' is not a whole number")],
)
def test_launcher_variables(monkeypatch: pytest.MonkeyPatch, rank: str, world: str, message: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=message):
        td.MirroredStrategy(["cpu:0"])


# ---- run ---------------------------------------------------------------------------------------------------


def test_args_of_run(two: Any) -> None:
    with pytest.raises(ValueError, match=r"args of run must be a list or tuple, got Tensor; write args=\(value,\)"):
        two.run(lambda x: x, args=torch.ones(1))
    with pytest.raises(ValueError, match="kwargs of run must be a dict, got list"):
        two.run(lambda x: x, kwargs=[1])
    with pytest.raises(TypeError, match="run takes a callable, got int: 3"):
        two.run(3)


@pytest.mark.parametrize("call", ["merge_call", "extended.update", "extended.update_non_slot"])
def test_args_of_what_calls_a_function(two: Any, call: str) -> None:
    with two.scope():
        variable = td.Variable(1.0)

    def calling(fn: Any, **given: Any) -> None:
        if call == "merge_call":
            two.run(lambda: td.get_replica_context().merge_call(fn, **given))  # type: ignore[union-attr]
        else:
            getattr(two.extended, call.partition(".")[2])(variable, fn, **given)

    for value in (torch.ones(1), "a", 5.0, {"x": 1}):
        with pytest.raises(
            ValueError, match=rf"args of {call} must be a list or tuple, got \w+; write args=\(value,\)"
        ):
            calling(lambda *given: None, args=value)
    with pytest.raises(ValueError, match=f"kwargs of {call} must be a dict, got list"):
        calling(lambda *given: None, kwargs=[1])
    with pytest.raises(TypeError, match=f"{call} takes a callable, got int: 3"):
        calling(3)


def test_values_of_no_function(two: Any) -> None:
    with pytest.raises(TypeError, match=r"takes a function of a ValueContext, got 3; write e.g. lambda context"):
        two.experimental_distribute_values_from_function(3)


def test_return_values_of_different_structure(two: Any) -> None:
    def fn() -> Any:
        replica = td.get_replica_context()
        assert replica is not None
        return (1, 2) if replica.replica_id_in_sync_group else {"a": 1}

    with pytest.raises(
        AssertionError, match=r"(?s)replica 0 gave .* replica 1 gave .* Make every replica return the same"
    ):
        two.run(fn)


# ---- contexts ----------------------------------------------------------------------------------------------


def enter_another_scope() -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as another, another.scope():
        pass


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda s: s.run(lambda: None), "run was called in replica context.*inside merge_call"),
        (lambda s: s.scope().__enter__(), r"scope\(\) was entered in replica context.*use merge_call"),
        (
            lambda s: s.reduce("SUM", 1, axis=None),
            "Strategy.reduce must be called in cross-replica.*merge_call",
        ),
        (
            lambda s: s.gather(torch.ones(1), axis=0),
            "Strategy.gather must be called in cross-.*Use ReplicaContext.all_gather",
        ),
        (
            lambda s: s.extended.reduce_to("SUM", 1, "cpu:0"),
            "reduce_to must be called in cross-replica.*merge_call",
        ),
        (
            lambda s: td.experimental_set_strategy(s),
            "experimental_set_strategy was called in replica context",
        ),
        (lambda s: enter_another_scope(), "Mixing different"),
    ],
)
def test_cross_replica_calls_in_replica_context(two: Any, call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        two.run(lambda: call(two))


def test_replica_calls_inside_merge_call(two: Any) -> None:
    def fn() -> None:
        replica = td.get_replica_context()
        assert replica is not None
        replica.merge_call(lambda strategy: replica.all_reduce("SUM", torch.ones(1)))

    with pytest.raises(RuntimeError, match="all_reduce needs replica context, but this is cross-replica context"):
        two.run(fn)


def test_stale_replica_context(two: Any) -> None:
    kept: list[Any] = []
    two.run(lambda: kept.append(td.get_replica_context()))
    with pytest.raises(
        RuntimeError, match="Mismatching ReplicaContext: merge_call was called on the context of replica"
    ):
        kept[0].merge_call(lambda strategy: None)


def test_two_strategies(two: Any) -> None:
    with td.MirroredStrategy(["cpu:0", "cpu:1"]) as other, two.scope():
        with pytest.raises(RuntimeError, match=r"Mixing different tf.distribute strategies: run of"):
            other.run(lambda: None)
        with pytest.raises(RuntimeError, match=r"Mixing different tf.distribute strategies: scope\(\) of"):
            other.scope().__enter__()


# ---- values ------------------------------------------------------------------------------------------------


def test_per_replica_is_no_value() -> None:
    value = PerReplica((torch.tensor(1.0), torch.tensor(2.0)))
    holds = "it holds one value for each of 2 local replicas."
    with pytest.raises(TypeError, match=rf"not iterable: {holds} Use strategy.experimental_local_results\(value\)"):
        list(value)
    with pytest.raises(TypeError, match=rf"no length: {holds} Write len\(strategy.experimental_local_results\(value"):
        len(value)
    with pytest.raises(TypeError, match=r"no truth value: it holds one value for each replica. Use"):
        bool(value)


def test_reduce(two: Any) -> None:
    value = PerReplica((torch.ones(2), torch.ones(2)))
    with pytest.raises(ValueError, match=r"must be a valid ReduceOp \(.*'SUM' or 'MEAN'\), got 'MAX'"):
        two.reduce("MAX", value, axis=None)
    with pytest.raises(ValueError, match="axis 1 is out of range for a per-replica value of rank 1"):
        two.reduce("SUM", value, axis=1)
    with pytest.raises(ValueError, match="cannot be reduced with SUM: it is not a per-replica value"):
        two.reduce("SUM", 3.0, axis=None)
    with pytest.raises(InvalidArgumentError, match="shape"):
        two.reduce("SUM", PerReplica((torch.ones(2), torch.ones(3))), axis=None)
    with pytest.raises(ValueError, match="None cannot be reduced with MEAN"):
        two.reduce("MEAN", None, axis=None)


def test_all_reduce_of_no_tensor(two: Any) -> None:
    def fn(value: Any) -> None:
        replica = td.get_replica_context()
        assert replica is not None
        replica.all_reduce("SUM", value)

    for value in (None, 3):
        with pytest.raises(ValueError, match=r"all_reduce: a leaf of type .* cannot be reduced.*Pass torch.tensor"):
            two.run(fn, args=(value,))


def test_all_gather(two: Any) -> None:
    def fn(value: torch.Tensor, axis: Any) -> None:
        replica = td.get_replica_context()
        assert replica is not None
        replica.all_gather(value, axis)

    with pytest.raises(InvalidArgumentError, match=r"axis -1 does not fit .*negative axes are not accepted"):
        two.run(fn, args=(torch.ones(2), -1))
    with pytest.raises(InvalidArgumentError, match=r"a scalar needs value.reshape"):
        two.run(fn, args=(torch.tensor(1.0), 0))
    two.run(fn, args=(torch.ones(2), np.int64(0)))
    with pytest.raises(ValueError, match=r"axis must be a whole number from 0 on, got 1.5; write"):
        two.run(fn, args=(torch.ones(2), 1.5))
    uneven = PerReplica((torch.ones(2, 2), torch.ones(2, 3)))
    with pytest.raises(InvalidArgumentError, match=r"shape \[2, 3\].*differ along that axis only"):
        two.run(fn, args=(uneven, 0))


def test_replicas_that_create_different_variables(two: Any) -> None:
    def make(*names: str) -> list[td.Variable]:
        return [td.Variable(float(place), name=name) for place, name in enumerate(names)]

    def of_replica(first: Any, second: Any) -> Any:
        replica = td.get_replica_context()
        assert replica is not None
        return make(*(second if replica.replica_id_in_sync_group else first))

    message = "variable 'b' with mismatching name on replica 1, while replica 0 creates 'a': .* in the same order"
    for first, second in ((["a", "b"], ["b", "a"]), (["a"], ["b"]), (["a"], ["b/a"]), (["a_x"], ["a"])):
        with pytest.raises(RuntimeError, match=message if second[0] == "b" else "with mismatching name on replica 1"):
            two.run(of_replica, args=(first, second))
    with pytest.raises(RuntimeError, match="create variable None with mismatching name"):
        two.run(of_replica, args=(["a"], [None]))
    numbered = two.run(of_replica, args=(["block_0/kernel", "w_0"], ["block_1/kernel", "w_1"]))
    assert [variable.name for variable in numbered] == ["block_0/kernel", "w_0"], "as TensorFlow names them"


@pytest.mark.parametrize("op", [td.HierarchicalCopyAllReduce, td.NcclAllReduce])
@pytest.mark.parametrize("packs", [1.5, "2", None])
def test_packs(op: Any, packs: Any) -> None:
    with pytest.raises(TypeError, match=r"num_packs must be a whole number, got .*; write e.g. num_packs=1"):
        op(num_packs=packs)


@pytest.mark.parametrize("function", [3, "add"])
def test_an_accumulation_that_is_no_function(function: Any) -> None:
    with pytest.raises(TypeError, match=r"accumulation_fn must be a function that takes a list .* got .*; write e.g."):
        td.ReductionToOneDevice(accumulation_fn=function)


@pytest.mark.parametrize("strategy", [td.MirroredStrategy, td.MultiWorkerMirroredStrategy])
@pytest.mark.parametrize("options", [3, "ring", {"timeout_seconds": 3}, td.CrossDeviceOps()])
def test_communication_options(strategy: Any, options: Any) -> None:
    with pytest.raises(TypeError, match=r"must be CommunicationOptions, got .*; write e.g. communication_options=exp"):
        strategy(communication_options=options)


def test_what_is_no_strategy_is_not_set() -> None:
    with pytest.raises(TypeError, match=r"takes a strategy, or None to clear it, got 3; write e.g."):
        td.experimental_set_strategy(3)  # type: ignore[arg-type]
    assert not td.has_strategy()
    td.experimental_set_strategy(None)


def test_a_scope_that_was_not_entered_is_not_left(two: Any) -> None:
    entered, other = two.scope(), two.scope()
    with entered, pytest.raises(RuntimeError, match=r"was not entered.*Write `with strategy.scope"):
        other.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="was not entered"):
        entered.__exit__(None, None, None)
    assert not td.has_strategy()
