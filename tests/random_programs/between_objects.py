"""What a program does between steps to optimizers, schedulers, modules and everything else that it holds."""

from __future__ import annotations

import copy

import torch
from objects import GROUPINGS, OPTIMIZERS, SCHEDULERS, Program, Tied, picked
from operations import between
from torch import nn, optim
from torch.nn.utils import parametrizations, prune


def _first_linear(program: Program) -> nn.Linear | None:
    """The first plain linear layer that can be changed alone."""
    if isinstance(program.model, Tied):
        return None
    return next((module for module in program.model.modules() if type(module) is nn.Linear), None)


# ---- optimizers and schedulers --------------------------------------------------------------------------------------


@between()
def set_learning_rate(program: Program, number: int) -> None:
    for group in program.optimizer.param_groups:
        old = group["lr"]
        new = torch.tensor(0.02) if isinstance(old, torch.Tensor) else 0.02
        group["lr"] = new if number % 2 else old * 0.5


@between()
def set_weight_decay(program: Program, number: int) -> None:
    program.optimizer.param_groups[-1]["weight_decay"] = 0.03


@between(odds=3)
def step_optimizer(program: Program, number: int) -> None:
    program.optimizer.step()


@between()
def load_optimizer(program: Program, number: int) -> None:
    if program.saved is None:
        return
    old, now = program.saved_optimizer["param_groups"], program.optimizer.param_groups
    if [len(group["params"]) for group in old] == [len(group["params"]) for group in now]:
        program.optimizer.load_state_dict(program.saved_optimizer)


@between()
def new_optimizer(program: Program, number: int) -> None:
    program.take_optimizer(number, list(GROUPINGS)[number % len(GROUPINGS)])


@between()
def second_optimizer(program: Program, number: int) -> None:
    program.second = picked(OPTIMIZERS, number)([*program.model.parameters()][:1])


@between()
def add_group(program: Program, number: int) -> None:
    if program.extra is None:
        program.extra = nn.Linear(3, 3)
        program.optimizer.add_param_group({"params": list(program.extra.parameters())})


@between()
def clear_state(program: Program, number: int) -> None:
    program.optimizer.state.clear()


@between()
def multiply_state(program: Program, number: int) -> None:
    for state in program.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim():
                value.mul_(0.5)


@between()
def assign_state(program: Program, number: int) -> None:
    for state in program.optimizer.state.values():
        for name, value in list(state.items()):
            if isinstance(value, torch.Tensor) and value.dim():
                state[name] = value * 0.5


@between()
def momentum_by_hand(program: Program, number: int) -> None:
    program.momentum = [torch.zeros_like(parameter) for parameter in program.parameters()]


@between()
def step_scheduler(program: Program, number: int) -> None:
    program.step_scheduler()


@between()
def new_scheduler(program: Program, number: int) -> None:
    program.scheduler = picked(SCHEDULERS, number)(program.optimizer)


# ---- modules --------------------------------------------------------------------------------------------------------


@between()
def to_evaluation(program: Program, number: int) -> None:
    program.model.eval()


@between()
def to_training(program: Program, number: int) -> None:
    program.model.train()


@between()
def new_teacher(program: Program, number: int) -> None:
    program.teacher = copy.deepcopy(program.model).requires_grad_(False)


@between()
def average_into_teacher(program: Program, number: int) -> None:
    program.average_into_teacher()


@between()
def new_average(program: Program, number: int) -> None:
    program.average = optim.swa_utils.AveragedModel(program.model)


@between()
def update_average(program: Program, number: int) -> None:
    program.update_average()


@between()
def multiply_teachers_of_list(program: Program, number: int) -> None:
    for teacher in program.best.get("teachers", []):
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.mul_(0.9)


@between()
def new_layer(program: Program, number: int) -> None:
    for name, module in list(program.model.named_children()):
        if type(module) is nn.Linear and not isinstance(program.model, Tied):
            setattr(program.model, name, nn.Linear(module.in_features, module.out_features))
            break
    program.take_optimizer(number)


@between()
def new_parameter(program: Program, number: int) -> None:
    """A layer gets another weight, which takes the old one's place in the optimizer."""
    layer = _first_linear(program)
    if layer is None:
        return
    old = layer.weight
    layer.weight = nn.Parameter(old.detach() * 0.5)
    for group in program.optimizer.param_groups:
        group["params"] = [layer.weight if parameter is old else parameter for parameter in group["params"]]
    program.optimizer.state.pop(old, None)


@between()
def copy_model(program: Program, number: int) -> None:
    program.model = copy.deepcopy(program.model)
    program.hooks = []
    saved = program.saved
    program.take_optimizer(number)
    program.saved = saved


@between()
def normalize_weight(program: Program, number: int) -> None:
    layer = _first_linear(program)
    if layer is not None:
        parametrizations.weight_norm(layer)
    program.take_optimizer(number)


@between()
def prune_weight(program: Program, number: int) -> None:
    layer = _first_linear(program)
    if layer is not None:
        prune.l1_unstructured(layer, "weight", amount=0.3)
    program.take_optimizer(number)


@between()
def add_hook(program: Program, number: int) -> None:
    if not program.hooks:
        program.hooks.append(program.model.register_forward_hook(lambda module, inputs, output: output * 1.5))


@between()
def remove_hooks(program: Program, number: int) -> None:
    while program.hooks:
        program.hooks.pop().remove()


@between()
def new_lazy_layer(program: Program, number: int) -> None:
    program.lazy = nn.LazyLinear(3)


@between()
def new_module_list(program: Program, number: int) -> None:
    program.mods = nn.ModuleList([nn.Linear(3, 3), nn.BatchNorm1d(3)])


@between()
def change_module_list(program: Program, number: int) -> None:
    if not program.has("mods"):
        return
    if len(program.mods) < 4:
        program.mods.append(nn.Linear(3, 3))
    else:
        del program.mods[0]


# ---- generators and attributes --------------------------------------------------------------------------------------


@between(varies=True)
def draw(program: Program, number: int) -> None:
    program.buffer = torch.rand(3, generator=program.generator)


@between()
def seed_generator(program: Program, number: int) -> None:
    program.generator.manual_seed(number)


@between(varies=True)
def change_attributes(program: Program, number: int) -> None:
    program.count += 10
    program.log.append(number)
    program.best["k"] = number
    if hasattr(program.model, "calls"):
        program.model.calls += 5
        program.model.history.clear()
        program.model.info["max"] = 0.0
        program.model.ema.zero_()
        program.model.info["new"] = torch.ones(2)


@between(varies=True)
def assign_attributes(program: Program, number: int) -> None:
    program.log = [number]
    program.best = {"z": torch.ones(1)}
    if hasattr(program.model, "calls"):
        program.model.history = [1.0]
        program.model.ema = torch.ones(3)
        program.model.info = {"max": 1.0, "seen": []}
        program.model.last = None


@between()
def come_and_go(program: Program, number: int) -> None:
    """An attribute that is there is deleted, and otherwise made."""
    if hasattr(program, "passing"):
        del program.passing
    else:
        program.passing = torch.ones(2)


@between()
def pop_log(program: Program, number: int) -> None:
    if program.log:
        program.log.pop()


@between()
def new_nested(program: Program, number: int) -> None:
    program.best.setdefault("nested", {})["k"] = [torch.ones(2) * number, {"deep": torch.zeros(1)}]


@between()
def change_nested(program: Program, number: int) -> None:
    if "nested" in program.best:
        values = program.best["nested"]["k"]
        values[0].add_(1)
        values[1]["deep"] += number
        values.append(number)


@between()
def change_helper(program: Program, number: int) -> None:
    """What a step has made is changed in all its parts."""
    if not program.has("helper"):
        return
    with torch.no_grad():
        program.helper.layer.weight.mul_(0.5)
    program.helper.seen["x"][0].mul_(3)
    program.helper.optimizer.param_groups[0]["lr"] *= 0.5
    program.helper.flag = number
