"""The one module that imports Keras: its public names, and the few private ones that there is no public way to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tfstyle_dist.core import env

env.prefer_torch_backend_of_keras()
try:
    import keras
except ImportError as missing:
    if missing.name != "keras":
        raise ImportError(
            f"Keras could not be imported: {missing}. Its backend must be torch: set KERAS_BACKEND=torch, or import "
            "tfstyle_dist.integrations.keras before keras."
        ) from missing
    raise ImportError(
        "tfstyle_dist.integrations.keras needs Keras 3, which is not installed: pip install 'keras>=3.15' (the extra "
        "'keras' of tfstyle_dist)."
    ) from missing
if keras.backend.backend() != "torch":
    raise ImportError(
        f"Keras runs on its {keras.backend.backend()!r} backend here, but the strategies distribute torch. Set "
        "KERAS_BACKEND=torch before Python starts, or import tfstyle_dist.integrations.keras before keras."
    )

from keras.src.backend.common import global_state  # noqa: E402
from keras.src.losses import loss as loss_module  # noqa: E402
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR, global_seed_generator  # noqa: E402
from keras.src.trainers.data_adapters import get_data_adapter  # noqa: E402
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter  # noqa: E402
from keras.src.trainers.data_adapters.array_slicing import train_validation_split  # noqa: E402
from keras.src.trainers.data_adapters.data_adapter import DataAdapter  # noqa: E402
from keras.src.trainers.data_adapters.torch_data_loader_adapter import TorchDataLoaderAdapter  # noqa: E402
from keras.src.utils import tracking  # noqa: E402

__all__ = [
    "TRACKED",
    "ArrayDataAdapter",
    "DataAdapter",
    "TorchDataLoaderAdapter",
    "every_variable",
    "get_data_adapter",
    "keras",
    "loss_module",
    "optimizers_of",
    "outside_stateless_scope",
    "process_seeds",
    "seeds_of",
    "train_validation_split",
]

TRACKED = [
    kind
    for kind in vars(tracking).values()
    if isinstance(kind, type) and issubclass(kind, list | dict | set) and kind.__module__ == tracking.__name__
]
"""What the lists, dicts and sets are that are attributes of a layer."""


@contextmanager
def outside_stateless_scope() -> Iterator[None]:
    """Suspends the ``StatelessScope`` of this thread: assignments inside reach the variables themselves."""
    scope = global_state.get_global_attribute("stateless_scope")
    global_state.set_global_attribute("stateless_scope", None)
    try:
        yield
    finally:
        global_state.set_global_attribute("stateless_scope", scope)


def process_seeds() -> Any:
    """Keras' own seed generator, for random operations without a seed; made without touching ``random``'s state."""
    before = random.getstate()
    try:
        return global_seed_generator()
    finally:
        random.setstate(before)


@contextmanager
def seeds_of(generator: Any) -> Iterator[None]:
    """Keras keeps its seed generator by thread; inside, this thread has another thread's one."""
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    try:
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


def every_variable(model: Any) -> list[Any]:
    """All Keras variables of a model, its metrics and its optimizers, each once."""
    found = [*model.variables, *model.metrics_variables]
    found += [variable for optimizer in optimizers_of(model) for variable in optimizer.variables]
    return list({id(v): v for v in found}.values())


def optimizers_of(model: Any) -> list[Any]:
    """The optimizer of ``compile``, and those that are attributes of the model, also in a list or a dict."""
    found = [getattr(model, "optimizer", None)]
    for value in list(vars(model).values()):
        found += value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    kinds = (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer)
    return list({id(o): o for o in found if isinstance(o, kinds)}.values())
