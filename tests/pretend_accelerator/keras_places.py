"""A Keras model under strategies on several devices; prints where it was trained. Started by a test with
``KERAS_TORCH_DEVICE``, which stands for the device that Keras would take."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ["KERAS_BACKEND"] = "torch"

from pretend_accelerator import load

load()

import keras  # noqa: E402  # now that torch knows the accelerator
import numpy as np  # noqa: E402

import tfstyle_dist as tfd  # noqa: E402
import tfstyle_dist.integrations.keras  # noqa: E402

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


def trained(strategy: tfd.Strategy, built: bool) -> dict[str, object]:
    keras.utils.set_random_seed(0)
    with strategy:
        with strategy.scope():
            layers = [keras.layers.Dense(3, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((4,)), *layers] if built else layers)
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False, validation_data=(X, Y))
        model.train_on_batch(X, Y)
        predicted, (loss, _) = model.predict(X, verbose=0), model.evaluate(X, Y, verbose=0)
        called = keras.ops.convert_to_numpy(model(X))
        np.testing.assert_allclose(called, predicted, rtol=1e-5)
        variables = [*model.variables, *model.optimizer.variables]
        places = sorted({str(variable.value.device) for variable in variables})
        return {"places": places, "losses": [*history.history["val_loss"], loss]}


def main() -> None:
    for built in (True, False):
        for name in ("cpu", "pretend:0", "pretend:1"):
            for strategy in (tfd.OneDeviceStrategy(name), tfd.MirroredStrategy([name])):
                print(json.dumps({"wanted": name, **trained(strategy, built)}))
        for name in ("cpu", "pretend:1"):
            both = [f"{name}#0", f"{name}#1"] if ":" in name else ["cpu:0", "cpu:1"]
            print(json.dumps({"wanted": name, **trained(tfd.MirroredStrategy(both), built), "losses": None}))


if __name__ == "__main__":
    main()
