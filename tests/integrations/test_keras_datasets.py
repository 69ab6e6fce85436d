"""``fit``, ``evaluate`` and ``predict`` take distributed datasets and dataset functions under every strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET

import tfstyle_dist as tfd
from tfstyle_dist.integrations.keras import DatasetCreator
from tfstyle_dist.testing.strategies import NamedStrategy, strategy_combinations

pytestmark = QUIET
CENTRAL = NamedStrategy("central_2", lambda: tfd.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]))
EVERY = strategy_combinations("one_device", "mirrored_2", "mirrored_3", CENTRAL, "mirrored_2_workers", timeout=60)
X = np.random.default_rng(0).normal(size=(23, 3)).astype("float32")
Y = X @ np.array([[1.0], [-2.0], [0.5]], "float32")


def loader(*arrays: np.ndarray, size: int = 6) -> Any:
    data = torch.utils.data.TensorDataset(*map(torch.from_numpy, arrays))
    return torch.utils.data.DataLoader(data, batch_size=size)


def made(scope: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    with scope:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def results(model: keras.Model, of: Any) -> list[Any]:
    """Of data in some form: histories, an evaluation, predictions, weights."""
    data = of(X, Y)
    fitted = [
        model.fit(data, epochs=2, shuffle=False, verbose=0, validation_data=data).history,
        model.fit(data, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0, validation_data=data, validation_steps=3)
        .history,
    ]  # fmt: skip
    evaluated = [model.evaluate(data, verbose=0), model.evaluate(data, steps=2, verbose=0)]
    predicted = [model.predict(of(X), verbose=0), model.predict(of(X), steps=3, verbose=0)]
    assert [len(p) for p in predicted] == [23, 18]
    return [*(list(h.values()) for h in fitted), evaluated, *predicted, *model.get_weights()]


@EVERY
def test_a_distributed_dataset_is_read_as_it_is_divided(strategy: tfd.Strategy) -> None:
    expected = results(made(contextlib.nullcontext()), loader)
    found = results(made(strategy.scope()), lambda *a: strategy.experimental_distribute_dataset(loader(*a)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@EVERY
def test_a_dataset_creator_gives_each_replica_a_batch(strategy: tfd.Strategy) -> None:
    """Each worker begins at the first row, so a step has the same batch on each worker, of 4 rows for each replica."""
    worker = strategy.worker
    each = 4 * worker.num_local_replicas
    asked: list[tuple[int, int]] = []

    def dataset_fn(context: tfd.InputContext) -> Any:
        asked.append((context.num_input_pipelines, context.num_replicas_in_sync))
        rows = np.tile(np.arange(each), 2)  # for the steps of two epochs
        return loader(X[rows], Y[rows], size=context.get_per_replica_batch_size(4 * context.num_replicas_in_sync))

    alone, together = made(contextlib.nullcontext()), made(strategy.scope())
    creator = DatasetCreator(dataset_fn)
    fit = {"epochs": 2, "shuffle": False, "verbose": 0}
    theirs = together.fit(creator, steps_per_epoch=1, validation_data=creator, validation_steps=1, **fit).history
    mine = alone.fit(X[:each], Y[:each], batch_size=each, validation_data=(X[:each], Y[:each]), **fit).history
    for name, values in mine.items():
        np.testing.assert_allclose(theirs[name], values, atol=1e-5, err_msg=name)
    for one, other in zip(together.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
    assert asked == [(worker.group.size, strategy.num_replicas_in_sync)] * 2
    expected = alone.evaluate(X[:each], Y[:each], batch_size=each, verbose=0)
    np.testing.assert_allclose(together.evaluate(creator, steps=1, verbose=0), expected, atol=1e-5)
    outputs = together.predict(DatasetCreator(lambda context: loader(X[:each], size=4)), steps=1, verbose=0)
    assert len(outputs) == 4 * strategy.num_replicas_in_sync
    shares = np.sort(outputs.ravel()), np.sort(np.tile(alone.predict(X[:each], verbose=0).ravel(), worker.group.size))
    np.testing.assert_allclose(*shares, atol=1e-5)


class Stream(torch.utils.data.IterableDataset[Any]):
    """Goes on where it was, whoever reads it."""

    def __init__(self, batches: int) -> None:
        self.places = iter(range(batches))

    def __iter__(self) -> Iterator[Any]:
        for place in self.places:
            yield torch.from_numpy(X[place : place + 1]), torch.from_numpy(Y[place : place + 1])


@strategy_combinations("one_device", "mirrored_2", "mirrored_2_workers", timeout=60)
def test_a_stream_is_read_from_its_first_batch_on(strategy: tfd.Strategy) -> None:
    """Although the model is built from a batch; the function is called once."""
    called: list[int] = []

    def stream(context: tfd.InputContext) -> Any:
        called.append(context.input_pipeline_id)
        return Stream(2 * strategy.worker.num_local_replicas)

    model = made(strategy.scope())
    model.fit(DatasetCreator(stream), steps_per_epoch=2, verbose=0)  # Keras would warn of a third step
    assert called == [strategy.worker.group.rank]
    assert int(model.optimizer.iterations) == 2
    theirs, n = made(strategy.scope()), strategy.worker.num_local_replicas
    rows = [slice(0, n), slice(n, 2 * n)]
    for part in rows:
        theirs.train_on_batch(*(np.tile(a[part], (strategy.worker.group.size, 1)) for a in (X, Y)))
    for one, other in zip(model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@strategy_combinations("one_device", "mirrored_2")
def test_what_does_not_go_together_is_refused(strategy: tfd.Strategy) -> None:
    model, alone = made(strategy.scope()), made(contextlib.nullcontext())
    data, creator = strategy.experimental_distribute_dataset(loader(X, Y)), DatasetCreator(lambda context: [])
    refused: dict[str, Any] = {
        r"y was given beside a DistributedDataset.* \(x, y\)": lambda: model.fit(data, Y, verbose=0),
        r"sample_weight was given beside": lambda: model.evaluate(data, sample_weight=Y, verbose=0),
        r"class_weight was given beside": lambda: model.fit(data, class_weight={0: 1.0}, verbose=0),
        r"give steps_per_epoch= to fit": lambda: model.fit(creator, verbose=0),
        r"validation_steps= for validation_data": lambda: model.fit(X, Y, validation_data=creator, verbose=0),
        r"steps= to evaluate and predict": lambda: model.predict(creator, verbose=0),
        r"x is a DistributedDataset, but the model belongs to no strategy": lambda: alone.fit(data, verbose=0),
    }
    for text, call in refused.items():
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(
        ValueError, match=r"fit was given a DistributedIterator.* Give it the distributed dataset itself"
    ):
        model.fit(iter(data), steps_per_epoch=1, verbose=0)
    if strategy.num_replicas_in_sync > 1:
        x, y = next(iter(data))
        text = "was given a PerReplica, which is divided among the replicas already.* Give it the global batch"
        for call in (lambda: model.train_on_batch(x, y), lambda: model.predict_on_batch(x)):
            with pytest.raises(ValueError, match=text):
                call()
    with tfd.MirroredStrategy(["cpu:0"]) as other:
        theirs = other.experimental_distribute_dataset(loader(X, Y))
        with pytest.raises(ValueError, match=r"of another strategy than the model's .*experimental_distribute_dataset"):
            model.evaluate(theirs, verbose=0)


@pytest.mark.distributed(workers=2, timeout=60)
def test_a_callback_of_the_chief_cannot_read_a_distributed_dataset(strategy: tfd.Strategy, rank: int) -> None:
    model, data = made(strategy.scope()), strategy.experimental_distribute_dataset(loader(X, Y))
    look = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: model.evaluate(data, verbose=0))
    with pytest.raises(RuntimeError if rank else ValueError, match="on the chief alone inside of a callback"):
        model.fit(X, Y, verbose=0, callbacks=[look])


@strategy_combinations("mirrored_2", "mirrored_2_workers", timeout=60)
def test_data_without_examples_is_named(strategy: tfd.Strategy) -> None:
    model, text = made(strategy.scope()), r"no examples: x has the shape \(0, 3\)"
    for call in (
        lambda: model.fit(X[:0], Y[:0], verbose=0),
        lambda: model.fit(X, Y, validation_data=(X[:0], Y[:0]), verbose=0),
        lambda: model.evaluate(X[:0], Y[:0], verbose=0),
        lambda: model.predict(X[:0], verbose=0),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    with pytest.raises(ValueError, match="no examples: x is a DataLoader without batches"):
        model.predict(loader(X[:0]), verbose=0)
