"""``fit`` on parameter servers with steps of one's own: one worker computes what one device does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from keras_tasks import ENVIRONMENT, TASKS

from tfstyle_dist.testing.runner import run_script

PROGRAM = (
    TASKS
    + """import contextlib

from keras import ops

import tfstyle_dist.integrations.keras

strategy = tfd.ParameterServerStrategy(resolver)
generator = np.random.default_rng(0)
x = generator.normal(size=(23, 6)).astype("float32")
y = x[:, ::-1].copy()


class Plain(keras.Model):
    # built by fit
    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.last = keras.layers.Dense(5, "tanh"), keras.layers.Dense(6)
        self.prepare()

    def prepare(self):
        pass

    def call(self, x):
        return self.last(self.hidden(x))

    def train_step(self, data):
        x, y = data  # as on one device: no weight was given
        self.zero_grad()
        loss = self.loss_of(x, y)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self._loss_tracker.update_state(loss.detach(), sample_weight=len(x))
        return {"loss": self._loss_tracker.result()}

    def loss_of(self, x, y):
        return ops.mean((self(x) - y) ** 2)


class Clipped(Plain):
    def loss_of(self, x, y):
        if self.built:
            for weight in self.trainable_weights:
                weight.assign(ops.clip(weight, -0.4, 0.4))
        return super().loss_of(x, y)


class ClippedByTorch(Plain):
    def loss_of(self, x, y):
        with torch.no_grad():
            for weight in self.trainable_weights:
                weight.value.clamp_(-0.4, 0.4)
        return super().loss_of(x, y)


class Counting(Plain):
    # state that is whole, that is true or false, and a sum; and a rate by the number of steps
    def prepare(self):
        self.steps = self.add_weight(shape=(), dtype="int64", initializer="zeros", trainable=False, name="steps")
        self.began = self.add_weight(shape=(2,), dtype="bool", initializer="zeros", trainable=False, name="began")
        self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum", name="seen")

    def loss_of(self, x, y):
        self.steps.assign_add(1)
        self.began.assign([True, not bool(self.began[1])])
        self.seen.assign_add(float(len(x)))
        return super().loss_of(x, y) * (1 + ops.cast(self.optimizer.iterations, "float32"))


class Drawing(Plain):
    # by Keras' own seed; and a list of metrics without the loss
    @property
    def metrics(self):
        return []

    def train_step(self, data):
        x, y = data
        noise = keras.random.normal((len(x), 6))
        loss = super().train_step((x + 0 * noise, y))
        return {"loss": loss["loss"]}


class OtherOptimizer(Plain):
    def prepare(self):
        self.other = keras.optimizers.SGD(0.1)

    def train_step(self, data):
        weights = self.trainable_weights
        self.other.apply([torch.zeros_like(w.value) for w in weights], weights)
        return super().train_step(data)


class Slower(Plain):
    def loss_of(self, x, y):
        self.optimizer.learning_rate = 0.05
        return super().loss_of(x, y)


def trained(kind, scope):
    keras.utils.set_random_seed(3)
    with scope:
        model = kind()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
    return history.get("loss"), [keras.ops.convert_to_numpy(w) for w in model.weights]


for kind in (Drawing, Plain, Clipped, ClippedByTorch, Counting, Plain):
    losses, weights = trained(kind, contextlib.nullcontext())
    theirs, their_weights = trained(kind, strategy.scope())
    close = [np.allclose(a, b, atol=2e-5) for a, b in zip(weights, their_weights, strict=True)]
    # A number that is no metric of the model stays on the worker.
    same = theirs is None if kind is Drawing else np.allclose(losses, theirs, atol=2e-5)
    print(kind.__name__, "agrees:", all(close) and same)
    for wrong in (Slower, OtherOptimizer) if kind is ClippedByTorch else ():
        try:  # an error in between does not fail the fit that follows
            trained(wrong, strategy.scope())
        except RuntimeError as error:
            print("refused:", error)


class Sum(keras.Model):
    # its compile has arguments of its own
    def compile(self, rate):
        super().compile(keras.optimizers.SGD(rate), "mse")


with strategy.scope():
    inputs = keras.Input((6,))
    model = Sum(inputs, keras.layers.Dense(6)(inputs))
    model.compile(0.1)
try:
    model.fit(x, y, verbose=0)
except RuntimeError as error:
    print("refused:", error)
strategy.close()
"""
)


@pytest.mark.slow
def test_steps_of_ones_own_on_servers(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(PROGRAM, encoding="utf-8")
    argv = ["-m", "tfstyle_dist.launch", "--chief", "--workers", "1", "--ps", "2", str(script)]
    result = run_script(argv, timeout=120, cwd=tmp_path, env=ENVIRONMENT)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    found = re.findall(r"(\w+) agrees: (\w+)", result.stdout)
    assert found == [(name, "True") for name in ("Drawing", "Plain", "Clipped", "ClippedByTorch", "Counting", "Plain")]
    assert result.stdout.count("refused:") == 3, result.stdout
    assert "which is no variable of the model" in result.stdout
    assert "but the servers have the optimizer that compile was given" in result.stdout
    assert "get_compile_config() and compile_from_config()" in result.stdout
