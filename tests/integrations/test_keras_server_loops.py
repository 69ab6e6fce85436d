"""Keras models, optimizers and metrics in functions that a coordinator schedules, as in TensorFlow's tutorial."""

from __future__ import annotations

from pathlib import Path

import pytest
from keras_tasks import ENVIRONMENT, TASKS

from tfstyle_dist.testing.runner import run_script

PROGRAM = (
    TASKS
    + """import tfstyle_dist.integrations.keras


class Scaled(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


strategy = tfd.ParameterServerStrategy(resolver)
coordinator = tfd.coordinator.ClusterCoordinator(strategy)
x = torch.linspace(-1, 1, 64 * 4).view(64, 4).roll(3, 1) + 0.1 * torch.arange(64.0)[:, None].cos()
y = x.sum(1, keepdim=True) + 3


def made():
    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(momentum=0.5), Scaled()]
        model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
        return model, keras.optimizers.Adam(0.05), keras.metrics.Mean()


def step_of(model, optimizer, metric):
    loss_of = keras.losses.MeanSquaredError()

    def step():
        def replica_fn():
            loss = loss_of(y, model(x, training=True))
            model.zero_grad()
            loss.backward()
            weights = model.trainable_variables
            with torch.no_grad():
                optimizer.apply([w.value.grad for w in weights], weights)
            metric.update_state(torch.full((2,), float(loss.detach())))
            return float(loss.detach())

        return strategy.run(replica_fn)

    return step


def run(step, count):
    results = [coordinator.schedule(step) for _ in range(count)]
    coordinator.join()
    return [r.fetch() for r in results]


def state(model, optimizer):
    return [keras.ops.convert_to_numpy(v).copy() for v in (*model.variables, *optimizer.variables)]


model, optimizer, metric = made()
step = step_of(model, optimizer, metric)
losses = run(step, 80)
print("trained:", np.median(losses[-20:]) < np.median(losses[:5]) / 2, "counted:", float(metric.count))
print("the mean is exact:", abs(float(metric.result()) - np.mean(losses)) < 1e-5)
print("statistics moved:", abs(float(model.layers[1].moving_mean.numpy().sum())) > 1e-3)
metric.reset_state()
run(step, 5)
print("after a reset:", float(metric.count))

path = tfd.train.Checkpoint(model=model, optimizer=optimizer, metric=metric).save("ckpt")
saved = state(model, optimizer)
again, other, counter = made()
tfd.train.Checkpoint(model=again, optimizer=other, metric=counter).restore(path).assert_consumed()
same = [np.array_equal(a, b) for a, b in zip(saved, state(again, other), strict=True)]
print("restored:", all(same), "steps", int(other.iterations), "counted", float(counter.count))


def alone(step):
    return [run(step, 1)[0] for _ in range(3)]


first, second = alone(step), alone(step_of(again, other, counter))
print("goes on alike:", np.allclose(first, second, rtol=1e-4))

bias = again.trainable_variables[-1]
keras.optimizers.SGD(1.0).apply([torch.full_like(bias.value, -3.0)], [bias])  # so that there is something to learn
plain = torch.optim.SGD([v.value for v in again.trainable_variables], lr=0.05)


def torch_step():
    plain.zero_grad()
    loss = (again(x, training=True) - y).square().mean()
    loss.backward()
    plain.step()
    return float(loss.detach())


before = state(again, other)[0]
losses = run(torch_step, 20)
moved = not np.array_equal(before, state(again, other)[0])
print("torch.optim:", np.median(losses[-10:]) < np.median(losses[:2]) / 2, "weights moved:", moved)

with strategy.scope():
    count, scale = keras.Variable(0, trainable=False, dtype="int64"), keras.Variable(1.0, trainable=False)
    seeds = keras.random.SeedGenerator(3)


def counts():
    count.assign_add(2)
    scale.assign(scale * 0.5)
    return float(keras.random.uniform((), seed=seeds))


drawn = [run(counts, 1)[0] for _ in range(3)]
print("variables of the program:", int(count), float(scale), "drawn:", len(set(drawn)))

kernel = again.trainable_variables[0]
before = kernel.numpy().copy()
keras.optimizers.SGD(1.0).apply([torch.ones(4, 8)], [kernel])
print("on the chief:", np.allclose(kernel.numpy(), before - 1))
"""
)

REFUSALS = """
def refused(what, function):
    try:
        coordinator.schedule(function)
        coordinator.join()
        print(what, "was taken")
    except Exception as error:
        print(what, "-", type(error).__name__, str(error).splitlines()[0])


with strategy.scope():
    lazy = keras.Sequential([keras.layers.Dense(1)])
    compiled = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    compiled.compile("adam", "mse", metrics=["mae"])
    clipped = keras.optimizers.Adam(global_clipnorm=1.0)


def makes_an_optimizer():
    weights = model.trainable_variables
    keras.optimizers.SGD(0.1).apply([torch.zeros_like(w.value) for w in weights], weights)


refused("not built", lambda: lazy(x))
refused("compute_metrics", lambda: compiled.compute_metrics(x, y, y))
refused("global_clipnorm", lambda: clipped.apply([], model.trainable_variables))
refused("made inside", makes_an_optimizer)
refused("rate", lambda: setattr(optimizer, "learning_rate", 0.1))
strategy.close()
"""


@pytest.mark.slow
def test_a_loop_of_ones_own_on_servers(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(PROGRAM + REFUSALS, encoding="utf-8")
    argv = ["-m", "tfstyle_dist.launch", "--chief", "--workers", "2", "--ps", "1", str(script)]
    result = run_script(argv, timeout=300, cwd=tmp_path, env=ENVIRONMENT)
    output = result.stdout
    assert result.returncode == 0, f"{output}\n{result.stderr}"
    for line in (
        "trained: True counted: 160.0", "the mean is exact: True", "statistics moved: True", "after a reset: 10.0",
        "restored: True steps 85 counted 10.0", "goes on alike: True", "torch.optim: True weights moved: True",
        "on the chief: True", "not built - ValueError A scheduled function uses 'sequential_2', which is not built",
        "compute_metrics - RuntimeError compute_metrics in a scheduled function: the metrics that compile was given",
        "global_clipnorm - ValueError Adam(global_clipnorm=1.0) under ParameterServerStrategy",
        "made inside - RuntimeError SGD was made inside a scheduled function",
        "variables of the program: 6 0.125 drawn: 3",
        "rate - RuntimeError A scheduled function sets 'adam/learning_rate'",
    ):  # fmt: skip
        assert line.lower() in output.lower(), output
