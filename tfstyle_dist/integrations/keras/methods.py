"""``keras.Model`` whose methods know strategies; models that belong to none are as they were."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.integrations.keras import (
    built_in_run,
    checkpoint,
    losses,
    metric_state,
    optimizers,
    server_state,
    travel,
)
from tfstyle_dist.integrations.keras.backend import TRACKED, keras, train_validation_split
from tfstyle_dist.integrations.keras.callbacks import ALONE, SharedCallbacks
from tfstyle_dist.integrations.keras.inputs import batches_for_keras, input_of
from tfstyle_dist.integrations.keras.refusals import refuse_divided, refuse_stateful, refuse_training_in_run
from tfstyle_dist.integrations.keras.servers import fit_on_servers
from tfstyle_dist.integrations.keras.steps import Steps, bring_to, divided
from tfstyle_dist.integrations.keras.wrapping import wrap
from tfstyle_dist.runtime.context import current_frame, current_replica, mixing_error
from tfstyle_dist.strategies.base import Strategy
from tfstyle_dist.strategies.default import default_strategy
from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy
from tfstyle_dist.strategies.running import report_failure
from tfstyle_dist.variables import find_record
from tfstyle_dist.variables.content.copies import count_as_containers

Method = Callable[..., Any]
_FUNCTIONS = ("train_function", "test_function", "predict_function")
_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()


def install() -> None:
    """Wraps the methods of ``keras.Model`` once, in the classes that define them."""
    count_as_containers(*TRACKED)
    optimizers.install()
    server_state.install()
    built_in_run.install()
    metric_state.install()
    losses.install()
    checkpoint.install()
    travel.install()
    for name, wrapper in _WRAPPERS.items():
        wrap(keras.Model, name, wrapper)
    trainer = next(kind for kind in keras.Model.__mro__ if "train_step" in vars(kind))
    wrap(trainer, "__init__", _made)


def strategy_of(model: Any) -> Strategy | None:
    """The strategy in whose scope a Keras model was made, compiled or built; ``None`` for one of no strategy.

    Args:
        model: a Keras model.
    """
    known = _strategies.get(model)
    if known is not None:
        return known
    for variable in model.variables:
        record = find_record(variable.value)
        if record is not None:
            found: Strategy = record.store.strategy
            return found
    return None


def _distributing(model: Any, method: str, given: Any) -> Strategy | None:
    """The strategy that a method must follow now; ``None`` to do as Keras does."""
    strategy = strategy_of(model)
    if strategy is None or ALONE.active:
        return None
    refuse_divided(method, given)
    frame = current_frame()
    if method in ("fit", "train_on_batch"):
        refuse_training_in_run(model, method)
    if frame is not None and (frame.replica is not None or frame.strategy is not strategy):
        if frame.replica is None:
            raise mixing_error(strategy, frame.strategy, "training a Keras model")
        return None
    if strategy.worker.group.traces:
        raise NotImplementedError(
            f"Keras models do not train under {type(strategy).__name__} yet: write the training step with torch, or "
            "use another strategy."
        )
    return strategy if strategy.num_replicas_in_sync > 1 or isinstance(strategy, ParameterServerStrategy) else None


@contextmanager
def _on_its_device(model: Any) -> Iterator[None]:
    """A strategy of one replica computes on its device, whichever one Keras would take."""
    strategy, inside = strategy_of(model), ALONE.active or current_replica() is not None
    if strategy is None or inside or strategy.num_replicas_in_sync > 1 or isinstance(strategy, ParameterServerStrategy):
        yield
        return
    device = strategy.worker.torch_device(0)
    bring_to(device, model)
    with keras.device(str(device)):
        yield


@contextmanager
def _with_functions(model: Any, **functions: Any) -> Iterator[None]:
    """Gives the model other step functions for a while; ``None`` lets Keras make its own."""
    before = {name: getattr(model, name, None) for name in _FUNCTIONS}
    for name in _FUNCTIONS:
        setattr(model, name, functions.get(name))
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(model, name, value)


@contextmanager
def _running(strategy: Strategy, model: Any) -> Iterator[Steps]:
    """The strategy in force, with the steps of one method; a failure is told to the other workers."""
    if model.steps_per_execution > 1:
        raise ValueError(
            f"steps_per_execution={model.steps_per_execution} is not possible on Keras' torch backend; leave it out of "
            "compile."
        )
    refuse_stateful(model, strategy.num_replicas_in_sync)
    steps = Steps(strategy, model)
    if getattr(model, "jit_compile", False) and model.compiled:
        warn_once("keras jit_compile", "jit_compile=True is not used under a strategy with several replicas.")
    functions = {"train_function": steps.train, "test_function": steps.test, "predict_function": steps.predict}
    device = keras.device(str(strategy.worker.torch_device(0)))
    with strategy.scope(), device, _with_functions(model, **functions), optimizers.claims_of(model):
        try:
            yield steps
        except BaseException as error:
            report_failure(strategy, error)
            raise


def _arguments(original: Method, model: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(original).bind(model, *args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    given.pop("self")
    given.update(given.pop("kwargs", {}))
    return given


# ---- the methods ------------------------------------------------------------------------------------------------


def _made(original: Method, self: Any) -> None:
    original(self)
    frame = current_frame()
    if frame is not None and frame.replica is None and frame.strategy is not default_strategy():
        _strategies[self] = cast(Strategy, frame.strategy)


def _compile(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    frame = current_frame()
    result = original(self, *args, **kwargs)
    if frame is not None and frame.replica is None:
        owner = strategy_of(self)
        if owner is not None and owner is not frame.strategy:
            raise mixing_error(owner, frame.strategy, "compiling a Keras model")
        _strategies[self] = cast(Strategy, frame.strategy)
    return result


def _train_step(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    if current_frame() is not None and strategy_of(self) is not None:
        refuse_training_in_run(self, "train_step")
    return original(self, *args, **kwargs)


def _fit(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _distributing(self, "fit", (args, kwargs))
    if strategy is None:
        with _on_its_device(self):
            return _by_keras(self, original, args, kwargs)
    given = _arguments(original, self, args, kwargs)
    if isinstance(strategy, ParameterServerStrategy):
        with _with_functions(self):
            return fit_on_servers(strategy, self, original, given)
    self._assert_compile_called("fit")
    with _running(strategy, self) as steps:
        _split_validation(given)
        validation = given["validation_data"]
        if validation is not None:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(validation)
            size = given["validation_batch_size"] or given["batch_size"]
            given["validation_data"] = input_of(strategy, x, y, weight, size, given["validation_steps"])
        batch_size, steps_per_epoch = given["batch_size"], given["steps_per_epoch"]
        data = input_of(
            strategy, given["x"], given["y"], given["sample_weight"], batch_size, steps_per_epoch,
            shuffle=given["shuffle"], class_weight=given["class_weight"],
        )  # fmt: skip
        given.update(x=data, y=None, sample_weight=None, class_weight=None)
        count = steps_per_epoch or data.num_batches
        given["callbacks"] = _callbacks(steps, given, history=True, epochs=given["epochs"], steps=count)
        return original(self, **given)


def _split_validation(given: dict[str, Any]) -> None:
    if given["validation_split"] and given["validation_data"] is None:
        whole = (given["x"], given["y"], given["sample_weight"])
        (x, y, weight), validation = train_validation_split(whole, validation_split=given["validation_split"])
        given.update(x=x, y=y, sample_weight=weight, validation_data=validation)
    given["validation_split"] = 0.0


def _evaluate(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _distributing(self, "evaluate", (args, kwargs))
    if strategy is None or isinstance(strategy, ParameterServerStrategy):
        return _as_keras(self, original, args, kwargs)
    given = _arguments(original, self, args, kwargs)
    if given.get("_use_cached_eval_dataset"):  # fit calls it
        return original(self, **given)
    with _running(strategy, self) as steps:
        data = input_of(strategy, given["x"], given["y"], given["sample_weight"], given["batch_size"], given["steps"])
        given.update(x=data, y=None, sample_weight=None)
        given["callbacks"] = _callbacks(steps, given, epochs=1, steps=given["steps"] or data.num_batches)
        return original(self, **given)


def _predict(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _distributing(self, "predict", (args, kwargs))
    if strategy is None or isinstance(strategy, ParameterServerStrategy):
        return _as_keras(self, original, args, kwargs)
    given = _arguments(original, self, args, kwargs)
    with _running(strategy, self) as steps:
        data = input_of(strategy, given["x"], None, None, given["batch_size"], given["steps"], builds=False)
        given["x"] = data
        given["callbacks"] = _callbacks(steps, given, epochs=1, steps=given["steps"] or data.num_batches)
        return original(self, **given)


def _on_batch(original: Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = _distributing(self, original.__name__, (args, kwargs))
    if strategy is None:
        return _as_keras(self, original, args, kwargs)
    if isinstance(strategy, ParameterServerStrategy):
        if original.__name__ == "train_on_batch":
            raise RuntimeError(
                "train_on_batch under ParameterServerStrategy: batches are trained on by the workers. Use "
                "fit(dataset_fn, steps_per_epoch=...)."
            )
        return _as_keras(self, original, args, kwargs)
    with _running(strategy, self) as steps:
        functions = {
            "train_function": lambda data: steps.train([divided(strategy, data[0])]),
            "test_function": lambda data: steps.test([divided(strategy, data[0])]),
            "predict_function": lambda data: steps.predict([divided(strategy, data[0])]),
        }
        with _with_functions(self, **functions):
            return original(self, *args, **kwargs)


def _as_keras(model: Any, original: Method, args: Any, kwargs: Any) -> Any:
    """The method as it was; inside a callback without the step functions of the ``fit`` around it."""
    if not ALONE.active or kwargs.get("_use_cached_eval_dataset"):
        with _on_its_device(model):
            return _by_keras(model, original, args, kwargs)
    with _with_functions(model):
        return _by_keras(model, original, args, kwargs)


def _by_keras(model: Any, original: Method, args: Any, kwargs: Any) -> Any:
    """Keras' own loop, which is given the batches of a distributed dataset one by one."""
    if original.__name__ in ("fit", "evaluate", "predict"):
        given = _arguments(original, model, args, kwargs)
        changed = batches_for_keras(strategy_of(model), given, ALONE.active)
        if changed:
            return original(model, **{**given, **changed})
    return original(model, *args, **kwargs)


def _callbacks(made: Steps, given: dict[str, Any], history: bool = False, **params: Any) -> Any:
    """The list of callbacks: of several workers the chief runs them."""
    if made.strategy.worker.group.size == 1:
        return given["callbacks"]
    return SharedCallbacks(made, given["callbacks"], given["verbose"], history, params)


_WRAPPERS = {
    "compile": _compile,
    "train_step": _train_step,
    "fit": _fit,
    "evaluate": _evaluate,
    "predict": _predict,
    "train_on_batch": _on_batch,
    "test_on_batch": _on_batch,
    "predict_on_batch": _on_batch,
}
