"""Optimizers that were made before a layer was divided: they hold the parameters that it had before."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tfstyle_dist.comm import mesh
from tfstyle_dist.core import torch_internals
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import Record


def check_not_replaced(optimizer: torch.optim.Optimizer, records: Sequence[Record]) -> None:
    """Refuses an optimizer that would train what the model does not have any more.

    Args:
        optimizer: about to make a step.
        records: of its parameters.

    Raises:
        RuntimeError: modules have divided parameters in the place of some of them.
    """
    replaced = []
    for record in records:
        module = None if record.module is None else record.module()
        now = None if module is None else torch_internals.parameters_of(module).get(record.local_name)
        if mesh.is_divided(now) and now is not record.tensor:
            known = find_record(now)
            replaced.append(record.local_name if known is None else known.store.name_of(known))
    if replaced:
        raise RuntimeError(
            f"{type(optimizer).__name__} was made before the model was divided: it holds the parameters that were "
            f"there before of {', '.join(replaced[:4])}{', ...' * (len(replaced) > 4)}, and a step would train nothing "
            "of these layers. Make the optimizer after experimental_partition and tensor_split."
        )
