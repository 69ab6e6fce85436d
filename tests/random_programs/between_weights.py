"""What a program does between steps to parameters, gradients, buffers and their settings."""

from __future__ import annotations

import collections
import copy

import torch
from objects import FEATURES, Program
from operations import EXAMPLES, between
from torch import nn


@between()
def freeze(program: Program, number: int) -> None:
    program.parameter(number).requires_grad_(False)


@between()
def freeze_without_gradient(program: Program, number: int) -> None:
    parameter = program.parameter(number)
    parameter.requires_grad_(False)
    parameter.grad = None


@between()
def freeze_every_other(program: Program, number: int) -> None:
    for place, parameter in enumerate(program.parameters()):
        parameter.requires_grad_(place % 2 == number % 2)


@between()
def thaw(program: Program, number: int) -> None:
    for parameter in program.parameters():
        parameter.requires_grad_(True)


@between()
def multiply_data(program: Program, number: int) -> None:
    program.parameter(number).data.mul_(0.9)


@between()
def assign_data(program: Program, number: int) -> None:
    parameter = program.parameter(number)
    parameter.data = parameter.data.clone() * 1.1


@between()
def copy_without_grad(program: Program, number: int) -> None:
    with torch.no_grad():
        parameter = program.parameter(number)
        parameter.copy_(parameter * 0.95)


@between()
def set_storage(program: Program, number: int) -> None:
    with torch.no_grad():
        parameter = program.parameter(number)
        parameter.set_(parameter.detach() * 0.97)


@between()
def exchange_data(program: Program, number: int) -> None:
    """Two parameters of one shape get each other's data."""
    by_shape = collections.defaultdict(list)
    for parameter in program.parameters():
        by_shape[parameter.shape].append(parameter)
    for alike in by_shape.values():
        if len(alike) > 1:
            one, other = alike[:2]
            one.data, other.data = other.data, one.data
            break


@between()
def through_a_vector(program: Program, number: int) -> None:
    vector = nn.utils.parameters_to_vector(program.model.parameters())
    nn.utils.vector_to_parameters(vector * 0.98, program.model.parameters())


@between()
def keep_view(program: Program, number: int) -> None:
    """Keeps a row of a weight, which shares its memory."""
    first = program.model[0] if isinstance(program.model, nn.Sequential) else None
    program.view = first.weight.data[0] if type(first) is nn.Linear else None


@between()
def write_to_view(program: Program, number: int) -> None:
    if program.has("view"):
        program.view.mul_(0.9)


@between()
def tag_parameter(program: Program, number: int) -> None:
    program.parameter(number).tag = torch.ones(1) * number


@between()
def save(program: Program, number: int) -> None:
    program.saved = copy.deepcopy(program.model.state_dict())
    program.saved_optimizer = copy.deepcopy(program.optimizer.state_dict())


@between()
def load(program: Program, number: int) -> None:
    program.load()


@between()
def load_what_is_there(program: Program, number: int) -> None:
    state = program.model.state_dict()
    program.model.load_state_dict({n: v * 0.99 if v.is_floating_point() else v for n, v in state.items()})


@between()
def zero_to_none(program: Program, number: int) -> None:
    program.optimizer.zero_grad()


@between()
def zero_to_zeros(program: Program, number: int) -> None:
    program.optimizer.zero_grad(set_to_none=False)


@between()
def clip_gradients(program: Program, number: int) -> None:
    if any(parameter.grad is not None for parameter in program.parameters()):
        nn.utils.clip_grad_norm_(program.parameters(), 0.1)


@between()
def assign_gradients(program: Program, number: int) -> None:
    for parameter in program.parameters():
        parameter.grad = torch.ones_like(parameter) * 0.01


@between()
def forward(program: Program, number: int) -> None:
    program.model(torch.ones(EXAMPLES, FEATURES) * (number % 3))


@between(odds=3)
def train(program: Program, number: int) -> None:
    program.optimizer.zero_grad()
    examples = torch.linspace(-1, 1, EXAMPLES * FEATURES).reshape(EXAMPLES, FEATURES)
    program.model(examples).square().mean().backward()
    program.optimizer.step()


@between()
def add_buffer(program: Program, number: int) -> None:
    program.model.register_buffer("later", torch.ones(2) * number)
    program.saved = None


@between()
def multiply_buffers(program: Program, number: int) -> None:
    for buffer in program.model.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.9)


@between()
def assign_buffers(program: Program, number: int) -> None:
    for module in program.model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(module, name, buffer + 0.1)
