"""Learning rate schedulers of torch, and of transformers where it is installed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

from programs import BROAD, Net, Program, Run, add
from torch import nn, optim
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules, swa_utils

TORCH: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 5]),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.3, 3),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, total_iters=5),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 6),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 8, 2),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.01, 0.1, 3),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=20),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.8)], [3]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, total_iters=3), schedules.ExponentialLR(o, 0.8)]
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.3, anneal_epochs=4),
}
TRANSFORMERS = {
    "constant": {},
    "constant_with_warmup": {},
    "linear": {},
    "cosine": {},
    "cosine_with_restarts": {},
    "polynomial": {},
    "inverse_sqrt": {},
    "reduce_lr_on_plateau": {},
    "cosine_with_min_lr": {"min_lr": 1e-3},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-3},
    "warmup_stable_decay": {"num_decay_steps": 3},
}


def _scheduled(make: Callable[[Any], Any], inside: bool, in_step: bool) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model: nn.Module = Net()
            optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            scheduler = make(optimizer) if inside else None
        scheduler = scheduler or make(optimizer)
        plateau = isinstance(scheduler, schedules.ReduceLROnPlateau)

        def advance() -> None:
            if plateau:
                scheduler.step(1.0)
            else:
                scheduler.step()

        def step(i: int) -> float:
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if in_step:
                advance()
            return optimizer.param_groups[0]["lr"]

        rates = []
        for i in range(8):
            rates += run.local(run.run(step, i))[:1]
            if not in_step:
                advance()
        kept = {k: v for k, v in scheduler.state_dict().items() if isinstance(v, int | float)}
        return run.result(
            model, rates=[float(r) for r in rates], state=kept, optimizer=optimizer,
            own=run.each(lambda: [optimizer.param_groups[0]["lr"], getattr(scheduler, "last_epoch", 0)]),
        )  # fmt: skip

    return program


def _of_transformers(name: str, options: dict[str, Any]) -> Callable[[Any], Any]:
    def make(optimizer: Any) -> Any:
        from transformers import get_scheduler

        stages = (
            {} if name in ("constant", "reduce_lr_on_plateau") else {"num_warmup_steps": 2, "num_training_steps": 8}
        )
        return get_scheduler(name, optimizer, **stages, scheduler_specific_kwargs=options or None)

    return make


FORMS = BROAD


def _add(library: str, name: str, make: Callable[[Any], Any]) -> None:
    title = f"{library}-{name}"
    add("schedulers", f"{title}-after-run", _scheduled(make, True, False), forms=FORMS)
    for place in ("in-scope", "outside"):
        program = _scheduled(make, place == "in-scope", True)
        add("schedulers", f"{title}-{place}-in-step", program, forms=FORMS)


for _name, _make in TORCH.items():
    _add("torch", _name, _make)
if importlib.util.find_spec("transformers"):
    for _name, _options in TRANSFORMERS.items():
        _add("transformers", _name, _of_transformers(_name, _options))
