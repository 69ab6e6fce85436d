"""The facade of the recorded programs on tfstyle_dist; see README.md for what each member must do."""

from __future__ import annotations

import contextlib
import importlib
import sys
from pathlib import Path

import numpy as np
import torch

import tfstyle_dist as td
from tfstyle_dist.core.errors import InvalidArgumentError
from tfstyle_dist.parameter_server.client.remote_variables import ServerVariable, ShardedVariable
from tfstyle_dist.values import DistributedValues, Mirrored, PerReplica

sys.path.insert(0, str(Path(__file__).parent))
import keras_rules
import multi_worker
import tf_data

for _name in ("cloudpickle", "zmq"):  # of parameter servers; imported before the cases are forked, not in each of them
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)


def _dtype(name):
    """The torch dtype of a name of TensorFlow's; torch has the same names."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


class _Absent:
    """Stands for a public name that a later part of the package brings: using it fails the program that needs it."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, member):
        if member.startswith("_"):  # asked while it is unpickled on a worker, before it has attributes
            raise AttributeError(member)
        raise NotImplementedError(f"{self._name}.{member} is not there yet (docs/status.md)")

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self._name} is not there yet (docs/status.md)")


class _Namespace:
    """``tf.distribute`` as the programs see it."""

    def __init__(self, module, name):
        self._module, self._name = module, name

    def __getattr__(self, member):
        if member.startswith("_"):  # asked while it is unpickled on a worker, before it has attributes
            raise AttributeError(member)
        if member in ("experimental", "coordinator"):
            return _Namespace(getattr(self._module, member), f"{self._name}.{member}")
        found = getattr(self._module, member, None)
        return _Absent(f"{self._name}.{member}") if found is None else found


class Facade:
    """tfstyle_dist behind the members that the programs use."""

    dist = _Namespace(td, "tfstyle_dist")
    VariableSynchronization = td.VariableSynchronization
    VariableAggregation = td.VariableAggregation
    AggregationMethod = td.AggregationMethod
    AutoShardPolicy = td.AutoShardPolicy
    ClusterSpec = td.cluster_resolver.ClusterSpec

    # ---- strategies ----

    def device(self, i):
        return f"CPU:{i}"

    def strategy(self, kind="mirrored", n=1, **kw):
        if kind == "mirrored":
            return td.MirroredStrategy([self.device(i) for i in range(n)], **kw)
        if kind == "one_device":
            return td.OneDeviceStrategy(self.device(0), **kw)
        if kind == "central_storage":
            return td.experimental.CentralStorageStrategy([self.device(i) for i in range(n)], self.device(0), **kw)
        if kind == "multi_worker_local":
            return td.MultiWorkerMirroredStrategy(**kw)
        if kind == "default":
            return td.get_strategy()
        raise NotImplementedError(f"strategy kind {kind!r} is not there yet (docs/status.md)")

    def get_replica_id(self):
        return td.get_replica_context().replica_id_in_sync_group

    def fresh(self):
        pass

    # ---- tensors and variables ----

    def dtype(self, name):
        return str if name == "string" else _dtype(name)

    def dtype_name(self, t):
        return str(t.dtype).removeprefix("torch.")

    def constant(self, value, dtype="float32"):
        return torch.tensor(value, dtype=_dtype(dtype))

    def Variable(
        self,
        init,
        trainable=None,
        synchronization=td.VariableSynchronization.AUTO,
        aggregation=td.VariableAggregation.NONE,
        dtype="float32",
        name=None,
    ):
        if callable(init) and not isinstance(init, torch.Tensor):
            function = init
            value = lambda: torch.tensor(function(), dtype=_dtype(dtype))  # noqa: E731
        elif isinstance(init, torch.Tensor):
            value = init
        else:
            value = torch.tensor(init, dtype=_dtype(dtype))
        return td.Variable(
            value, trainable=trainable, name=name, synchronization=synchronization, aggregation=aggregation
        )

    def to_list(self, t):
        if hasattr(t, "read_value"):
            t = t.read_value()
        if isinstance(t, np.ndarray | np.generic):
            return t.tolist()
        return t.detach().tolist() if isinstance(t, torch.Tensor) else t

    def read(self, v):
        return v * 1 if isinstance(v, torch.Tensor) else torch.as_tensor(v)

    def type_tag(self, v):
        if isinstance(v, ShardedVariable):
            return "sharded_variable"
        if isinstance(v, td.Variable) or hasattr(v, "read_value"):
            return "variable"
        if isinstance(v, Mirrored):
            return "Mirrored"
        if isinstance(v, PerReplica | DistributedValues):
            return "PerReplica"
        if isinstance(v, torch.Tensor):
            return "slices" if v.is_sparse else "tensor"
        return "python"

    def shape(self, t):
        return list(t.shape)

    def sum(self, t, axis=None):
        return torch.sum(t) if axis is None else torch.sum(t, dim=axis)

    def mean(self, t, axis=None):
        return torch.mean(t) if axis is None else torch.mean(t, dim=axis)

    def square(self, t):
        return torch.square(t)

    def sqrt(self, t):
        return torch.sqrt(t)

    def matmul(self, a, b):
        return torch.matmul(a, b)

    def gather_rows(self, t, indices):
        return t[torch.tensor(indices)]

    def identity(self, t):
        return t * 1

    def stop_gradient(self, t):
        return t.detach()

    # ---- autodiff and training ----

    def value_and_grad(self, loss_fn, variables):
        loss = loss_fn()
        return loss.detach(), td.train.gradients(loss, list(variables))

    def gradients(self, build, inputs, dtype="float32", grad_ys=None, **kw):
        tensors = [torch.tensor(i, dtype=_dtype(dtype), requires_grad=True) for i in inputs]
        ys, xs = build(tensors)
        if grad_ys is not None:
            grad_ys = [None if g is None else torch.tensor(g, dtype=_dtype(dtype)) for g in grad_ys]
        found = td.train.gradients(ys, xs, grad_ys=grad_ys, **kw)
        return [None if g is None else g.tolist() for g in found]

    def compute_average_loss(self, per_example_loss, sample_weight=None, global_batch_size=None):
        return td.nn.compute_average_loss(per_example_loss, sample_weight, global_batch_size)

    def scale_regularization_loss(self, loss):
        return td.nn.scale_regularization_loss(loss)

    def optimizer(self, kind, **hp):
        rate = hp.pop("lr")
        makers = {
            **keras_rules.MAKERS,
            "v1_sgd": td.train.GradientDescentOptimizer,
            "v1_momentum": td.train.MomentumOptimizer,
            "v1_adam": td.train.AdamOptimizer,
        }
        return makers[kind](rate, **hp)

    # ---- datasets ----

    def dataset_from_list(self, data, dtype="float32"):
        return tf_data.Dataset(tf_data.Slices(data, _dtype(dtype)))

    def dataset_range(self, n):
        return tf_data.Dataset(tf_data.Slices(list(range(n)), torch.int64))

    def dataset_from_text_files(self, paths):
        return tf_data.Dataset(td.input.FileDataset(paths))

    def auto_shard(self, dataset, num_workers, index, policy):
        return tf_data.auto_shard(dataset, num_workers, index, policy)

    def raw(self, dataset):
        return dataset

    def wrap_fn(self, fn):
        return fn

    # ---- checkpoints ----

    def checkpoint_save(self, path, **variables):
        return td.train.Checkpoint(**variables).save(path)

    def checkpoint_restore(self, path, **variables):
        td.train.Checkpoint(**variables).restore(path).assert_consumed()

    def Checkpoint(self, **variables):
        return td.train.Checkpoint(**variables)

    def CheckpointManager(self, checkpoint, directory, max_to_keep):
        return td.train.CheckpointManager(checkpoint, directory, max_to_keep=max_to_keep)

    # ---- clusters ----

    def multi_worker(self, n, fn, timeout=90, **params):
        return multi_worker.run(self, n, fn, timeout, params)

    # ---- partitioners ----

    def tensor_shape(self, dims):
        return tuple(dims)

    # ---- parameter servers ----

    def ps_cluster(self, num_workers, num_ps, partitioner=None):
        from ps_cluster import Cluster

        return Cluster(num_workers, num_ps, partitioner)

    def ps_index(self, v):
        return v.server_index if isinstance(v, ServerVariable) else -1

    def spin(self, n):
        x = 0.0
        for _ in range(n):
            x += 1.0
        return torch.tensor(x)

    # ---- misc ----

    def function(self, fn):
        return fn

    def check(self, condition, message):
        if not bool(condition):
            raise InvalidArgumentError(message)

    def next_of(self, iterator):
        return next(iterator)


def make():
    torch.set_num_threads(1)  # a child forked after a parallel op hangs on its own next one
    return Facade()
