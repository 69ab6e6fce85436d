"""What a step does from its gradients on: optimizers, writes to weights, schedulers, and what it keeps."""

from __future__ import annotations

import copy

import torch
from inside_backward import loss_of
from objects import GROUPINGS, OPTIMIZERS, Holder, Program, picked
from operations import AFTER, BEFORE, UPDATE, StepRun, inside
from torch import nn

# ---- updates --------------------------------------------------------------------------------------------------------


@inside(UPDATE, odds=5)
def step(program: Program, run: StepRun, number: int) -> None:
    program.optimizer.step()


@inside(UPDATE)
def step_with_closure(program: Program, run: StepRun, number: int) -> None:
    def closure() -> torch.Tensor:
        program.optimizer.zero_grad()
        loss = loss_of(program, run)
        run.exchange.backward(loss, program)
        return loss

    program.optimizer.step(closure)


@inside(UPDATE)
def update_by_hand(program: Program, run: StepRun, number: int) -> None:
    with torch.no_grad():
        for parameter in program.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad


@inside(UPDATE)
def update_data_by_hand(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        if parameter.grad is not None:
            parameter.data.add_(parameter.grad, alpha=-0.01)


@inside(AFTER)
def step_second_optimizer(program: Program, run: StepRun, number: int) -> None:
    if program.has("second"):
        program.second.step()


@inside(AFTER)
def step_with_momentum_by_hand(program: Program, run: StepRun, number: int) -> None:
    parameters = program.parameters()
    if not program.has("momentum") or len(program.momentum) != len(parameters):
        return
    with torch.no_grad():
        for momentum, parameter in zip(program.momentum, parameters, strict=True):
            if parameter.grad is None or momentum.shape != parameter.shape:
                continue
            momentum.mul_(0.9).add_(parameter.grad)
            if number % 2:
                parameter.sub_(0.01 * momentum)
            else:
                parameter.data = parameter.data - 0.01 * momentum


@inside(AFTER)
def step_scheduler_in_step(program: Program, run: StepRun, number: int) -> None:
    program.step_scheduler()


@inside(BEFORE, AFTER)
def multiply_learning_rate(program: Program, run: StepRun, number: int) -> None:
    for group in program.optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9


@inside(BEFORE)
def new_optimizer_in_step(program: Program, run: StepRun, number: int) -> None:
    program.optimizer = picked(OPTIMIZERS, number)(GROUPINGS["one"](program.model))
    program.scheduler = None


@inside(AFTER, varies=True)
def multiply_state_in_step(program: Program, run: StepRun, number: int) -> None:
    for state in program.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.9)


# ---- weights and buffers --------------------------------------------------------------------------------------------


@inside(BEFORE)
def freeze_or_thaw(program: Program, run: StepRun, number: int) -> None:
    parameter = program.parameter(number)
    parameter.requires_grad_(not parameter.requires_grad)


@inside(BEFORE, AFTER)
def assign_data_in_step(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        parameter.data = parameter.data * 0.99


@inside(AFTER)
def clip_weights(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        parameter.data.clamp_(-0.8, 0.8)


@inside(AFTER)
def multiply_weights(program: Program, run: StepRun, number: int) -> None:
    with torch.no_grad():
        for parameter in program.parameters():
            parameter.mul_(0.99)


@inside(AFTER, varies=True)
def add_to_buffers(program: Program, run: StepRun, number: int) -> None:
    for buffer in program.model.buffers():
        if buffer.is_floating_point():
            buffer.add_(0.01 * run.features.mean())


@inside(BEFORE, AFTER)
def change_tags(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        if hasattr(parameter, "tag"):
            parameter.tag = parameter.tag + 1


@inside(AFTER)
def save_in_step(program: Program, run: StepRun, number: int) -> None:
    program.saved = {name: value.clone() for name, value in program.model.state_dict().items()}
    program.saved_optimizer = copy.deepcopy(program.optimizer.state_dict())


@inside(AFTER)
def load_in_step(program: Program, run: StepRun, number: int) -> None:
    program.load()


# ---- other modules --------------------------------------------------------------------------------------------------


@inside(AFTER)
def new_teacher_in_step(program: Program, run: StepRun, number: int) -> None:
    program.teacher = copy.deepcopy(program.model).requires_grad_(False)


@inside(AFTER)
def average_into_teacher_in_step(program: Program, run: StepRun, number: int) -> None:
    program.average_into_teacher()


@inside(AFTER)
def add_teacher_to_list(program: Program, run: StepRun, number: int) -> None:
    program.best.setdefault("teachers", []).append(copy.deepcopy(program.model).requires_grad_(False))
    del program.best["teachers"][:-2]


@inside(AFTER)
def update_average_in_step(program: Program, run: StepRun, number: int) -> None:
    program.update_average()


@inside(AFTER)
def use_lazy_layer(program: Program, run: StepRun, number: int) -> None:
    if program.has("lazy") and run.output is not None:
        program.buffer = program.lazy(run.output.detach()).detach()


@inside(AFTER)
def use_module_list(program: Program, run: StepRun, number: int) -> None:
    if program.has("mods") and run.output is not None:
        hidden = run.output.detach()
        for module in program.mods:
            hidden = module(hidden)
        program.buffer = hidden.detach()


@inside(BEFORE, AFTER)
def use_helper(program: Program, run: StepRun, number: int) -> None:
    """A step makes an object with a layer and an optimizer of its own, the first time."""
    if not program.has("helper"):
        layer = nn.Linear(3, 2)
        program.helper = Holder(
            layer=layer, optimizer=picked(OPTIMIZERS, number)(layer.parameters()), seen={"x": [torch.zeros(2)]}
        )
    if run.output is not None:
        program.helper.seen["x"][0] += 1
        program.buffer = program.helper.layer(run.output.detach()).square().mean().detach()


# ---- attributes -----------------------------------------------------------------------------------------------------


@inside(BEFORE, AFTER, varies=True)
def count(program: Program, run: StepRun, number: int) -> None:
    program.count += 1
    program.log.append(number)
    program.best["loss"] = 0.0 if run.output is None else float(run.output.detach().sum())
    program.best.setdefault("all", []).append(program.count)


@inside(AFTER, varies=True)
def keep_output(program: Program, run: StepRun, number: int) -> None:
    if run.output is not None:
        program.buffer = run.output.detach()
