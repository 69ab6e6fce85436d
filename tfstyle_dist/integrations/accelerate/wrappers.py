"""What stands around a model in the place of ``DistributedDataParallel``, or inside it.

accelerate and transformers take off a subclass of ``torch.nn.DataParallel`` when they want the model itself, and leave
any other wrapper on.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tfstyle_dist.core.devices import made_current
from tfstyle_dist.cross_device_ops import CrossDeviceOps
from tfstyle_dist.cross_device_ops.collective import sum_parts
from tfstyle_dist.integrations.accelerate.auxiliary_losses import AuxiliaryLosses
from tfstyle_dist.integrations.accelerate.upstream import map_tensors

if TYPE_CHECKING:
    from tfstyle_dist.strategies import Strategy


class Wrapped(torch.nn.DataParallel[torch.nn.Module]):
    """Calls the model, and shows its state under the model's own names.

    Args:
        module: the model.
        strategy: what it trains under.
    """

    def __init__(self, module: torch.nn.Module, strategy: Strategy) -> None:
        torch.nn.Module.__init__(self)
        self.module, self._strategy = module, [strategy]  # a list, so that no state_dict looks into it
        self.register_load_state_dict_pre_hook(_with_own_prefix)  # type: ignore[no-untyped-call]

    @property
    def strategy(self) -> Strategy:
        """What the model trains under."""
        return self._strategy[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own."""
        return self.module(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own: no ``module.`` before the names."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the names of ``state_dict``."""
        return self.module.load_state_dict(*args, **kwargs)


def _with_own_prefix(_: torch.nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Where a module around this one is loaded: the names of ``state_dict`` as torch looks for them."""
    names = [name for name in state if name.startswith(prefix)]
    if any(name.startswith(f"{prefix}module.") for name in names):
        return  # as DataParallel names them
    for name in names:
        state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


class Adopted(Wrapped):
    """A model whose parameters belong to the strategy, which makes the gradients equal by the end of ``backward()``."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, each tensor in memory of its own.

        The one copy of central storage lies in one piece, and who saves it would take its tensors for one and the same.
        """
        state = super().state_dict(*args, **kwargs)
        copies: dict[Any, torch.Tensor] = {}
        for name, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > tensor.nbytes:
                key = tensor.data_ptr(), tensor.shape, tensor.stride()  # tied parameters stay tied
                state[name] = copies.setdefault(key, tensor.detach().clone())
        return state

    def no_sync(self) -> AbstractContextManager[None]:
        """Inside, ``backward()`` keeps gradients local; ``Accelerator.accumulate`` and ``no_sync`` enter it."""
        return self.strategy.accumulate()


class LocalReplicas(Wrapped):
    """Each call divides the batch over the strategy's local replicas; their gradients are summed by the strategy.

    The parameters stay where they are. A replica computes with copies on its device (on the same device: with the
    parameters' own memory) and its gradients come back by autograd, added in the order of the aggregation method. The
    replicas run one after the other, and each begins with the same buffers. The first replica's are kept, as
    ``DataParallel`` does. Of losses that the forward leaves in attributes the mean is (``AuxiliaryLosses``).

    Args:
        module: the model.
        strategy: gives devices and aggregation method.
        divides: False leaves the whole batch to the first replica.
    """

    def __init__(self, module: torch.nn.Module, strategy: Strategy, divides: bool = True) -> None:
        super().__init__(module, strategy)
        self._divides = divides

    @property
    def is_elsewhere(self) -> bool:
        """Whether a parameter is not on the first replica's device."""
        device = self.strategy.worker.torch_device(0)
        return any(parameter.device != device for parameter in self.module.parameters())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the shares, put together along dimension 0 on the first replica's device.

        Raises:
            TypeError: an output that cannot be put together.
        """
        worker = self.strategy.worker
        count = _count_examples((args, kwargs))
        replicas = worker.num_local_replicas if self._divides else 1
        cuts = [count * place // replicas for place in range(replicas + 1)]
        shares = [(start, stop) for start, stop in itertools.pairwise(cuts) if stop > start] or [(0, count)]
        devices = [worker.torch_device(place) for place in range(len(shares))]
        parameters = dict(self.module.named_parameters())
        names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        trained = [parameters.pop(name) for name in names]
        copies = _Spread.apply(tuple(devices), self.strategy.cross_device_ops, *trained)  # type: ignore[no-untyped-call]
        weights = [(stop - start) / max(count, 1) for start, stop in shares]
        buffers = [self._buffers_for(place, device) for place, device in enumerate(devices)]
        outputs, losses = [], AuxiliaryLosses(self.module)
        for place, (share, device) in enumerate(zip(shares, devices, strict=True)):
            own = dict(zip(names, copies[place * len(names) : (place + 1) * len(names)], strict=True)) | buffers[place]
            own |= {name: frozen.detach().to(device) for name, frozen in parameters.items()}
            mine, named = map_tensors(partial(_cut, share, count, device), (args, kwargs))
            if named.get("num_items_in_batch") is not None:
                # The Trainer says by how many tokens the model divides its sum. By its part of them, so that the
                # mean of the shares' losses is the loss of the whole batch.
                named["num_items_in_batch"] = named["num_items_in_batch"] * weights[place]
            with made_current(device):
                outputs.append(torch.func.functional_call(self.module, own, mine, named))
            losses.take()
        if len(outputs) == 1:
            return outputs[0]
        losses.combine(weights)
        return _together(outputs, weights, devices[0])

    def _buffers_for(self, place: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Copies of the buffers for a replica; none where it can use the model's own."""
        if place == 0 and all(buffer.device == device for buffer in self.module.buffers()):
            return {}
        return {name: buffer.detach().to(device, copy=True) for name, buffer in self.module.named_buffers()}


def _count_examples(data: Any) -> int:
    """The length of the first tensor that is no single number; 0 without one."""
    lengths: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() > 0:
            lengths.append(tensor.shape[0])
        return tensor

    map_tensors(note, data)
    return lengths[0] if lengths else 0


def _cut(share: tuple[int, int], count: int, device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A replica's share of a tensor that has one entry for each example of the batch."""
    whole = tensor.dim() == 0 or tensor.shape[0] != count
    return (tensor if whole else tensor[slice(*share)]).to(device)


class _Spread(torch.autograd.Function):
    """A copy of every parameter for each replica; backward sums the replicas' gradients."""

    @staticmethod
    def forward(ctx: Any, devices: tuple[torch.device, ...], ops: CrossDeviceOps, *parameters: torch.Tensor) -> Any:
        ctx.replicas, ctx.ops = len(devices), ops
        ctx.homes = [p.device for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p.detach().to(device) for device in devices for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        count, ops = len(ctx.homes), ctx.ops
        sums: list[torch.Tensor | None] = []
        for place, home in enumerate(ctx.homes):
            parts = [gradients[replica * count + place] for replica in range(ctx.replicas)]
            there = [part.to(home) for part in parts if part is not None]
            alone = len(there) == 1 and ops.own_sum is None
            whole = there[0] if alone else sum_parts(there, ops.aggregation_method, ops.own_sum) if there else None
            sums.append(whole)
        return (None, None, *sums)


def _together(outputs: Sequence[Any], weights: Sequence[float], device: torch.device) -> Any:
    """One output from those of the shares: tensors one after the other, single numbers as the mean over examples."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        moved = [o.to(device) for o in outputs]
        if first.dim() > 0:
            return torch.cat(moved)
        return torch.stack([o * weight for o, weight in zip(moved, weights, strict=True)]).sum()
    if isinstance(first, Mapping):
        merged = {key: _together([o[key] for o in outputs], weights, device) for key in first}
        return type(first)(**merged) if hasattr(first, "to_tuple") else type(first)(merged)  # type: ignore[call-arg]
    if isinstance(first, list | tuple):
        entries = [_together(list(column), weights, device) for column in zip(*outputs, strict=True)]
        return type(first)(*entries) if hasattr(first, "_fields") else type(first)(entries)
    what = f"a {type(first).__name__}"
    if first is None or isinstance(first, bool | int | float | str):
        if all(o == first for o in outputs):
            return first
        what = f"{', '.join(map(repr, outputs))} on its replicas"
    raise TypeError(
        f"The model returned {what}, which cannot be put together from {len(outputs)} local replicas. Return tensors, "
        "or lists, tuples and dicts of them (a transformers model: config.use_cache=False), or use one replica for "
        "each process."
    )
