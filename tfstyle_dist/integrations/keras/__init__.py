"""Keras 3 on torch: models built and compiled in ``strategy.scope()`` train, evaluate and predict on all replicas.

Importing this module is all there is to do; where the environment does not say ``KERAS_BACKEND=torch``, before Keras::

    import tfstyle_dist as tfd
    import tfstyle_dist.integrations.keras

    import keras

    strategy = tfd.MirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activation="softmax")])
        model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(x, y, batch_size=64, epochs=5)
"""

from tfstyle_dist.integrations.keras.batches import DatasetCreator
from tfstyle_dist.integrations.keras.methods import install, strategy_of
from tfstyle_dist.integrations.keras.tensorboard import TensorBoard

__all__ = ["DatasetCreator", "TensorBoard", "strategy_of"]

install()
