"""TensorFlow's names outside of ``tf.distribute``: devices, printing, options, writes to single places."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

import tfstyle_dist as tf

TWO = ["cpu:0", "cpu:1"]


# ---- devices -----------------------------------------------------------------------------------------------


@pytest.fixture
def cpu() -> Iterator[Any]:
    """The CPU, which is one logical device again afterwards."""
    device = tf.config.list_physical_devices("CPU")[0]
    yield device
    tf.config.set_logical_device_configuration(device, None)


def test_devices_are_listed(cpu: Any) -> None:
    assert cpu == tf.config.PhysicalDevice("/physical_device:CPU:0", "CPU")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    assert len(tf.config.experimental.list_physical_devices("GPU")) == count
    assert tf.config.list_physical_devices()[0] == cpu
    assert tf.config.list_physical_devices("BOAT") == []


def test_memory_grows_whatever_is_said(cpu: Any) -> None:
    for enable in (True, False):
        tf.config.experimental.set_memory_growth(cpu, enable)
        assert tf.config.experimental.get_memory_growth(cpu)
    gone = tf.config.PhysicalDevice("/physical_device:GPU:77", "GPU")
    with pytest.raises(ValueError, match=r"Unrecognized device: .*GPU:77"):
        tf.config.experimental.set_memory_growth(gone, True)


def test_logical_cpus_are_the_devices_of_replicas(cpu: Any) -> None:
    assert tf.config.get_logical_device_configuration(cpu) is None
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 3)
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    assert names == ["/device:CPU:0", "/device:CPU:1", "/device:CPU:2"]
    for given in (names, tf.config.list_logical_devices("CPU")):
        with tf.distribute.MirroredStrategy(given) as strategy:
            assert strategy.extended.worker_devices == ("cpu:0", "cpu:1", "cpu:2")
    with tf.distribute.OneDeviceStrategy(tf.config.list_logical_devices("CPU")[1]) as one:
        assert one.extended.worker_devices == ("cpu:1",)
    assert tf.config.get_logical_device_configuration(cpu) == [(None, None, None)] * 3


def test_logical_gpus_are_slots_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfstyle_dist.core import devices

    monkeypatch.setattr(devices, "count_devices", lambda kind: 2 if kind == "cuda" else 0)
    gpu = tf.config.list_physical_devices("GPU")[1]
    try:
        tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration()] * 2)
        names = [device.name for device in tf.config.list_logical_devices("GPU")]
        assert names == ["/device:GPU:0", "/device:GPU:1", "/device:GPU:1#1"]
        found = devices.find_local_devices()
        assert [str(device) for device in found] == ["cuda:0", "cuda:1", "cuda:1#1"]
        assert tuple(devices.parse(name) for name in names) == found
    finally:
        tf.config.set_logical_device_configuration(gpu, None)
    assert len(devices.find_local_devices()) == 2


def test_gpus_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfstyle_dist.core import devices

    monkeypatch.setattr(devices, "count_devices", lambda kind: 2 if kind == "cuda" else 0)
    gpus = tf.config.list_physical_devices("GPU")
    try:
        tf.config.set_logical_device_configuration(gpus[1], [tf.config.LogicalDeviceConfiguration()] * 2)
        tf.config.set_visible_devices(gpus[1], "GPU")
        assert tf.config.get_visible_devices("GPU") == gpus[1:]
        assert [device.name for device in tf.config.list_logical_devices("GPU")] == ["/device:GPU:1", "/device:GPU:1#1"]
        assert [str(device) for device in devices.find_local_devices()] == ["cuda:1", "cuda:1#1"]
        tf.config.set_visible_devices([], "GPU")
        assert tf.config.list_logical_devices("GPU") == []
        assert [str(device) for device in devices.find_local_devices()] == ["cpu:0"]
        with pytest.raises(ValueError, match=r"Unrecognized device: .*CPU:0.* of the type 'GPU'. Give devices that"):
            tf.config.set_visible_devices(tf.config.list_physical_devices("CPU"), "GPU")
        assert tf.config.get_visible_devices() == tf.config.list_physical_devices("CPU")
    finally:
        tf.config.set_logical_device_configuration(gpus[1], None)
        tf.config.set_visible_devices(tf.config.list_physical_devices())
    assert len(devices.find_local_devices()) == 2


def test_the_cpu_is_there_whatever_is_said(cpu: Any) -> None:
    """In TensorFlow the logical ones raise NotFoundError then."""
    try:
        tf.config.set_visible_devices([], "CPU")
        assert tf.config.get_visible_devices() == tf.config.list_physical_devices("GPU")
        assert [device.name for device in tf.config.list_logical_devices("CPU")] == ["/device:CPU:0"]
        with pytest.raises(ValueError, match=r"Unrecognized device: 'cpu:0'; this process sees"):
            tf.config.set_visible_devices("cpu:0")
    finally:
        tf.config.set_visible_devices(cpu, "CPU")


def test_settings_that_torch_has_no_need_of_are_kept() -> None:
    assert (tf.config.get_soft_device_placement(), tf.config.functions_run_eagerly()) == (True, False)
    try:
        tf.config.set_soft_device_placement(False)
        tf.config.run_functions_eagerly(True)
        for setter in (tf.config.set_soft_device_placement, tf.config.run_functions_eagerly):
            with pytest.raises(TypeError, match="takes True or False, got 'False'"):
                setter("False")  # type: ignore[arg-type]
        assert (tf.config.get_soft_device_placement(), tf.config.functions_run_eagerly()) == (False, True)
    finally:
        tf.config.set_soft_device_placement(True)
        tf.config.run_functions_eagerly(False)
    assert issubclass(tf.errors.AbortedError, RuntimeError)


def test_older_names_of_settings() -> None:
    assert tf.config.experimental.set_visible_devices is tf.config.set_visible_devices
    assert tf.config.experimental.get_visible_devices is tf.config.get_visible_devices
    assert tf.config.experimental_run_functions_eagerly is tf.config.run_functions_eagerly
    assert tf.config.experimental_functions_run_eagerly is tf.config.functions_run_eagerly


@pytest.mark.parametrize(
    "line",
    ["data.Dataset", "data.AUTOTUNE", "data.experimental.AUTOTUNE", "train.ExponentialMovingAverage",
     "config.threading", "config.experimental.enable_op_determinism", "compat.v1.logging",
     "tpu.experimental.embedding"],
)  # fmt: skip
def test_what_distributes_nothing_is_looked_for_in_pytorch(line: str) -> None:
    module, name = f"tf.{line}".rsplit(".", 1)
    with pytest.raises(AttributeError, match=f"no attribute '{name}': .*datasets are those of PyTorch.*migrating"):
        getattr(eval(module), name)


def test_devices_that_cannot_be_divided_so(cpu: Any) -> None:
    with pytest.raises(ValueError, match=r"Unrecognized device: .*GPU:77.*sees \['/physical_device:CPU:0'"):
        tf.config.set_logical_device_configuration(tf.config.PhysicalDevice("/physical_device:GPU:77", "GPU"), None)
    with pytest.raises(ValueError, match="memory limit on CPU"):
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration(memory_limit=10)])
    with pytest.raises(ValueError, match="is empty; give one LogicalDeviceConfiguration"):
        tf.config.set_logical_device_configuration(cpu, [])


@pytest.mark.parametrize("given", [2, [1, 2], tf.config.LogicalDeviceConfiguration(), "cpu"])
def test_what_is_no_list_of_configurations(cpu: Any, given: Any) -> None:
    with pytest.raises(TypeError, match=r"must be a list of LogicalDeviceConfiguration, got .* write \[Log.*\] \* 2"):
        tf.config.set_logical_device_configuration(cpu, given)


def test_connecting_to_a_cluster_checks_its_description() -> None:
    spec = tf.train.ClusterSpec({"worker": ["a:1"]})
    tf.config.experimental_connect_to_cluster(spec)
    tf.config.experimental_connect_to_cluster(tf.distribute.cluster_resolver.SimpleClusterResolver(spec))
    with pytest.raises(ValueError, match="must be a `ClusterSpec` or a `ClusterResolver`, got dict"):
        tf.config.experimental_connect_to_cluster({"worker": ["a:1"]})  # type: ignore[arg-type]


def test_the_tpu_system_needs_torch_xla() -> None:
    with pytest.raises(TypeError, match="must be a ClusterResolver"):
        tf.tpu.experimental.initialize_tpu_system("tpu")  # type: ignore[arg-type]
    try:
        import torch_xla  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match="torch_xla, which is not installed"):
            tf.tpu.experimental.initialize_tpu_system()


# ---- functions ---------------------------------------------------------------------------------------------


def test_a_function_stays_what_it_is() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    assert tf.function(double) is double
    assert tf.function(jit_compile=True)(double) is double
    with pytest.raises(TypeError, match="takes something that can be called, got int"):
        tf.function(3)  # type: ignore[arg-type]


def test_print_writes_as_tensorflow_does(capsys: pytest.CaptureFixture[str]) -> None:
    tf.print("step", torch.tensor(1.0), torch.tensor([1, 2, 3]), torch.tensor([0.5, 2.25]), {"loss": torch.tensor(0.1)})
    assert capsys.readouterr() == ("", "step 1 [1 2 3] [0.5 2.25] {'loss': 0.1}\n")
    tf.print(torch.arange(8), tf.Variable(2.0), output_stream=sys.stdout, sep="|", end="")
    assert capsys.readouterr() == ("[0 1 2 ... 5 6 7]|2", "")
    stream = io.StringIO()
    tf.print(torch.eye(2), torch.arange(8), torch.tensor(True), output_stream=stream, summarize=-1)
    assert stream.getvalue() == "[[1 0]\n [0 1]] [0 1 2 3 4 5 6 7] 1\n"
    with pytest.raises(TypeError, match=r"must be an open text file such as sys\.stdout, got 'file'"):
        tf.print(1, output_stream="file")  # type: ignore[arg-type]


def test_what_print_cannot_summarize() -> None:
    with pytest.raises(TypeError, match="summarize must be a whole number, got 'a'; -1 writes all entries"):
        tf.print(torch.arange(3), summarize="a")


def test_an_import_of_everything_leaves_print_alone() -> None:
    names: dict[str, Any] = {}
    exec("from tfstyle_dist import *\nassert print is __builtins__['print']", names)
    assert names["MirroredStrategy"] is tf.MirroredStrategy


# ---- data --------------------------------------------------------------------------------------------------


class Stream(IterableDataset[Any]):
    """Of unknown length."""

    def __iter__(self) -> Iterator[Any]:
        yield from torch.arange(8.0)


def test_cardinality() -> None:
    with tf.MirroredStrategy(TWO) as strategy:
        loader = DataLoader(range(10), batch_size=4)  # type: ignore[arg-type]
        assert strategy.experimental_distribute_dataset(loader).cardinality == 3
        stream = DataLoader(Stream(), batch_size=4)
        assert strategy.experimental_distribute_dataset(stream).cardinality == -2
        dealt = strategy.distribute_datasets_from_function(lambda context: DataLoader(range(10), batch_size=2))  # type: ignore[arg-type]
        assert (dealt.cardinality, len(dealt)) == (5, 3)  # batches of one replica, and steps of both


def test_distribute_options() -> None:
    options = tf.data.experimental.DistributeOptions()
    assert options == tf.data.experimental.DistributeOptions()
    options.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    assert options != tf.data.experimental.DistributeOptions()
    with tf.MirroredStrategy(TWO) as strategy:
        distributed = strategy.experimental_distribute_dataset([torch.arange(4)], auto_shard_policy=options)
        assert distributed.shard_report().policy is tf.AutoShardPolicy.OFF


def test_a_dataset_of_arrays() -> None:
    images, labels = torch.arange(12.0).reshape(6, 2), torch.arange(6)
    with tf.MirroredStrategy(TWO) as strategy:
        dataset = strategy.experimental_make_numpy_dataset({"x": images.numpy(), "y": labels.numpy()})
        batches = strategy.experimental_distribute_dataset(dataset, global_batch_size=4)
        seen = [[v.tolist() for v in strategy.experimental_local_results(batch["y"])] for batch in batches]
        assert seen == [[[0, 1], [2, 3]], [[4], [5]]]
        with pytest.raises(ValueError, match=r"must have one length.*got shapes \[\(2,\), \(3,\)\]"):
            strategy.experimental_make_numpy_dataset((torch.ones(2), torch.ones(3)))


# ---- variables ---------------------------------------------------------------------------------------------


def test_writes_to_single_places() -> None:
    variable = tf.Variable(torch.zeros(2, 3))
    assert variable.scatter_nd_add([[0, 1], [0, 1], [1, 2]], [1.0, 2.0, 3.0]) is variable
    assert variable.tolist() == [[0, 3, 0], [0, 0, 3]]
    variable.scatter_nd_sub([[1]], torch.tensor([[1.0, 1.0, 1.0]]))
    assert variable.tolist() == [[0, 3, 0], [-1, -1, 2]]
    variable.scatter_nd_update([[[0, 0]], [[1, 1]]], [[7.0], [8.0]])
    assert variable.tolist() == [[7, 3, 0], [-1, 8, 2]]
    for indices, updates in (
        ([[0, 3]], [1.0]),
        ([[0, 0]], [1.0, 2.0]),
        ([[0, 0, 0]], [1.0]),
        ([[0]], torch.ones(1, 3).int()),
    ):
        with pytest.raises(ValueError, match="scatter_nd_add"):
            variable.scatter_nd_add(indices, updates)


@pytest.mark.parametrize(("aggregation", "total"), [("SUM", 3.0), ("MEAN", 1.5), ("ONLY_FIRST_REPLICA", 1.0)])
def test_writes_of_replicas_to_single_places_combine(aggregation: str, total: float) -> None:
    with tf.MirroredStrategy(TWO) as strategy:
        with strategy.scope():
            variable = tf.Variable(torch.zeros(2, 2), aggregation=tf.VariableAggregation[aggregation])

        def step() -> None:
            context = tf.get_replica_context()
            assert context is not None
            variable.scatter_nd_add([[1, 0]], [1.0 + context.replica_id_in_sync_group])

        strategy.run(step)
        for copy in strategy.experimental_local_results(variable):
            assert copy.tolist() == [[0, 0], [total, 0]]
        assert variable.is_distributed_variable


def test_partitioners_of_tensorflow_1() -> None:
    v1 = tf.compat.v1
    assert v1.fixed_size_partitioner(3, axis=1)([4, 2], torch.float32) == [1, 2]
    assert v1.min_max_variable_partitioner(8, min_slice_size=16)([8, 1], torch.float32) == [2, 1]
    assert v1.variable_axis_size_partitioner(8, max_shards=3)([8, 1], torch.float32) == [3, 1]
    assert v1.distribute.get_loss_reduction() is tf.distribute.ReduceOp.SUM
