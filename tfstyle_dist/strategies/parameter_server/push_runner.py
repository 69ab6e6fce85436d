"""``optimizer.step()`` under parameter servers, and what of an optimizer is refused there."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, MutableMapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch

from tfstyle_dist.core import torch_internals
from tfstyle_dist.core.logging import warn_once
from tfstyle_dist.gradients.optimizer_step import TOLD_BY_SCALERS, UpdateRunner, around_closure
from tfstyle_dist.gradients.update_shards import has_step_hooks, is_divided, is_elementwise
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.parameter_server.server.optimizer_rules import name_of
from tfstyle_dist.strategies.parameter_server.optimizer_state import ServerState
from tfstyle_dist.variables import Record
from tfstyle_dist.variables.known_tensors import find_record
from tfstyle_dist.variables.record import raw

_hooks_of = attrgetter(*torch_internals.HOOKS)

if TYPE_CHECKING:
    from tfstyle_dist.strategies.parameter_server.strategy import ParameterServerStrategy


def check_parameters(optimizer: Any, told: MutableMapping[Any, Any]) -> None:
    """Compares the parameters of a ``torch.optim`` optimizer with those of which the servers were told.

    Args:
        optimizer: any, in the coordinator's program.
        told: these parameters by optimizer; a new optimizer is added.

    Raises:
        TypeError: some are not on the servers.
        ValueError: they are others now.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    keys: list[list[int]] = []
    shards: list[int] = []
    servers: set[int] = set()
    for group in optimizer.param_groups:
        keys.append([])
        for parameter in group["params"]:
            record = find_record(parameter)
            if not isinstance(record, RemoteRecord):
                raise TypeError(
                    f"{type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} that is not on the "
                    "parameter servers: each worker would train a copy of its own, and nobody would see it. Build the "
                    "module in strategy.scope(), and then the optimizer."
                )
            keys[-1].append(record.key)
            shards.append(len(record.shards))
            servers.update(shard.server for shard in record.shards)
    if optimizer not in told:
        _warn_of_parts(optimizer, max(shards, default=1), len(servers))
    if told.setdefault(optimizer, keys) != keys:
        raise ValueError(
            f"The parameters of {type(optimizer).__name__} have changed since the parameter servers were told of them: "
            "add_param_group() was called, or others have taken their places. Make a new optimizer of the parameters "
            "that there are now, and schedule a function that uses it."
        )


def _warn_of_parts(optimizer: torch.optim.Optimizer, shards: int, servers: int) -> None:
    """Says that a rule which is not known may need more than a server has."""
    elementwise = is_elementwise(optimizer) or type(optimizer) is torch.optim.SparseAdam  # each of the rows it is given
    if (elementwise or shards == 1) and (is_divided(optimizer) or servers == 1):
        return
    kind = type(optimizer).__name__
    warn_once(
        f"parts of {kind}",
        f"Each of {servers} parameter servers makes the steps of {kind} with the parameters"
        + (f" and shards (up to {shards} of one parameter)" if shards > 1 else "")
        + f" that it holds. {kind} is not known to treat every element for itself: what it computes over a whole "
        "parameter, or over all of them, such as a norm, is that of one server's part. Use one server or no "
        f"partitioner; if it does treat them so, set elementwise = True in the class of {kind}.",
    )


def check_hooks(optimizers: Iterable[Any]) -> None:
    """Looks for hooks of the coordinator's program that would not be called where a function runs.

    Args:
        optimizers: that scheduled functions use.

    Raises:
        TypeError: one has some, or one of its parameters.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            continue
        _check_step_hooks(optimizer, has_step_hooks(optimizer))
        check_hooks_of([parameter for group in optimizer.param_groups for parameter in group["params"]])


def check_hooks_of(parameters: Sequence[torch.Tensor]) -> None:
    """The same for the parameters of a module that a function uses."""
    with raw():  # nothing is pulled
        records = map(find_record, parameters)
        hooked = next((r for r in records if r is not None and any(_hooks_of(r.components[0]))), None)
    if hooked is not None:
        raise TypeError(
            f"The parameter {hooked.describe()!r} has a hook of the coordinator's program (register_hook or "
            "register_post_accumulate_grad_hook). Scheduled functions run on workers, whose parameters do not have it. "
            "Register it in the function, and remove it there, or change p.grad there before optimizer.step()."
        )


def _check_step_hooks(optimizer: torch.optim.Optimizer, hooked: bool) -> None:
    if hooked:
        kind = name_of(optimizer)
        raise TypeError(
            f"{kind} has a hook that was registered with register_step_pre_hook or register_step_post_hook, or with "
            "torch.optim.optimizer.register_optimizer_step_pre_hook or ..._post_hook for all optimizers. Under "
            "parameter servers step() sends the gradients before such hooks are called, and the servers make the step "
            "without them. Do what the hook does in the function, before optimizer.step()."
        )


def _told_by_a_scaler(optimizer: torch.optim.Optimizer, pairs: list[tuple[Any, torch.Tensor]]) -> bool:
    """Divides gradients in place as a fused step would; returns whether there is a step: they may be infinite."""
    scale, infinite = (getattr(optimizer, name, None) for name in TOLD_BY_SCALERS)
    if infinite is not None and infinite.item():
        return False
    if scale is not None:
        for _, gradient in pairs:
            gradient.div_(scale.item())
    return True


def _with_closure_called(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    """The arguments of a step whose closure has been called: in its place is one that gives its loss.

    Raises:
        TypeError: the step has other arguments.
        RuntimeError: the optimizer is not torch's, and may call its closure more than once.
    """
    kind = name_of(optimizer)
    if others := [*map(repr, args[2:]), *(name for name in kwargs if name != "closure")]:
        raise TypeError(
            f"{kind}.step() was called with {', '.join(others)}. Parameter servers make the step, and call it without "
            "arguments. Set what it is to know in the groups of the optimizer."
        )
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        return None
    if not _is_of_torch(optimizer):
        raise RuntimeError(
            f"{kind}.step(closure) under a parameter server: {kind} is not of torch.optim, and may call its "
            "closure more than once, which servers cannot. Call backward() first, then step() alone."
        )
    with torch.enable_grad():
        loss = closure()
    return around_closure(lambda _: loss, args, kwargs)


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _may_count(optimizer: Any) -> bool:
    """Whether an optimizer may have a number of steps that is not kept for each parameter."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return not _is_of_torch(optimizer)
    return bool(getattr(optimizer, "common_state", dict)())


class PushRunner(UpdateRunner):
    """``optimizer.step()`` sends the gradients; the step itself happens on the servers."""

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        super().__init__(strategy)
        self._kept: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._settings: dict[int, list[dict[str, Any]]] = {}
        self._pushed_to: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def before_step(self, optimizer: torch.optim.Optimizer, records: list[Record], args: Any, kwargs: Any) -> Any:
        """Pushes, and takes the gradients away so that the local step changes nothing."""
        strategy = cast("ParameterServerStrategy | None", self._strategy())
        if strategy is None:
            return None
        if isinstance(optimizer, torch.optim.LBFGS):
            raise RuntimeError("torch.optim.LBFGS needs the loss again and again, which a parameter server has not.")
        _check_step_hooks(optimizer, has_step_hooks(optimizer, before=True))
        changed = _with_closure_called(optimizer, args, kwargs)
        pairs: list[tuple[Any, torch.Tensor]] = [
            (r, r.components[0].grad) for r in records if r.components[0].grad is not None
        ]
        if strategy.cluster_resolver is not None:  # on the coordinator, where a scheduler may have changed them
            strategy.send_hyperparameters()
            self._settings[id(optimizer)] = [dict(group) for group in optimizer.param_groups]
            if not pairs:
                warn_once(
                    "a step without gradients",
                    f"{type(optimizer).__name__}.step() in the coordinator's program found no gradients and changed "
                    "nothing: those of scheduled functions are on the workers. Call step() in the function, after "
                    "backward().",
                )
        if isinstance(optimizer.state, ServerState):
            optimizer.state.begin_step()
        if pairs and _told_by_a_scaler(optimizer, pairs):
            strategy.push_gradients(optimizer, pairs)
        self._kept[id(optimizer)] = pairs
        for record, _ in pairs:
            record.components[0].grad = None
        return changed

    def after_step(self, optimizer: torch.optim.Optimizer, records: list[Record]) -> None:
        """Gives the gradients back, and the settings, in which a step without gradients may have counted."""
        if isinstance(optimizer.state, ServerState):
            optimizer.state.end_step()
        for record, grad in self._kept.pop(id(optimizer), ()):
            record.components[0].grad = grad
        for group, before in zip(optimizer.param_groups, self._settings.pop(id(optimizer), ()), strict=False):
            group.update(before)

    def push(self, optimizer: Any, pairs: Sequence[tuple[RemoteRecord, torch.Tensor]]) -> None:
        """Sends gradients, and says so if the optimizer may count steps of which a server does not learn.

        Args:
            optimizer: makes one step with them on each server that gets some.
            pairs: tensors and their gradients.
        """
        strategy = cast("ParameterServerStrategy", self._strategy())
        number = strategy.optimizer_number(optimizer)
        if _may_count(optimizer):
            servers = {shard.server for record, _ in pairs for shard in record.shards}
            if self._pushed_to.setdefault(optimizer, servers) != servers:
                kind = name_of(optimizer)
                warn_once(
                    f"steps of {kind}",
                    f"Not every step of {kind} has gradients for the same parameter servers. Each makes the steps of "
                    "its own parameters, so what the optimizer counts for all of them together, such as the steps in "
                    "the correction of Adam's moments, is what that server has seen. Use one optimizer for each set "
                    "of parameters that is trained together, or one server.",
                )
        strategy.servers.push(number, pairs)
