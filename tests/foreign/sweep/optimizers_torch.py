"""torch.optim: every optimizer in each of its forms, closures, clipping, scalers, averages of weights."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from programs import BROAD, Net, Program, Run, add
from torch import nn, optim
from torch.nn import functional as F, utils
from torch.optim import swa_utils

NAMES = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
FLAGS = ("foreach", "fused", "capturable", "maximize", "differentiable", "amsgrad", "centered", "nesterov")
RAISES = {"capturable": "If capturable=True", "differentiable": "a leaf Variable that requires grad"}
"""What torch's optimizers say on a CPU, and after a plain step."""
FORMS = BROAD
Made = Callable[[nn.Module], Any]


def trained(make: Made, count: int = 6, clip: Any = None, inside: bool = True, forms: Any = None) -> Program:
    """A program of one optimizer: weights, state and groups are compared."""

    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            optimizer = make(model) if inside else None
        optimizer = optimizer or make(model)

        def step(i: int) -> torch.Tensor:
            x, y = run.xy(i)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if clip:
                clip(model)
            optimizer.step()
            return loss.detach()

        run.go(step, count)
        return run.result(model, optimizer=optimizer)

    return program


def _simple(name: str, **options: Any) -> Made:
    return lambda model: getattr(optim, name)(model.parameters(), **{"lr": 0.01, **options})


for _name in NAMES:
    _known = inspect.signature(getattr(optim, _name)).parameters
    add("torch.optim", _name, trained(_simple(_name)), forms=FORMS)
    add("torch.optim", f"{_name}-outside-of-the-scope", trained(_simple(_name), inside=False), forms=FORMS)
    add("torch.optim", f"{_name}-fp32", trained(_simple(_name)), forms=FORMS, dtype="fp32")
    for _flag in [f for f in FLAGS if f in _known]:
        _more = {"momentum": 0.9} if _flag == "nesterov" else {}
        _program = trained(_simple(_name, **{_flag: True}, **_more))
        add("torch.optim", f"{_name}-{_flag}", _program, forms=FORMS, raises=RAISES.get(_flag))
    if "foreach" in _known:
        add("torch.optim", f"{_name}-no-foreach", trained(_simple(_name, foreach=False)))
    if "weight_decay" in _known:
        add("torch.optim", f"{_name}-weight_decay", trained(_simple(_name, weight_decay=0.01)))
    if _name != "Adafactor":
        rate = {"lr": torch.tensor(0.01), **({"foreach": False} if "foreach" in _known else {})}
        add("torch.optim", f"{_name}-tensor-rate", trained(_simple(_name, **rate)))

OTHERS: dict[str, Made] = {
    "Muon": lambda m: optim.Muon([m.a.weight, m.b.weight], lr=0.01),
    "SGD-momentum": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "SGD-momentum-fused": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "SGD-dampening": lambda m: optim.SGD(m.parameters(), lr=0.05, momentum=0.9, dampening=0.1),
    "Adam-amsgrad-fused": lambda m: optim.Adam(m.parameters(), lr=0.01, amsgrad=True, fused=True),
    "Adam-tensor-betas": lambda m: optim.Adam(
        m.parameters(), lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False
    ),
    "RMSprop-momentum": lambda m: optim.RMSprop(m.parameters(), lr=0.01, centered=True, momentum=0.5),
    "AdamW-groups": lambda m: optim.AdamW(
        [{"params": m.a.parameters(), "lr": 0.1}, {"params": m.b.parameters(), "weight_decay": 0.0}], lr=0.01
    ),
    "AdamW-named": lambda m: optim.AdamW(m.named_parameters(), lr=0.01),
}
for _name, _make in OTHERS.items():
    add("torch.optim", _name, trained(_make), forms=FORMS)


def _rows(make: Any, second: bool) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model = nn.Embedding(20, 4, sparse=True)
            head = nn.Linear(4, 1)
            optimizer = make(model)
            other = optim.SGD(head.parameters(), lr=0.1)

        def step(i: int) -> None:
            optimizer.zero_grad()
            other.zero_grad()
            head(model(run.ids(i, 20))).pow(2).mean().backward()
            optimizer.step()
            if second:
                other.step()

        run.go(step)
        return run.result(model, head, optimizer=optimizer)

    return program


for _name in ("SparseAdam", "SGD", "Adagrad"):
    add("torch.optim", f"{_name}-sparse", _rows(_simple(_name), second=_name != "SGD"), forms=FORMS)


def _closure(make: Made, count: int = 6, named: bool = False) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            optimizer = make(model)

        def step(i: int) -> None:
            x, y = run.xy(i)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss

            if named:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)

        run.go(step, count)
        return run.result(model, optimizer=optimizer)

    return program


for _name in NAMES:
    add("torch.optim", f"{_name}-closure", _closure(_simple(_name)))
add("torch.optim", "SGD-closure-by-name", _closure(_simple("SGD"), named=True))
add(
    "torch.optim",
    "LBFGS",
    _closure(lambda m: optim.LBFGS(m.parameters(), lr=0.1), 3),
    forms=FORMS,
    refused=r"torch\.optim\.LBFGS calls its closure a different number of times",
)

CLIPS: dict[str, Any] = {
    "norm": lambda m: utils.clip_grad_norm_(m.parameters(), 0.1),
    "norm-foreach": lambda m: utils.clip_grad_norm_(m.parameters(), 0.1, foreach=True),
    "norm-1": lambda m: utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=1.0),
    "norm-inf": lambda m: utils.clip_grad_norm_(m.parameters(), 0.01, norm_type=float("inf")),
    "value": lambda m: utils.clip_grad_value_(m.parameters(), 0.01),
    "total": lambda m: utils.clip_grads_with_norm_(
        m.parameters(), 0.1, utils.get_total_norm([p.grad for p in m.parameters()])
    ),
    "adaptive": lambda m: [
        p.grad.mul_((p.detach().norm() / p.grad.norm() * 0.01).clamp(max=1.0)) for p in m.parameters()
    ],
    "nan-to-num": lambda m: [torch.nan_to_num_(p.grad) for p in m.parameters()],
    "one-layer": lambda m: utils.clip_grad_norm_(m.a.parameters(), 0.05),
    "new-tensors": lambda m: [setattr(p, "grad", p.grad * 0.5) for p in m.parameters()],
    "foreach-mul": lambda m: torch._foreach_mul_([p.grad for p in m.parameters()], 0.5),
    "one-none": lambda m: setattr(m.a.bias, "grad", None),
}
for _name, _clip in CLIPS.items():
    add("torch.optim", f"clip-{_name}", trained(_simple("Adam"), clip=_clip), forms=FORMS)


def _scaler(inside: bool, unscale: bool, infinite: bool, after: bool = False, **options: Any) -> Program:
    def program(run: Run) -> Any:
        def scaled() -> Any:
            return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3, **options)

        with run.scope():
            model = Net()
            optimizer = optim.SGD(model.parameters(), lr=0.1)
            scaler = scaled() if inside else None
        scaler = scaler or scaled()

        def step(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            if infinite and i == 4 and run.replica() == run.replicas - 1:
                x = x.clone()
                x[-1] = float("inf")
            if infinite and i == 6 and run.replica() == 0:
                x = x.clone()
                x[0] = float("nan")
            scaler.scale(F.mse_loss(model(x), y)).backward()
            if unscale:
                scaler.unscale_(optimizer)
                utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            if not after:
                scaler.update()

        scales = []
        for i in range(9):
            run.run(step, i)
            if after:
                scaler.update()
            scales.append(scaler.get_scale())
        return run.result(model, scales=scales, scale=run.each(scaler.get_scale))

    return program


for _inside in (True, False):
    for _unscale in (True, False):
        for _infinite in (True, False):
            words = ["in-scope" if _inside else "outside", *["unscale"] * _unscale, *["inf"] * _infinite]
            add("torch.optim", f"scaler-{'-'.join(words)}", _scaler(_inside, _unscale, _infinite), forms=FORMS)
add("torch.optim", "scaler-disabled", _scaler(True, True, False, enabled=False), forms=FORMS)
add("torch.optim", "scaler-update-after-run", _scaler(True, True, False, after=True), forms=FORMS)


def _scaler_in_parts(inside: frozenset[str]) -> Program:
    """Backward, unscaling and step in calls of their own, or between two calls."""

    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            optimizer = optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)

        def backward(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            scaler.scale(F.mse_loss(model(x), y)).backward()

        parts = {"unscale": lambda: scaler.unscale_(optimizer), "step": lambda: scaler.step(optimizer)}
        for i in range(6):
            run.run(backward, i)
            for name, part in parts.items():
                if name in inside:
                    run.run(lambda part=part: [part(), None][1])
                elif name == "step" or "no unscale" not in inside:
                    part()
            scaler.update()
        return run.result(model, scale=scaler.get_scale())

    return program


for _parts in ((), ("unscale",), ("step",), ("unscale", "step"), ("no unscale",), ("no unscale", "step")):
    add("torch.optim", f"scaler-in-parts-{'-'.join(_parts) or 'outside'}", _scaler_in_parts(frozenset(_parts)))

AVERAGES: dict[str, Made] = {
    "plain": swa_utils.AveragedModel,
    "ema": lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)),
    "ema-foreach": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    "swa-foreach": lambda m: swa_utils.AveragedModel(m, multi_avg_fn=swa_utils.get_swa_multi_avg_fn()),
    "buffers": lambda m: swa_utils.AveragedModel(m, use_buffers=True, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5)),
    "own": lambda m: swa_utils.AveragedModel(m, avg_fn=lambda a, b, n: a + (b - a) / (n + 1)),
}


def _averaged(make: Made, inside: bool, in_step: bool) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            model.register_buffer("count", torch.zeros(1))
            optimizer = optim.Adam(model.parameters(), lr=0.01)
            average = make(model) if inside else None
        average = average or make(model)

        def step(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            model.count += 1
            if in_step:
                average.update_parameters(model)

        for i in range(6):
            run.run(step, i)
            if not in_step:
                average.update_parameters(model)
        x = torch.ones(2, 6)
        return run.result(
            model, average, number=average.n_averaged, predicted=average(x), inside=run.each(lambda: average(x))
        )

    return program


for _name, _make in AVERAGES.items():
    for _inside in (True, False):
        for _in_step in (True, False):
            where = f"{'in-scope' if _inside else 'outside'}-{'in-step' if _in_step else 'after-run'}"
            add("torch.optim", f"average-{_name}-{where}", _averaged(_make, _inside, _in_step))


def _reloaded(run: Run) -> Any:
    with run.scope():
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)
        scheduler = optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)

    def step(i: int) -> None:
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        scheduler.step()

    run.go(step, 4)
    optimizer.param_groups[0]["lr"] = 0.02
    scheduler.base_lrs = [0.02]
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    run.go(step, 4)
    for thing, state in zip((model, optimizer, scheduler), saved, strict=True):
        thing.load_state_dict(state)
    run.go(step)
    return run.result(model, optimizer, epoch=scheduler.last_epoch)


add("torch.optim", "all-states-loaded-again", _reloaded)
