"""Callbacks run on the chief; what they decide and change holds on every worker."""

from __future__ import annotations

import contextlib
import json
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import torch
from keras_models import QUIET, dense, digits, everywhere, weights_of

import tfstyle_dist as tfd
from tfstyle_dist.integrations.keras import TensorBoard

pytestmark = [QUIET, pytest.mark.distributed(workers=2, timeout=90)]
(X, Y), TEST = digits()
X, Y = X[:200], Y[:200]


def made(strategy: tfd.Strategy, *layers: Any, **compiled: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        return dense(*layers, **compiled)


class Log(keras.callbacks.Callback):
    """Remembers its events; the rank's own list."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def on_train_begin(self, logs: Any = None) -> None:
        self.events.append("begin")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.events.append(f"epoch {epoch}")


def test_the_chief_runs_them_and_all_stop_together(strategy: tfd.Strategy, rank: int, capfd: Any) -> None:
    """EarlyStopping restores weights on the chief; the others get them, and stop at the same epoch."""
    model = made(strategy)
    log, every = Log(), Log()
    every.on_every_worker = True
    # On the chief alone no improvement is large enough: its decision counts.
    stop = keras.callbacks.EarlyStopping(
        "loss", min_delta=10.0 if rank == 0 else 0.0, patience=3, mode="min", restore_best_weights=True
    )
    history = model.fit(X, Y, batch_size=64, epochs=9, verbose=2, callbacks=[log, stop, every]).history
    assert len(history["loss"]) == 4
    assert bool((np.diff(everywhere(strategy, history["loss"]), axis=0) == 0).all())
    assert bool((np.diff(everywhere(strategy, weights_of(model)), axis=0) == 0).all())
    assert log.events == (["begin", *every.events[1:]] if rank == 0 else [])
    assert len(every.events) == 1 + len(history["loss"])
    shown = capfd.readouterr().out
    assert shown.count("Epoch 1/9") == (1 if rank == 0 else 0)


def test_a_chief_that_has_built_other_models_before(strategy: tfd.Strategy, rank: int) -> None:
    """Keras numbers the names of layers and optimizers, so they differ from worker to worker."""
    keras.utils.clear_session(free_memory=False)  # counting begins anew
    if rank == 0:
        dense().fit(X, Y, verbose=0)
    model = made(strategy)
    assert model.layers[0].name == ("dense_2" if rank == 0 else "dense")
    history = model.fit(X, Y, batch_size=64, epochs=2, verbose=0).history["loss"]
    assert history[1] < history[0]
    assert bool((np.diff(everywhere(strategy, weights_of(model)), axis=0) == 0).all())


def test_models_that_are_compiled_again(strategy: tfd.Strategy, rank: int) -> None:
    """Variables of new metrics take the place in memory of those that are gone, on one worker and not on the other."""
    model, kept = made(strategy), []
    for _ in range(8):
        model.test_on_batch(X[:4], Y[:4])
        if rank == 0:
            kept.append([*model.metrics_variables, *model.optimizer.variables])
        with strategy.scope():
            model.compile(
                "adam", "sparse_categorical_crossentropy", metrics=["accuracy", "sparse_top_k_categorical_accuracy"]
            )
    assert bool((np.diff(everywhere(strategy, model.evaluate(*TEST, verbose=0)), axis=0) == 0).all())


def test_learning_rates_of_the_chief_hold_everywhere(strategy: tfd.Strategy, rank: int) -> None:
    model = made(strategy, optimizer=keras.optimizers.SGD(0.1))
    rates = {0: [0.5, 0.25], 1: [7.0, 7.0]}[rank]
    plan = keras.callbacks.LearningRateScheduler(lambda epoch: rates[epoch])
    model.fit(X, Y, batch_size=100, epochs=2, verbose=0, callbacks=[plan])
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    assert bool((np.diff(everywhere(strategy, weights_of(model)), axis=0) == 0).all())


def test_what_callbacks_log_is_in_the_history_of_all(strategy: tfd.Strategy, rank: int) -> None:
    """Also what one that runs everywhere logs; not what is no number or text."""

    class Logs(keras.callbacks.Callback):
        on_every_worker = True

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs.update(rank=rank, mine=np.float32(epoch), text="a", model=self.model)
            logs["loss"] = -1.0 - rank

    model = made(strategy, optimizer=keras.optimizers.SGD(0.1))
    callbacks = [keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)), Logs()]
    history = model.fit(X, Y, batch_size=100, epochs=3, verbose=0, validation_data=TEST, callbacks=callbacks).history
    assert history["learning_rate"] == [0.5, 0.25, pytest.approx(0.5 / 3)]
    assert (history["rank"], history["mine"], history["text"]) == ([0] * 3, [0.0, 1.0, 2.0], ["a"] * 3)
    assert history["loss"] == [-1.0] * 3
    assert len(history["val_loss"]) == 3
    plain = keras.callbacks.History()  # of the chief alone, the others have one of Keras
    plain.history["learning_rate"] = [9.0]
    history = model.fit(X, Y, batch_size=100, epochs=2, verbose=0, callbacks=[callbacks[0], plain]).history
    assert history["learning_rate"] == [*([9.0] if rank == 0 else []), 0.5, 0.25]


class Scaled(keras.layers.Dense):
    """A layer with a number that a program may change."""

    scale = 1.0

    def call(self, inputs: Any) -> Any:
        return super().call(inputs) * self.scale


class Steered(keras.Model):
    """Two optimizers, a number in an attribute, and a weight of the loss that is a variable of the program."""

    def __init__(self, weight: keras.Variable) -> None:
        super().__init__()
        self.first, self.last = Scaled(8, activation="tanh"), keras.layers.Dense(10)
        self.beta, self.outside, self.second = 0.0, [lambda: weight], keras.optimizers.SGD(0.1)

    def call(self, inputs: Any) -> Any:
        return self.last(self.first(inputs))

    def train_step(self, data: Any) -> Any:
        x, y = data
        outputs = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=outputs)
        loss = loss + (self.beta + self.outside[0]()) * keras.ops.mean(outputs**2)
        self.zero_grad()
        loss.backward()
        for optimizer, layer in ((self.optimizer, self.first), (self.second, self.last)):
            weights = layer.trainable_weights
            if weights:
                with torch.no_grad():
                    optimizer.apply([w.value.grad for w in weights], weights)
        return {"loss": loss}


CHANGES: dict[str, Any] = {
    "an optimizer's rate": lambda model, epoch, _: model.second.learning_rate.assign(0.1 / (1 + epoch)),
    "a number": lambda model, epoch, _: setattr(model, "beta", np.float32(epoch)),
    "an optimizer's number": lambda model, epoch, _: setattr(model.optimizer, "clipnorm", 0.01 * (1 + epoch)),
    "a layer's number": lambda model, epoch, _: setattr(model.first, "scale", 1.0 + epoch),
    "what is trained": lambda model, epoch, _: setattr(model.first, "trainable", epoch != 1),
    "a variable of the program": lambda _, epoch, weight: weight.assign(epoch),
}


@pytest.mark.parametrize("batches", [False, True], ids=["epochs", "batches"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_callback_of_the_chief_changes_besides_weights(
    strategy: tfd.Strategy, change: str, batches: bool
) -> None:
    """As on one device: in silence each worker went on with its own, and the weights drifted apart."""

    def trained(scope: Any) -> np.ndarray:
        keras.utils.set_random_seed(1)
        with scope:
            weight = keras.Variable(0.0, trainable=False)
            model = Steered(weight)
            model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        name = "on_train_batch_end" if batches else "on_epoch_begin"
        callback = keras.callbacks.LambdaCallback(**{name: lambda now, logs: CHANGES[change](model, now, weight)})
        for _ in range(2):
            model.fit(X, Y, batch_size=64, epochs=3, shuffle=False, verbose=0, callbacks=[callback])
        return weights_of(model)

    weights = trained(strategy.scope())
    np.testing.assert_allclose(weights, trained(contextlib.nullcontext()), rtol=1e-4, atol=1e-6)
    assert bool((np.diff(everywhere(strategy, weights), axis=0) == 0).all())


def test_a_variable_of_the_program_that_is_set_before_the_first_step(
    strategy: tfd.Strategy, rank: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows then that the steps will read it, so it is named; in an attribute of the callback it is known."""

    class Sets(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            weight.assign(2.0)

    for held in (True, False):
        with strategy.scope():
            weight = keras.Variable(0.0, trainable=False, name="share")
            model = Steered(weight)
            model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        callback = Sets()
        if held:
            callback.weight = weight
        model.fit(X, Y, batch_size=64, epochs=1, verbose=0, callbacks=[callback])
        assert everywhere(strategy, [float(weight)]).ravel().tolist() == [2.0, 2.0]
        assert ("the Keras variable 'share'" in caplog.text) == (not held)


def test_another_model_that_a_callback_changes(strategy: tfd.Strategy) -> None:
    """An average of the weights, which is evaluated and trained by all afterwards; the second time it is known."""

    class Average(keras.callbacks.Callback):
        def __init__(self, average: keras.Model) -> None:
            super().__init__()
            self.average = average

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            pairs = zip(self.average.get_weights(), self.model.get_weights(), strict=True)
            self.average.set_weights([0.5 * a + 0.5 * b for a, b in pairs])

    def trained(scope: Any) -> list[np.ndarray]:
        keras.utils.set_random_seed(1)
        with scope:
            model, average = dense(), dense()
        callback, found = Average(average), []
        for _ in range(2):
            model.fit(X, Y, batch_size=64, epochs=2, shuffle=False, verbose=0, callbacks=[callback])
            found += [np.array(average.evaluate(*TEST, verbose=0)), weights_of(average)]
        average.fit(X, Y, batch_size=64, epochs=1, shuffle=False, verbose=0)
        return [*found, weights_of(average)]

    for ours, plain in zip(trained(strategy.scope()), trained(contextlib.nullcontext()), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-4)
        assert bool((np.diff(everywhere(strategy, ours), axis=0) == 0).all())


def test_stopping_in_the_middle_of_an_epoch(strategy: tfd.Strategy) -> None:
    """TerminateOnNaN decides after a batch, so the workers meet after each."""
    model = made(strategy, optimizer=keras.optimizers.SGD(1e30))
    history = model.fit(X, Y, batch_size=10, epochs=3, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert len(history.history["loss"]) == 1
    steps = everywhere(strategy, [int(model.optimizer.iterations)])
    assert steps[0] == steps[1] < 20


def test_a_callback_may_evaluate_on_the_chief_alone(strategy: tfd.Strategy, rank: int) -> None:
    model = made(strategy)
    seen: list[float] = []

    def look(epoch: int, logs: Any) -> None:
        seen.append(model.evaluate(*TEST, verbose=0)[1])
        seen.append(float((model.predict(TEST[0], verbose=0).argmax(1) == TEST[1]).mean()))

    history = model.fit(
        X, Y, batch_size=64, epochs=2, verbose=0, validation_data=TEST,
        callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=look)],
    ).history  # fmt: skip
    expected = np.repeat(history["val_accuracy"], 2) if rank == 0 else []
    np.testing.assert_allclose(seen, expected, atol=1e-6)


def test_an_error_of_the_chief_ends_all(strategy: tfd.Strategy, rank: int) -> None:
    model = made(strategy)

    def fail(epoch: int, logs: Any) -> None:
        raise OSError("no space left on device")

    callback = keras.callbacks.LambdaCallback(on_epoch_end=fail)
    if rank == 0:
        with pytest.raises(OSError, match="no space left"):
            model.fit(X, Y, verbose=0, callbacks=[callback])
    else:
        with pytest.raises(RuntimeError, match=r"failed on worker 0, in on_epoch_end: OSError: no space left"):
            model.fit(X, Y, verbose=0, callbacks=[callback])


@pytest.mark.parametrize("raises", ["each", "the second"])
def test_an_error_of_a_callback_on_every_worker_leaves_them_together(
    strategy: tfd.Strategy, rank: int, raises: str
) -> None:
    """Workers that catch it go on; who raised gets its own error."""

    class Pruned(Exception):
        pass

    class Prune(keras.callbacks.Callback):
        on_every_worker = True

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1 and (raises == "each" or rank == 1):
                raise Pruned(f"by {rank}")

    for _ in range(2):
        model = made(strategy)
        if raises == "each" or rank == 1:
            with pytest.raises(Pruned, match=f"by {rank}"):
                model.fit(X, Y, batch_size=64, verbose=0, callbacks=[Prune()])
        else:
            with pytest.raises(RuntimeError, match=r"failed on worker 1, in on_train_batch_end: Pruned: by 1"):
                model.fit(X, Y, batch_size=64, verbose=0, callbacks=[Prune()])
    assert bool((np.diff(everywhere(strategy, weights_of(model)), axis=0) == 0).all())


def test_checkpoints_and_going_on(strategy: tfd.Strategy, rank: int, shared_tmp_path: Path) -> None:
    """One file is written; a job that was cut off goes on where it was, on all workers."""
    path = shared_tmp_path / "best.keras"
    own = shared_tmp_path / f"of rank {rank}"

    class Cut(Exception):
        pass

    def cut(epoch: int, logs: Any) -> None:
        if epoch == 1:
            raise Cut

    def backup() -> keras.callbacks.Callback:
        return keras.callbacks.BackupAndRestore(own)  # only the chief's is used

    plain = made(strategy)
    whole = plain.fit(X, Y, batch_size=64, epochs=4, shuffle=False, verbose=0).history["loss"]
    first = made(strategy)
    stop = keras.callbacks.LambdaCallback(on_epoch_end=cut)
    callbacks = [backup(), keras.callbacks.ModelCheckpoint(path), stop]
    with pytest.raises(Cut if rank == 0 else RuntimeError):
        first.fit(X, Y, batch_size=64, epochs=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert (shared_tmp_path / "of rank 0").is_dir()
    assert not (shared_tmp_path / "of rank 1").exists()
    keras.utils.set_random_seed(90 + rank)
    with strategy.scope():
        second = dense()
    history = second.fit(X, Y, batch_size=64, epochs=4, shuffle=False, verbose=0, callbacks=[backup()])
    assert history.epoch == [2, 3]
    np.testing.assert_allclose(history.history["loss"], whole[2:], atol=1e-5)
    np.testing.assert_allclose(weights_of(second), weights_of(plain), atol=1e-5)
    assert int(second.optimizer.iterations) == int(plain.optimizer.iterations)
    np.testing.assert_array_equal(weights_of(keras.models.load_model(path)), weights_of(first))


def test_tensorboard_is_written_once(strategy: tfd.Strategy, rank: int, shared_tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    model = made(strategy)
    logs = shared_tmp_path / "logs"
    callbacks = [TensorBoard(logs, update_freq=2), keras.callbacks.CSVLogger(shared_tmp_path / f"{rank}.csv")]
    history = model.fit(X, Y, batch_size=50, epochs=2, verbose=0, validation_data=TEST, callbacks=callbacks).history
    everywhere(strategy, [0.0])  # all are done
    assert len(list((logs / "train").iterdir())) == 1
    assert sorted(p.name for p in shared_tmp_path.glob("*.csv")) == ["0.csv"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train, validation = (EventAccumulator(str(logs / part)).Reload() for part in ("train", "validation"))
    assert [e.value for e in train.Scalars("epoch_loss")] == pytest.approx(history["loss"], rel=1e-5)
    assert [e.value for e in validation.Scalars("epoch_accuracy")] == pytest.approx(history["val_accuracy"], rel=1e-5)
    assert [e.step for e in train.Scalars("batch_loss")] == [2, 4, 6, 8]
    assert "epoch_learning_rate" in train.Tags()["scalars"]
    assert json.dumps(history)  # plain numbers
