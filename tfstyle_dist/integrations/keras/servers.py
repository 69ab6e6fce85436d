"""``fit`` under ``ParameterServerStrategy``: the workers compute steps without waiting for each other."""

from __future__ import annotations

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from tfstyle_dist.coordinator import ClusterCoordinator
from tfstyle_dist.core.errors import UnavailableError
from tfstyle_dist.input.options import InputContext
from tfstyle_dist.integrations.keras import server_state
from tfstyle_dist.integrations.keras.backend import DataAdapter, keras
from tfstyle_dist.integrations.keras.inputs import batches_for_keras
from tfstyle_dist.integrations.keras.server_optimizer import ServerOptimizer, on_servers
from tfstyle_dist.integrations.keras.server_tasks import (
    Batches,
    WorkerModel,
    look_at_batch,
    metric_variables,
    train_on_worker,
)
from tfstyle_dist.integrations.keras.steps import adopt
from tfstyle_dist.integrations.keras.travel import custom_objects_of
from tfstyle_dist.runtime.context import Frame, entered
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy

_AHEAD = 4
_PATIENCE = 10.0  # seconds


def fit_on_servers(
    strategy: ParameterServerStrategy, model: Any, original: Callable[..., Any], given: dict[str, Any]
) -> Any:
    """``fit``: schedules one function for each step; callbacks, validation and saving happen in this program.

    Args:
        strategy: whose workers and servers.
        model: compiled in its scope.
        original: Keras' ``fit``.
        given: its arguments by name.

    Raises:
        ValueError: no ``steps_per_epoch``, data of a kind that cannot be sent to the workers, or an optimizer that
            looks at all gradients together.
    """
    model._assert_compile_called("fit")
    given.update(batches_for_keras(strategy, {**given, "x": None}))  # those of validation
    optimizer = on_servers(model.optimizer)
    dataset_fn, steps = _dataset_fn(given)
    with strategy.scope(), keras.device("cpu"):
        work = _Work(strategy, model, optimizer, dataset_fn)
        model.train_function = work.train
        given.update(x=work, y=None, sample_weight=None, class_weight=None, steps_per_epoch=steps)
        try:
            return original(model, **given)
        except Exception:
            work.forget()
            raise


def _dataset_fn(given: dict[str, Any]) -> tuple[Callable[[InputContext], Any], int]:
    x, y, steps = given["x"], given["y"], given["steps_per_epoch"]
    if callable(x) and y is None:
        if not steps:
            raise ValueError(
                "fit(dataset_fn) needs steps_per_epoch=: the workers' datasets have no common end. Give the number of "
                "steps of all workers together."
            )
        return x, int(steps)
    if not all(isinstance(leaf, np.ndarray | torch.Tensor) for leaf in keras.tree.flatten((x, y)) if leaf is not None):
        raise ValueError(
            f"fit under ParameterServerStrategy takes a function of an InputContext (or DatasetCreator(fn)) with "
            f"steps_per_epoch=, or arrays; got {type(x).__name__}. Make the {type(x).__name__} inside the function: it "
            "runs on each worker."
        )
    if given["validation_split"] or given["class_weight"] is not None:
        raise ValueError(
            "validation_split= and class_weight= under ParameterServerStrategy: give validation_data= and "
            "sample_weight= instead."
        )
    size = given["batch_size"] or 32
    arrays = _Arrays((x, y, given["sample_weight"]), size, bool(given["shuffle"]))
    return arrays, int(steps or math.ceil(arrays.count / size))


class _Arrays:
    """A dataset function over arrays: each worker reads all of them, in an order of its own."""

    def __init__(self, arrays: Any, size: int, shuffle: bool) -> None:
        self._arrays, self._size, self._shuffle = arrays, size, shuffle
        self.count = next(len(leaf) for leaf in keras.tree.flatten(arrays) if leaf is not None)
        self._seed, self._passes = int(torch.empty((), dtype=torch.int64).random_().item()) % 2**31, 0

    def __call__(self, context: InputContext) -> Iterator[Any]:
        """One pass."""
        self._passes += 1
        generator = np.random.default_rng([self._seed, context.input_pipeline_id, self._passes])
        order = generator.permutation(self.count) if self._shuffle else np.arange(self.count)
        if not self._shuffle:  # workers begin at different places, or they would compute the same batches
            order = np.roll(order, -(self.count * context.input_pipeline_id // context.num_input_pipelines))
        for start in range(0, self.count, self._size):
            rows = order[start : start + self._size]
            taken = keras.tree.map_structure(lambda leaf, rows=rows: None if leaf is None else leaf[rows], self._arrays)
            yield keras.utils.pack_x_y_sample_weight(*taken)


class _Work(DataAdapter):  # type: ignore[misc]
    """Stands for the data in Keras' loop: each of its batches is one function scheduled on the workers."""

    def __init__(
        self, strategy: ParameterServerStrategy, model: Any, optimizer: ServerOptimizer, dataset_fn: Any
    ) -> None:
        self._strategy, self._model, self._optimizer = strategy, model, optimizer
        self._coordinator = ClusterCoordinator(strategy)
        workers = len(strategy.cluster["worker"])
        self._batches = self._coordinator.create_per_worker_resource(partial(Batches, dataset_fn, workers))
        self._copies: Any = None
        self._pending: deque[Any] = deque()
        self._most = _AHEAD * workers
        self._builds = True

    # ---- for Keras' loop --------------------------------------------------------------------------------------

    def get_torch_dataloader(self) -> Iterable[Any]:
        """An entry for each step; at first an example of a batch, from which the model is built."""
        if self._builds:
            batch = self._coordinator.fetch(self._coordinator.schedule(look_at_batch, args=(self._batches,)))
            with entered(Frame(default_strategy())):  # Keras computes shapes with weights that are none yet
                self._model._symbolic_build(data_batch=batch)
            return [batch]
        return itertools.repeat(None)  # Keras counts the steps

    def on_epoch_end(self) -> None:
        """Waits for the steps of the epoch."""
        self._builds = False
        finished = len(self._pending)
        while self._pending:
            self._take()
        if finished:
            self._coordinator.join()

    def forget(self) -> None:
        """After an error: lets what is under way end, so that what fails in it does not fail the next ``fit``."""
        self._pending.clear()
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until:
            try:
                self._coordinator.join(timeout=1.0)
            except UnavailableError:
                return
            except Exception:
                continue
            return

    num_batches = None
    batch_size = None
    has_partial_batch = None
    partial_batch_size = None

    def train(self, data: Any) -> dict[str, Any]:
        """Schedules a step; the logs are of those that are finished."""
        model = self._model
        if self._copies is None:
            adopt(self._strategy, model)
            server_state.state_of(
                self._strategy, self._optimizer, model.optimizer, model.trainable_variables
            ).send_if_loaded()
            config, custom = keras.saving.serialize_keras_object(model), custom_objects_of(model)
            self._copies = self._coordinator.create_per_worker_resource(partial(WorkerModel, config, custom))
        pulled = [v.value for v in model.variables]
        steps = int(model.optimizer.iterations) + len(self._pending)
        arguments = (self._copies, self._batches, pulled, self._optimizer, steps)
        self._pending.append(self._coordinator.schedule(train_on_worker, args=arguments))
        if len(self._pending) > self._most:
            self._take()
        logs: dict[str, Any] = model.get_metrics_result()
        return logs

    def _take(self) -> None:
        told = torch.as_tensor(self._pending.popleft().fetch())
        offset = 1
        with torch.no_grad():
            for variable in metric_variables(self._model):
                value = variable.value
                part = told[offset : offset + value.numel()].view(value.shape)
                offset += value.numel()
                variable.assign((value.to(part) + part).to(value.dtype))
            self._model.optimizer.iterations.assign_add(1)
