"""From the arguments of ``fit``, ``evaluate`` and ``predict`` to the data of a loop."""

from __future__ import annotations

from typing import Any

from tfstyle_dist.integrations.keras.backend import get_data_adapter, keras
from tfstyle_dist.integrations.keras.batches import as_batches
from tfstyle_dist.integrations.keras.data import DistributedInput
from tfstyle_dist.strategies.base import Strategy


def input_of(
    strategy: Strategy, x: Any, y: Any, weight: Any, size: Any, steps: Any, *, builds: bool = True, **options: Any
) -> DistributedInput:
    """The data of a loop on several replicas.

    Args:
        strategy: whose replicas.
        x: of the method.
        y: of the method.
        weight: its ``sample_weight``.
        size: its ``batch_size``.
        steps: how many to take.
        builds: the first pass serves to build the model.
        options: further arguments of Keras' adapters.

    Raises:
        ValueError: data of a kind that there is no adapter for, or without examples.
    """
    x = as_batches(strategy, x, steps, y=y, sample_weight=weight, class_weight=options.get("class_weight"))
    if callable(x) and not hasattr(x, "__iter__") and not hasattr(x, "__getitem__"):
        raise ValueError(
            f"x is a function ({x!r}), which {type(strategy).__name__} does not take: give arrays, a DataLoader or a "
            "PyDataset of global batches, or DatasetCreator(function). A dataset function is for "
            "ParameterServerStrategy."
        )
    adapter = get_data_adapter(
        x=x, y=y, sample_weight=weight, batch_size=size, steps_per_epoch=steps, shuffle=options.pop("shuffle", False),
        **options,
    )  # fmt: skip
    if adapter.num_batches == 0:
        raise ValueError(
            f"The data has no examples: {_described(x)}. Give at least one example, or leave the call out where there "
            "are none."
        )
    return DistributedInput(strategy, adapter, builds)


def _described(x: Any) -> str:
    shapes = [tuple(leaf.shape) for leaf in keras.tree.flatten(x) if hasattr(leaf, "shape")]
    return f"x has the shape {', '.join(map(str, shapes))}" if shapes else f"x is a {type(x).__name__} without batches"


def batches_for_keras(strategy: Strategy | None, given: dict[str, Any], alone: bool = False) -> dict[str, Any]:
    """The arguments of a method that Keras' own loop computes, which knows no distributed dataset.

    Args:
        strategy: of the model.
        given: the arguments by name.
        alone: this worker computes without the others.

    Returns:
        Those that were changed.

    Raises:
        ValueError: see ``batches.as_batches``.
    """
    beside = {name: given.get(name) for name in ("y", "sample_weight", "class_weight")}
    steps = given.get("steps_per_epoch", given.get("steps"))
    changed = {"x": as_batches(strategy, given.get("x"), steps, alone, **beside)}
    if given.get("validation_data") is not None:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(given["validation_data"])
        batches = as_batches(strategy, x, given.get("validation_steps"), alone, y=y, sample_weight=weight)
        if batches is not x:
            changed["validation_data"] = batches
    return {name: value for name, value in changed.items() if value is not given.get(name)}
