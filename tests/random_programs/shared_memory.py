"""Operations on tensors that share memory: with parameters, gradients, buffers, optimizers' state, with each other."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from objects import Program
from operations import AFTER, BEFORE, UPDATE, StepRun, between, inside
from torch import nn


def _parts(flat: torch.Tensor, parameters: list[nn.Parameter]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter with a part of a tensor, of its shape."""
    pieces = flat.split([parameter.numel() for parameter in parameters])
    return ((parameter, piece.view_as(parameter)) for parameter, piece in zip(parameters, pieces, strict=True))


def _flat_memory(program: Program) -> torch.Tensor:
    """All parameters of the model get memory in one tensor, which is returned."""
    parameters = [*dict.fromkeys(program.model.parameters())]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    for parameter, part in _parts(flat, parameters):
        parameter.data = part
    return flat


@between()
def flatten(program: Program, number: int) -> None:
    program.flat = _flat_memory(program)


@between()
def multiply_flat(program: Program, number: int) -> None:
    if program.has("flat"):
        program.flat.mul_(0.98)


@inside(UPDATE)
def update_flat(program: Program, run: StepRun, number: int) -> None:
    if program.has("flat"):
        program.flat.mul_(0.97)


@between()
def flatten_gradients(program: Program, number: int) -> None:
    parameters = program.trained()
    program.flat_gradient = torch.zeros(sum(parameter.numel() for parameter in parameters))
    for parameter, part in _parts(program.flat_gradient, parameters):
        parameter.grad = part


@inside(BEFORE)
def zero_flat_gradient(program: Program, run: StepRun, number: int) -> None:
    if program.has("flat_gradient"):
        program.flat_gradient.zero_()


@between()
def multiply_flat_gradient(program: Program, number: int) -> None:
    if program.has("flat_gradient"):
        program.flat_gradient.mul_(0.5)


@between()
def keep_aliases(program: Program, number: int) -> None:
    """A parameter's detached self, a part of it, and all of a state dict."""
    parameter = program.parameter(number)
    program.aliases = [parameter.detach(), parameter.data.view(-1)[: 1 + number % 3]]
    program.table = program.model.state_dict()


@between()
def write_to_aliases(program: Program, number: int) -> None:
    if program.has("aliases"):
        program.aliases[number % 2].mul_(0.95)


@between()
def write_to_table(program: Program, number: int) -> None:
    if program.has("table"):
        value = list(program.table.values())[number % len(program.table)]
        if value.is_floating_point():
            value.mul_(0.93)


@inside(AFTER)
def write_to_aliases_in_step(program: Program, run: StepRun, number: int) -> None:
    if program.has("aliases"):
        program.aliases[number % 2].mul_(0.96)


@between()
def keep_gradient(program: Program, number: int) -> None:
    program.kept_gradient = program.parameter(number).grad


@between()
def write_to_kept_gradient(program: Program, number: int) -> None:
    if program.has("kept_gradient"):
        program.kept_gradient.mul_(0.5)


@inside(AFTER)
def keep_gradient_in_step(program: Program, run: StepRun, number: int) -> None:
    program.kept_gradient = program.parameter(number).grad


@between()
def keep_state(program: Program, number: int) -> None:
    states = [v for s in program.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    program.kept_state = states[number % len(states)] if states else None


@between()
def write_to_kept_state(program: Program, number: int) -> None:
    if program.has("kept_state") and program.kept_state.is_floating_point():
        program.kept_state.mul_(0.9)


@inside(AFTER)
def write_to_kept_state_in_step(program: Program, run: StepRun, number: int) -> None:
    if program.has("kept_state") and program.kept_state.is_floating_point():
        program.kept_state.mul_(0.8)


@between()
def share_memory_of_two(program: Program, number: int) -> None:
    """One parameter gets the memory of another one of its shape."""
    one = program.parameter(number)
    for other in program.parameters():
        if other is not one and other.shape == one.shape:
            other.data = one.data
            break


@between()
def keep_buffer_part(program: Program, number: int) -> None:
    buffers = [b for b in program.model.buffers() if b.is_floating_point() and b.dim()]
    program.buffer_part = buffers[number % len(buffers)][:2] if buffers else None


@between()
def write_to_buffer_part(program: Program, number: int) -> None:
    if program.has("buffer_part"):
        program.buffer_part.mul_(0.9)


@between(odds=2)
def write_through_data(program: Program, number: int) -> None:
    """To a gradient, a buffer, an optimizer's tensor, or what a state dict has."""
    gradients = [p.grad for p in program.parameters() if p.grad is not None]
    states = [v for s in program.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    kinds = gradients, [*program.model.buffers()], states, [*program.model.state_dict().values()]
    values = [value for value in kinds[number % 4] if value.is_floating_point()]
    if values:
        values[number // 4 % len(values)].data.mul_(0.9)


@between()
def set_data(program: Program, number: int) -> None:
    """Of a gradient or a buffer, to other memory and back."""
    values = [p.grad for p in program.parameters() if p.grad is not None] + [*program.model.buffers()]
    values = [value for value in values if value.is_floating_point()]
    if values:
        value = values[number % len(values)]
        before = value.data
        value.data = value.data.clone()
        before.mul_(0.95)
        if number % 2:
            value.data = before


@between()
def to_double_and_back(program: Program, number: int) -> None:
    program.model.double()
    program.model.float()


@between()
def load_by_assigning(program: Program, number: int) -> None:
    """The modules get new parameters; the optimizer goes on with them."""
    before = dict(program.model.named_parameters())
    state = {name: value.detach().clone() * 0.99 for name, value in program.model.state_dict().items()}
    program.model.load_state_dict({n: v.to(program.model.state_dict()[n].dtype) for n, v in state.items()}, assign=True)
    new = {id(old): now for (_, old), (_, now) in zip(before.items(), program.model.named_parameters(), strict=True)}
    for group in program.optimizer.param_groups:
        group["params"] = [new.get(id(parameter), parameter) for parameter in group["params"]]
    for old in [p for p in program.optimizer.state if id(p) in new]:
        program.optimizer.state[new[id(old)]] = program.optimizer.state.pop(old)


@between()
def initialize(program: Program, number: int) -> None:
    for parameter in program.model.parameters():
        if parameter.dim() > 1:
            nn.init.uniform_(parameter, -0.5, 0.5)
            break


@inside(UPDATE)
def through_a_vector_in_step(program: Program, run: StepRun, number: int) -> None:
    vector = nn.utils.parameters_to_vector(program.model.parameters())
    nn.utils.vector_to_parameters(vector.detach() * 0.98, program.model.parameters())


@inside(AFTER)
def flatten_in_step(program: Program, run: StepRun, number: int) -> None:
    program.flat = _flat_memory(program)
