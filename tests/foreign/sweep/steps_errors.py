"""Steps that raise, and training that goes on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from programs import BATCH, Net, Program, Run, add, case, random, sgd
from torch import optim
from torch.nn import functional as F

SHARED = dict.fromkeys(("replicas", "central"), "a list, number or variable of the program's own is shared")


def _raises(when: str, what: str) -> Callable[[Run], Any]:
    """One step of six raises on all replicas, before or after backward, and after something was changed."""

    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            model.calls = 0
            model.register_buffer("count", torch.zeros(()))
            optimizer = optim.Adam(model.parameters(), lr=0.01)

        def change() -> None:
            if what == "buffer":
                model.count = model.count + 1
                model.calls += 1
            elif what == "weight":
                with torch.no_grad():
                    model.a.weight.mul_(0.9)
            elif what == "rate":
                optimizer.param_groups[0]["lr"] *= 0.9
            elif what == "frozen":
                model.a.requires_grad_(False)

        def step(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            if when == "after":
                loss.backward()
            stepped = what == "step" and when == "after"
            if stepped:
                optimizer.step()
            change()
            if i == 2:
                raise ValueError("a batch that cannot be used")
            if when == "before":
                loss.backward()
            if not stepped:
                optimizer.step()

        for i in range(6):
            with contextlib.suppress(ValueError):
                run.run(step, i)
        return run.result(model, calls=model.calls, rate=optimizer.param_groups[0]["lr"])

    return program


for _when in ("before", "after"):
    for _what in ("nothing", "step", "buffer", "weight", "rate", "frozen"):
        add("steps", f"raises-{_when}-backward-{_what}", _raises(_when, _what))


@case("steps", "raises-and-loads-a-checkpoint")
def raises_and_loads_a_checkpoint(run: Run) -> Any:
    with run.scope():
        model = Net()
        optimizer = optim.Adam(model.parameters(), lr=0.01)

    def step(i: int) -> None:
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if i == 2:
            raise ValueError("after the step")

    for i in range(6):
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        try:
            run.run(step, i)
        except ValueError:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return run.result(model, optimizer=optimizer, both=run.each(lambda: [model, optimizer]))


def _raises_on(example: int) -> Program:
    """One share has what cannot be used: the whole step fails on whatever form, and the next one goes on."""

    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            optimizer = sgd(model)
        unusable = random(2, BATCH, 6)[example]

        def step(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            if bool((x == unusable).all(1).any()):
                raise ValueError("this share cannot be used")
            F.mse_loss(model(x), y).backward()
            optimizer.step()

        failed = 0
        for i in range(5):
            try:
                run.run(step, i)
            except ValueError:
                failed += 1
        return run.result(model, failed=failed)

    return program


add("steps", "raises-on-the-first-replica", _raises_on(0), forms=("replicas",))
add("steps", "raises-on-the-last-replica", _raises_on(-1), forms=("replicas",))


@case("steps", "stop-iteration-ends-an-epoch")
def stop_iteration_ends_an_epoch(run: Run) -> Any:
    with run.scope():
        model = Net()
        optimizer = sgd(model)
        model.position = 0

    def step() -> None:
        if model.position == 3:
            raise StopIteration
        x, y = run.xy(model.position)
        model.position += 1
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()

    for _ in range(2):
        with contextlib.suppress(StopIteration):
            while True:
                run.run(step)
        model.position = 0
    return run.result(model)
