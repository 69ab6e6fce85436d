"""``tf.distribute.ParameterServerStrategy``: variables on server tasks, workers that do not wait for each other."""

from __future__ import annotations

import itertools
import os
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tfstyle_dist.cluster_resolver import TFConfigClusterResolver
from tfstyle_dist.comm.single_group import SingleGroup
from tfstyle_dist.core import devices as device_names, env, launch_env
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.core.process_hooks import install_for
from tfstyle_dist.gradients.step_hooks import step_hooks
from tfstyle_dist.parameter_server.addresses import check_cluster, cluster_of
from tfstyle_dist.parameter_server.client.partitioning import checked_partitioner
from tfstyle_dist.parameter_server.client.push import Servers
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.client.remote_store import RemoteStore
from tfstyle_dist.parameter_server.protocol import pickling
from tfstyle_dist.parameter_server.server.optimizer_rules import optimizer_state
from tfstyle_dist.runtime.worker import Worker
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.parameter_server.checked_options import checked_staleness, snapshot_options, wire_options
from tfstyle_dist.strategies.parameter_server.extended_on_servers import ExtendedOnServers, warned_on_the_chief
from tfstyle_dist.strategies.parameter_server.optimizer_settings import changes, hyperparameters, references_of
from tfstyle_dist.strategies.parameter_server.optimizer_state import keep_on_servers
from tfstyle_dist.strategies.parameter_server.push_runner import PushRunner, check_hooks, check_parameters
from tfstyle_dist.variables import Variable
from tfstyle_dist.variables.creation import VariableSpec

if TYPE_CHECKING:
    from tfstyle_dist.parameter_server.local_cluster import LocalCluster


class ParameterServerStrategy(Strategy):
    """Asynchronous training with parameter servers.

    Variables and the parameters of modules built in ``scope()`` live on the ps tasks, in turn. Functions given to
    ``coordinator.ClusterCoordinator.schedule`` run on the worker tasks; there parameters are pulled before the function
    starts, and ``optimizer.step()`` or ``apply_gradients`` sends gradients to the servers, which apply the optimizer.

    Make it in the chief's program, after every worker and ps task has started ``Server(...).join()``.

    Args:
        cluster_resolver: its ``cluster_spec()`` names the addresses of the jobs ``worker`` and ``ps`` (and ``chief``);
            default: what ``TF_CONFIG`` says; without it 2 workers and 1 ps task are started on this machine, and end
            with the strategy (``Server.local_cluster`` starts others).
        variable_partitioner: into how many shards a variable is cut, e.g.
            ``experimental.partitioners.MinSizePartitioner()``; ``None``: one.
        max_staleness: how many other functions' updates may come between the moment a function pulls parameters and
            the end of its own; 0: one function at a time, as in plain training; ``None``: any number.
        wire_dtype: ``torch.bfloat16``: float32 parameters of modules and their gradients travel with 16 bits between
            hosts; the servers keep and update float32. ``None``: as they are.
        pull_ahead: a worker asks for the parameters of its next function while it computes one: it does not wait for
            them, and they lack what the function before it has changed. Counts in ``max_staleness``.
        snapshot_folder: where each server writes snapshots for itself, so that one that is killed and started again
            goes on from there; a folder for this job alone, on the servers' own disks or on a shared one.
        snapshot_seconds: time between two snapshots.
        snapshot_every_write: also keep every write that comes between two snapshots, before it is answered: then a
            killed server loses none. Costs a copy of each write into a file.

    Raises:
        ValueError: a cluster without workers or ps tasks, with several chiefs or with an unknown job; a negative
            ``max_staleness``, a ``snapshot_seconds`` that is not above 0, another ``wire_dtype``.
        ImportError: pyzmq or cloudpickle is missing.

    Example:
        >>> strategy = ParameterServerStrategy(cluster_resolver.TFConfigClusterResolver())
        >>> coordinator = ClusterCoordinator(strategy)
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)

    Source: ``tf.distribute.ParameterServerStrategy``.
    """

    _own_cluster: LocalCluster | None = None
    run, reduce = warned_on_the_chief(Strategy.run), warned_on_the_chief(Strategy.reduce)

    def __init__(
        self,
        cluster_resolver: Any = None,
        variable_partitioner: Callable[..., Sequence[int]] | None = None,
        *,
        max_staleness: int | None = None,
        wire_dtype: torch.dtype | None = None,
        pull_ahead: bool = False,
        snapshot_folder: str | os.PathLike[str] | None = None,
        snapshot_seconds: float = 60.0,
        snapshot_every_write: bool = False,
    ) -> None:
        if cluster_resolver is None:
            cluster_resolver = TFConfigClusterResolver() if launch_env.tf_config() else self._embedded()
        cluster = cluster_of(cluster_resolver)
        check_cluster(cluster, getattr(cluster_resolver, "task_type", None))
        self._resolver = cluster_resolver
        self.max_staleness = checked_staleness(max_staleness)
        self.wire_options = wire_options(wire_dtype, pull_ahead)
        self.snapshots = snapshot_options(snapshot_folder, snapshot_seconds, snapshot_every_write)
        session = uuid.uuid4().hex
        handshake = {
            "role": "coordinator", "task": "/job:chief/task:0", "session": session, "snapshots": self.snapshots
        }  # fmt: skip
        self._start(cluster, session, handshake, checked_partitioner(variable_partitioner))

    def _embedded(self) -> LocalCluster:
        """A cluster on this machine, which lives as long as the strategy: articles leave the resolver out."""
        from tfstyle_dist.parameter_server.local_cluster import LocalCluster

        get_logger().warning(
            "ParameterServerStrategy() was given no cluster_resolver, and TF_CONFIG is not set: it starts 2 workers "
            "and 1 parameter server on this machine, and ends them with the strategy."
        )
        self._own_cluster = LocalCluster()
        return self._own_cluster

    def _start(
        self,
        cluster: Mapping[str, Sequence[str]],
        session: str,
        handshake: Mapping[str, Any],
        partitioner: Callable[..., Sequence[int]] | None,
    ) -> None:
        from tfstyle_dist.parameter_server.protocol import zeromq_sockets

        self.cluster, self.session = {job: list(addresses) for job, addresses in cluster.items()}, session
        self.context = zeromq_sockets.new_context()
        self.servers = Servers.of(self.context, self.cluster["ps"], handshake, env.timeout(), self.wire_options)
        worker = Worker((device_names.parse("cpu:0"),), SingleGroup(), env.timeout())
        super().__init__(ExtendedOnServers(worker))
        self.parameter_store = self.remote_store = RemoteStore(self, worker, self.servers, partitioner)
        self._optimizers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.known_optimizers: dict[int, Any] = {}
        self.sent_hyperparameters: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._told_parameters: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count(1)
        self.coordinator: Any = None
        self.update_runner = PushRunner(self)
        self._uninstall_hooks = install_for(self, [step_hooks])

    @classmethod
    def on_worker(
        cls,
        cluster: Mapping[str, Sequence[str]],
        session: str,
        task: str,
        snapshots: dict[str, Any] | None = None,
        wire: Mapping[str, Any] | None = None,
    ) -> ParameterServerStrategy:
        """The strategy object that scheduled functions see on a worker task."""
        strategy = cls.__new__(cls)
        strategy._resolver = None
        strategy.max_staleness, strategy.snapshots = None, snapshots
        told = wire or {}
        strategy.wire_options = wire_options(torch.bfloat16 if told.get("bfloat16") else None, bool(told.get("ahead")))
        handshake = {"role": "worker", "task": task, "session": session, "snapshots": snapshots}
        strategy._start(cluster, session, handshake, None)
        return strategy

    # ---- facts ------------------------------------------------------------------------------------------------

    @property
    def adopts_modules(self) -> bool:
        """Modules built in the scope move to the servers."""
        return True

    # ---- variables --------------------------------------------------------------------------------------------

    def create_variable(self, spec: VariableSpec) -> Variable:
        """A variable on the next parameter server, or a sharded one.

        Raises:
            RuntimeError: called inside a scheduled function.
        """
        if self._resolver is None:
            raise RuntimeError(
                "A Variable was made inside a scheduled function. Make variables in the coordinator's program, in "
                "strategy.scope(), so that all workers share them."
            )
        return self.remote_store.create_variable(spec)

    def embedding(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        initializer: tuple[str, float, float] = ("constant", 0.0, 0.0),
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> torch.nn.Embedding:
        """An embedding whose table only the servers hold: it may be larger than the memory of any other task.

        Its first values are made on the servers. Functions pull the rows that they use; gradients are sparse.

        Args:
            num_embeddings: number of rows.
            embedding_dim: size of one row.
            initializer: ``("constant", value, 0)``, ``("normal", mean, std)`` or ``("uniform", low, high)``.
            seed: of the random values; each shard has a stream of its own.
            dtype: element type.

        Returns:
            A ``torch.nn.Embedding(sparse=True)``; its weight on this process is a tensor whose memory is not touched.

        Example:
            >>> table = strategy.embedding(1 << 24, 64, initializer=("normal", 0.0, 0.01))
        """
        weight = torch.zeros(1, dtype=dtype).expand(num_embeddings, embedding_dim)
        module = torch.nn.Embedding(num_embeddings, embedding_dim, sparse=True, _weight=weight, dtype=dtype)
        self.remote_store.adopt_filled(module.weight, module, (*initializer, seed))
        return module

    # ---- optimizers -------------------------------------------------------------------------------------------

    def optimizer_number(self, optimizer: Any) -> int:
        """The number under which the servers know an optimizer; tells them of a new one.

        Raises:
            RuntimeError: on a worker, for an optimizer that was made there.
            TypeError, ValueError: its parameters are not on the servers, or are others than they were told.
        """
        if self._resolver is not None:
            check_parameters(optimizer, self._told_parameters)
        number = self._optimizers.get(optimizer)
        if number is None and self._resolver is None:
            raise RuntimeError(
                f"A {type(optimizer).__name__} was made inside a scheduled function, where the servers do not know it. "
                "Make optimizers in the coordinator's program, outside of functions."
            )
        if number is None:
            number = next(self._numbers)
            self.parameter_store.ensure_equal()
            parts = pickling.dumps((*optimizer_state(optimizer), torch.get_default_dtype()), references_of(optimizer))
            self.servers.call_all({"method": "optimizer", "number": number}, parts)
            self._optimizers[optimizer] = number
            self.sent_hyperparameters[optimizer] = hyperparameters(optimizer)
            keep_on_servers(self, optimizer, number)
        return number

    def known_optimizer_number(self, optimizer: Any) -> int | None:
        """The number under which the servers know an optimizer; ``None``: they have not heard of it."""
        return self._optimizers.get(optimizer)

    def know_optimizer(self, number: int, make: Callable[[], Any]) -> Any:
        """On a worker: the local object of an optimizer of the coordinator's program."""
        if number not in self.known_optimizers:
            optimizer = self.known_optimizers[number] = make()
            self._optimizers[optimizer] = number
            self.sent_hyperparameters[optimizer] = hyperparameters(optimizer)
        return self.known_optimizers[number]

    def send_hyperparameters(self, for_functions: bool = False) -> None:
        """Tells the servers of changed learning rates and the like, for functions to come; for these refuses hooks."""
        check_hooks(self._optimizers if for_functions else ())
        for optimizer in list(self._optimizers):
            now, before = hyperparameters(optimizer), self.sent_hyperparameters.get(optimizer)
            if now is not None and now != before:
                told = {
                    "number": self.optimizer_number(optimizer),
                    "since": getattr(self.coordinator, "next_number", 0),
                }
                self.servers.call_all({"method": "hyperparameters", **told, **changes(optimizer, before, now)})
                self.sent_hyperparameters[optimizer] = now

    def push_gradients(self, optimizer: Any, pairs: Sequence[tuple[RemoteRecord, torch.Tensor]]) -> None:
        """Sends gradients to the servers, where ``optimizer`` makes one step with them.

        Args:
            optimizer: a ``torch.optim`` or TF-style optimizer.
            pairs: records of this strategy and their gradients.
        """
        cast(PushRunner, self.update_runner).push(optimizer, pairs)

    # ---- life -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends the worker and ps tasks that serve this coordinator, and closes the links."""
        if self.closed:
            return
        if self.coordinator is not None:
            self.coordinator.close()
        self.servers.close()
        super().close()
        self.context.close()
        if self._own_cluster is not None:
            self._own_cluster.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} with {len(self.cluster['worker'])} workers, {len(self.cluster['ps'])} ps tasks>"
