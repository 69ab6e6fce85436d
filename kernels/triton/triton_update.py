"""Sums of gradients and a step of the optimizer in one launch: the summed gradient is not written to memory.

The formulas are those of ``torch.optim`` for one tensor at a time, in float32: results agree with a sum followed by an
optimizer's step to a few roundings. Half precision gradients are not rounded before they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from tfstyle_dist_kernels.triton import triton_plan, triton_sum
from tfstyle_dist_kernels.triton.triton_views import check_tensors, make_flat

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16)


@torch.no_grad()
def sum_and_sgd(
    contributions: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    order: str,
    *,
    lr: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    is_first_step: bool = False,
    divisor: int | float | None = None,
    scale: Tensor | None = None,
) -> None:
    """Sums gradients and makes the step of ``torch.optim.SGD`` with them.

    Args:
        contributions: ``contributions[t][i]`` is contribution i to the gradient of parameter t (see ``sum_lists``):
            float32, float16 or bfloat16.
        parameters: updated in place: float32, or the contributions' dtype. Dense.
        momentum_buffers: one for each parameter, in its layout, all float32 or all of the parameters' dtype; ``None``
            if ``momentum`` is 0.
        order: as for ``sum_lists``.
        lr: as for ``torch.optim.SGD``, like ``momentum``, ``dampening``, ``weight_decay`` and ``nesterov``.
        momentum: see ``lr``.
        dampening: see ``lr``.
        weight_decay: see ``lr``.
        nesterov: see ``lr``.
        is_first_step: the momentum buffers hold nothing yet; they are set to the gradients.
        divisor: as for ``sum_lists``.
        scale: as for ``sum_lists``.

    Raises:
        RuntimeError: as for ``sum_lists``.
        ValueError: as for ``sum_lists``; or momentum and momentum buffers do not go together.

    Example:
        >>> sum_and_sgd(gradients, parameters, None, "add_n", lr=0.1, divisor=2)  # doctest: +SKIP
    """
    if (momentum != 0) != (momentum_buffers is not None):
        raise ValueError(
            f"momentum is {momentum} but there are {'no ' if momentum_buffers is None else ''}momentum buffers: give "
            "both or neither"
        )
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(f"nesterov needs a momentum and no dampening, not {momentum} and {dampening}")
    states = [] if momentum_buffers is None else [momentum_buffers]
    constants = {
        "MOMENTUM": 0 if momentum_buffers is None else 1 if is_first_step else 2,
        "NESTEROV": nesterov,
        "DECAY": weight_decay != 0,
    }
    numbers = (lr, momentum, 1 - dampening, weight_decay)
    _launch("sgd_kernel", contributions, parameters, states, order, numbers, constants, divisor, scale)


@torch.no_grad()
def sum_and_adam(
    contributions: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    order: str,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    is_decoupled: bool = False,
    divisor: int | float | None = None,
    scale: Tensor | None = None,
) -> None:
    """Sums gradients and makes the step of ``torch.optim.Adam`` or ``AdamW`` with them.

    Args:
        contributions: as for ``sum_and_sgd``.
        parameters: as for ``sum_and_sgd``.
        exp_avgs: the averages of the gradients, one for each parameter, in its layout, all float32 or all of the
            parameters' dtype; zeros before the first step.
        exp_avg_sqs: the averages of their squares, of the dtype of ``exp_avgs``.
        order: as for ``sum_lists``.
        step: the number of this step, from 1.
        lr: as for ``torch.optim.Adam``, like ``betas``, ``eps`` and ``weight_decay``.
        betas: see ``lr``.
        eps: see ``lr``.
        weight_decay: see ``lr``.
        is_decoupled: the weight decay of ``AdamW``, which is not part of the gradient.
        divisor: as for ``sum_lists``.
        scale: as for ``sum_lists``.

    Raises:
        RuntimeError: as for ``sum_lists``.
        ValueError: as for ``sum_lists``; or ``step`` is below 1.

    Example:
        >>> sum_and_adam(gradients, parameters, m, v, "tree", step=1, lr=1e-3, divisor=2)  # doctest: +SKIP
    """
    if step < 1:
        raise ValueError(f"step is {step}: count from 1")
    beta_1, beta_2 = betas
    numbers = (
        lr / (1 - beta_1**step),
        1 - lr * weight_decay,
        1 - beta_1,
        beta_2,
        1 - beta_2,
        math.sqrt(1 - beta_2**step),
        eps,
        weight_decay,
    )
    constants = {"DECAY": 0 if weight_decay == 0 else 2 if is_decoupled else 1}
    states = [exp_avgs, exp_avg_sqs]
    _launch("adam_kernel", contributions, parameters, states, order, numbers, constants, divisor, scale)


def _launch(
    kernel: str,
    contributions: Sequence[Sequence[Tensor]],
    parameters: Sequence[Tensor],
    states: Sequence[Sequence[Tensor]],
    order: str,
    numbers: tuple[float, ...],
    constants: dict[str, Any],
    divisor: int | float | None,
    scale: Tensor | None,
) -> None:
    n = triton_sum.check_lists(contributions, parameters, order)
    if n == 0:
        return
    is_plain = check_tensors(contributions, parameters, divisor)
    triton_sum.check_device(parameters[0].device, scale)
    _check_states(contributions[0][0], parameters, states)
    if not is_plain:
        contributions, _, copies = make_flat(contributions, parameters)
        if copies:
            raise ValueError("a parameter is not dense: its elements have gaps or share memory")
    constants |= triton_sum.kernel_constants(order, n, contributions[0][0].dtype, parameters[0].dtype)
    del constants["ACC"]  # float32
    constants["STATE"] = triton_sum.triton_dtype((states[0] if states else parameters)[0].dtype)
    constants |= {"DIVIDE": divisor is not None, "SCALE": scale is not None}
    key = triton_plan.plan_key([*zip(*contributions, strict=True), parameters, *states], divisor, constants["BLOCK"])
    plan = triton_plan.find_plan(key)
    if plan is None:
        triton_plan.check_apart(key, num_written=1 + len(states))
        plan = triton_plan.build_plan(key)
    triton_sum.launch(kernel, plan, (n, len(parameters), *map(float, numbers)), scale, constants)


def _check_states(first: Tensor, parameters: Sequence[Tensor], states: Sequence[Sequence[Tensor]]) -> None:
    if first.dtype not in _DTYPES:
        raise ValueError(f"gradients of {first.dtype} have no update here: give float32, float16 or bfloat16")
    for state in states:
        if len(state) != len(parameters):
            raise ValueError(f"there are {len(state)} tensors of optimizer state for {len(parameters)} parameters")
        for index, (tensor, parameter) in enumerate(zip(state, parameters, strict=True)):
            is_alike = tensor.stride() == parameter.stride() or (tensor.is_contiguous() and parameter.is_contiguous())
            if tensor.shape != parameter.shape or not is_alike:
                raise ValueError(
                    f"the state of parameter {index} has shape {tuple(tensor.shape)} and strides {tensor.stride()} but "
                    f"the parameter has {tuple(parameter.shape)} and {parameter.stride()}"
                )
            if tensor.device != parameter.device:
                raise ValueError(f"the state of parameter {index} is on {tensor.device}, not on {parameter.device}")
            if tensor.dtype != states[0][0].dtype or tensor.dtype not in (torch.float32, parameter.dtype):
                raise ValueError(
                    f"the state of parameter {index} has dtype {tensor.dtype}: all must have float32, or the "
                    f"parameters' {parameter.dtype}"
                )
