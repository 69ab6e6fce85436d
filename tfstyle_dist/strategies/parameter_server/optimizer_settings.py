"""The settings of optimizers under parameter servers: learning rates and the like, of which the tasks are told."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.server.optimizer_rules import name_of
from tfstyle_dist.strategies.parameter_server.optimizer_state import send_state

if TYPE_CHECKING:
    from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


def hyperparameters(optimizer: Any) -> list[dict[str, Any]] | None:
    """The settings of each group of a ``torch.optim`` optimizer, as far as they are plain values.

    Another optimizer may tell its own (``hyperparameters()``), and takes them over on the servers.

    Raises:
        NotImplementedError: a group holds a tensor of several elements.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.hyperparameters() if hasattr(optimizer, "hyperparameters") else None
    groups = optimizer.param_groups
    return [{k: _setting(optimizer, k, v) for k, v in group.items() if k != "params"} for group in groups]


def _setting(optimizer: torch.optim.Optimizer, name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise NotImplementedError(
            f"The parameter groups of {name_of(optimizer)} hold a tensor of shape {tuple(value.shape)} in {name!r}. "
            "Parameter servers make its steps, and they are told of settings that are numbers or texts. Let step() "
            "make such a tensor in self.state[parameter], which the servers keep."
        )
    return _plain(value)


def references_of(optimizer: Any) -> Callable[[Any], Any]:
    """What stands for the parameters of an optimizer where it is pickled for the servers: their shards.

    The function raises TypeError for what an optimizer that has no parameters of its own refers to.
    """

    def reference(value: Any) -> Any:
        record = getattr(value, "_tfstyle_record", None) if isinstance(value, torch.Tensor) else None
        if not isinstance(record, RemoteRecord):
            return None
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"{name_of(optimizer)} has {record.describe()!r}, which is on parameter servers, for its learning rate "
                "or another setting. Each server makes the steps of its own variables and cannot read this one. Give a "
                "number, or a function that returns one without variables; for a rate that the program changes use an "
                "optimizer of torch.optim, and set param_groups[0]['lr'] between two calls of schedule()."
            )
        return "shards", [shard.number for shard in record.shards]

    return reference


def changes(
    optimizer: Any, before: Sequence[Mapping[str, Any]] | None, now: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]] | None]:
    """What the servers are told of new settings, and what was there before: of ``torch.optim`` optimizers only these.

    A rule may count in its groups, and the servers alone make its steps.
    """
    if before is None:
        return {"groups": now, "before": None}
    groups, old = now, [dict(group) for group in before]
    if isinstance(optimizer, torch.optim.Optimizer):
        pairs = list(zip(before, now, strict=True))
        groups = [{k: v for k, v in new.items() if k not in old or old[k] != v} for old, new in pairs]
        old = [{k: group[k] for k in new if k in group} for group, new in zip(before, groups, strict=True)]
    return {"groups": groups, "before": old}


def settings_for_workers(strategy: ParameterServerStrategy) -> dict[int, list[dict[str, Any]]]:
    """The settings of ``torch.optim`` optimizers by their numbers, as the servers have them for functions from now on.

    A list is another one when something in it is new. Workers take plain values (``only_plain``).
    """
    strategy.send_hyperparameters(for_functions=True)
    found: dict[int, list[dict[str, Any]]] = {}
    for optimizer, groups in list(strategy.sent_hyperparameters.items()):
        send_state(optimizer)
        number = strategy.known_optimizer_number(optimizer)
        if number is not None and isinstance(optimizer, torch.optim.Optimizer):
            found[number] = groups
    return found


def only_plain(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that a worker can be told alone: numbers, texts, and lists of these."""
    return [{name: value for name, value in group.items() if _can_be_told(value)} for group in groups]


def _can_be_told(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_can_be_told, value))
    return value is None or isinstance(value, bool | int | float | str)


def take_settings(
    strategy: ParameterServerStrategy, settings: MutableMapping[int, Sequence[Mapping[str, Any]]]
) -> None:
    """On a worker: a function that reads the rate of its optimizer sees the one of the coordinator's program.

    Args:
        strategy: of the worker.
        settings: by number; those of optimizers that are here are taken out.
    """
    for number in [number for number in settings if number in strategy.known_optimizers]:
        optimizer = strategy.known_optimizers[number]
        for group, new in zip(optimizer.param_groups, settings.pop(number), strict=True):
            for name, value in new.items():
                old = group.get(name)
                if _plain(old) == value:
                    continue
                if isinstance(old, torch.Tensor):
                    group[name] = torch.full_like(old, value)
                else:
                    group[name] = tuple(value) if isinstance(old, tuple) else value
        strategy.sent_hyperparameters[optimizer] = hyperparameters(optimizer)


def check_unchanged(sent: Mapping[Any, Sequence[Mapping[str, Any]] | None]) -> None:
    """Compares the settings of the optimizers of a worker with those with which they came.

    Args:
        sent: by optimizer, what ``hyperparameters`` gave then.

    Raises:
        RuntimeError: a function has changed some; the servers, which make the steps, would not learn of that.
    """
    for optimizer, before in list(sent.items()):
        if not isinstance(optimizer, torch.optim.Optimizer) or (now := hyperparameters(optimizer)) == before:
            continue
        pairs = zip(before or (), now or (), strict=False)
        changed = {key: (old.get(key), new[key]) for old, new in pairs for key in new if old.get(key) != new[key]}
        what = ", ".join(f"{key!r} from {old} to {new}" for key, (old, new) in changed.items()) or "its groups"
        raise RuntimeError(
            f"A scheduled function changed settings of {name_of(optimizer)}: {what}. Parameter servers make its "
            "steps, and they learn of settings from the coordinator's program alone. Change them there, between two "
            "calls of schedule(), and make and step learning rate schedulers there too."
        )


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return float(value)
    return list(value) if isinstance(value, tuple) else value
