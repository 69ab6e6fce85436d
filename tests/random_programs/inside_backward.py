"""What a step does up to its gradients: its examples, forward and backward passes, and the gradients themselves."""

from __future__ import annotations

import torch
from objects import Program
from operations import AFTER, BACKWARD, BEFORE, GRADIENTS, StepRun, inside
from torch import nn
from torch.utils.checkpoint import checkpoint


def loss_of(program: Program, run: StepRun, scale: float = 1.0) -> torch.Tensor:
    output = program.model(run.features)
    if program.extra is not None:
        output = program.extra(output)
    if run.factor is not None:
        output = output * run.factor
    run.output = output
    return ((output - run.targets) ** 2).mean() * scale


# ---- before the backward pass ---------------------------------------------------------------------------------------


@inside(BEFORE)
def draw_factor(program: Program, run: StepRun, number: int) -> None:
    run.factor = 1 + 0.1 * torch.rand(3, generator=program.generator)


@inside(BEFORE)
def learn_from_teacher(program: Program, run: StepRun, number: int) -> None:
    if program.teacher is not None:
        with torch.no_grad():
            run.targets = program.teacher(run.features).detach()


@inside(BEFORE, AFTER, varies=True)
def evaluate(program: Program, run: StepRun, number: int) -> None:
    trains = program.model.training
    program.model.eval()
    with torch.no_grad():
        program.model(run.features)
    program.model.train(trains)


@inside(AFTER)
def zero(program: Program, run: StepRun, number: int) -> None:
    program.optimizer.zero_grad(set_to_none=bool(number % 3))


# ---- the backward pass ----------------------------------------------------------------------------------------------


@inside(BACKWARD, odds=5)
def backward(program: Program, run: StepRun, number: int) -> None:
    run.exchange.backward(loss_of(program, run), program)


@inside(BACKWARD)
def two_backwards(program: Program, run: StepRun, number: int) -> None:
    run.exchange.backward(loss_of(program, run, 0.5), program)
    run.features = run.features + 0.1
    run.exchange.backward(loss_of(program, run, 0.5), program)


@inside(BACKWARD)
def backward_again(program: Program, run: StepRun, number: int) -> None:
    loss = loss_of(program, run)
    run.exchange.backward(loss, program, retain_graph=True)
    run.exchange.backward(loss * 0.5, program)


@inside(BACKWARD)
def backward_to_some(program: Program, run: StepRun, number: int) -> None:
    trained = program.trained()
    run.exchange.backward(loss_of(program, run), program, inputs=trained[: 1 + number % len(trained)])


@inside(BACKWARD)
def backward_with_penalty(program: Program, run: StepRun, number: int) -> None:
    penalty = sum(parameter.square().sum() for parameter in program.parameters())
    run.exchange.backward(loss_of(program, run) + 0.01 * penalty, program)


@inside(BACKWARD)
def backward_of_checkpoint(program: Program, run: StepRun, number: int) -> None:
    output = checkpoint(program.model, run.features, use_reentrant=False)
    if program.extra is not None:
        output = program.extra(output)
    run.exchange.backward((output - run.targets).square().mean(), program)


@inside(BACKWARD)
def backward_of_one(program: Program, run: StepRun, number: int) -> None:
    """Only one parameter is used, by replicas with other examples not the same one."""
    trained = program.trained()
    if trained:
        used = trained[number % len(trained) if run.same_data or run.replica == 0 else 0]
        run.exchange.backward((used * run.features.mean()).sum(), program)


@inside(BACKWARD)
def backward_through_hook(program: Program, run: StepRun, number: int) -> None:
    trained = program.trained()
    if trained:
        hook = trained[number % len(trained)].register_hook(lambda gradient: gradient * 2)
        run.exchange.backward(loss_of(program, run), program)
        hook.remove()


@inside(BACKWARD)
def backward_with_graph(program: Program, run: StepRun, number: int) -> None:
    trained = program.trained()
    if not trained:
        return
    run.exchange.backward(loss_of(program, run), program, create_graph=True)
    for parameter in trained:
        if parameter.grad is not None:
            parameter.grad = parameter.grad.detach().clone()


# ---- gradients ------------------------------------------------------------------------------------------------------


@inside(GRADIENTS)
def clip_by_norm(program: Program, run: StepRun, number: int) -> None:
    nn.utils.clip_grad_norm_(program.parameters(), 0.5)


@inside(GRADIENTS)
def clip_by_value(program: Program, run: StepRun, number: int) -> None:
    nn.utils.clip_grad_value_(program.parameters(), 0.05)


@inside(GRADIENTS)
def multiply_gradients(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@inside(GRADIENTS)
def assign_gradients_of_step(program: Program, run: StepRun, number: int) -> None:
    for parameter in program.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad + 0.01 * parameter.detach()


@inside(GRADIENTS)
def drop_gradient(program: Program, run: StepRun, number: int) -> None:
    program.parameter(number).grad = None


@inside(GRADIENTS)
def mean_of_outputs(program: Program, run: StepRun, number: int) -> None:
    if run.output is not None:
        program.buffer = run.exchange.mean(run.output.detach().mean(0))
