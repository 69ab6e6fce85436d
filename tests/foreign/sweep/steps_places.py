"""The many places where a program can keep its model, optimizer and scheduler."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from programs import Net, Run, add, case, sgd
from torch import optim
from torch.nn import functional as F

SHARED = dict.fromkeys(("replicas", "central"), "a list, number or variable of the program's own is shared")


Kept = Callable[[], Any]


class Plain:
    pass


def _deep(t: Any) -> Kept:
    a = Plain()
    a.b = Plain()
    a.b.c = Plain()
    a.b.c.d = Plain()
    a.b.c.d.t = t
    return lambda: a.b.c.d.t


def _nested_list(t: Any) -> Kept:
    kept = [{"k": [{"o": t}]}]
    return lambda: kept[0]["k"][0]["o"]


def _set(t: Any) -> Kept:
    kept = {t[1]}
    return lambda: (t[0], next(iter(kept)), t[2])


def _class(t: Any) -> Kept:
    kind = type("Kind", (), {"t": t})
    return lambda: kind.t


def _instance_of_class(t: Any) -> Kept:
    made = type("Kind", (), {"t": t})()
    return lambda: made.t


def _slots(t: Any) -> Kept:
    made = type("Kind", (), {"__slots__": ("t",)})()
    made.t = t
    return lambda: made.t


def _dataclass(t: Any, **options: bool) -> Kept:
    made = dataclasses.make_dataclass("Kind", ["m", "o", "s"], **options)(*t)
    return lambda: (made.m, made.o, made.s)


def _named_tuple(t: Any) -> Kept:
    made = collections.namedtuple("Kind", "m o s")(*t)
    return lambda: made


def _property(t: Any) -> Kept:
    class Kind:
        def __init__(self) -> None:
            self._t = t

        @property
        def t(self) -> Any:
            return self._t

    made = Kind()
    return lambda: made.t


def _on_module(t: Any) -> Kept:
    t[0].tools = t[1:]
    return lambda: (t[0], *t[0].tools)


def _in_sys(t: Any) -> Kept:
    sys.of_a_program = t
    return lambda: sys.of_a_program


def _other_module(t: Any) -> Kept:
    made = types.ModuleType("of_a_program")
    made.t = t
    sys.modules["of_a_program"] = made
    return lambda: __import__("of_a_program").t


def _defaults(t: Any) -> Kept:
    return lambda kept=t: kept


def _keyword_defaults(t: Any) -> Kept:
    return lambda *, kept=t: kept


def _of_function(t: Any) -> Kept:
    def get() -> Any:
        return get.t

    get.t = t
    return get


def _generator(t: Any) -> Kept:
    def kept() -> Any:
        while True:
            yield t

    made = kept()
    return lambda: next(made)


def _context_variable(t: Any) -> Kept:
    kept: contextvars.ContextVar[Any] = contextvars.ContextVar("kept")
    kept.set(t)
    return kept.get


def _weak(t: Any) -> Kept:
    kept = weakref.ref(t[1])
    return lambda: (t[0], kept(), t[2])


def _proxy(t: Any) -> Kept:
    kept = tuple(map(weakref.proxy, t[:2]))
    return lambda: (*kept, t[2])


def _weak_values(t: Any) -> Kept:
    kept = weakref.WeakValueDictionary(o=t[1])
    return lambda: (t[0], kept["o"], t[2])


def _user_dict(t: Any) -> Kept:
    kept = collections.UserDict(t=t)
    return lambda: kept["t"]


def _attribute_dict(t: Any) -> Kept:
    kind = type("Kind", (dict,), {"__getattr__": dict.__getitem__})
    kept = kind(t=t)
    return lambda: kept["t"]


def _cached(t: Any) -> Kept:
    return functools.lru_cache(lambda: t)


def _long_dict(t: Any) -> Kept:
    kept = {**{i: i for i in range(400)}, "t": t}
    return lambda: kept["t"]


def _many_attributes(t: Any) -> Kept:
    made = Plain()
    made.__dict__.update({f"a{i}": i for i in range(400)})
    made.t = t
    return lambda: made.t


PLACES: dict[str, Callable[[Any], Kept]] = {
    "deep": _deep,
    "nested-list": _nested_list,
    "set": _set,
    "namespace": lambda t: functools.partial(getattr, types.SimpleNamespace(t=t), "t"),
    "class": _class,
    "instance-of-class": _instance_of_class,
    "slots": _slots,
    "dataclass": _dataclass,
    "dataclass-slots": functools.partial(_dataclass, slots=True),
    "dataclass-frozen": functools.partial(_dataclass, frozen=True),
    "named-tuple": _named_tuple,
    "property": _property,
    "on-module": _on_module,
    "in-sys": _in_sys,
    "other-module": _other_module,
    "defaults": _defaults,
    "keyword-defaults": _keyword_defaults,
    "attribute-of-function": _of_function,
    "generator": _generator,
    "context-variable": _context_variable,
    "weak-reference": _weak,
    "weak-proxy": _proxy,
    "weak-values": _weak_values,
    "user-dict": _user_dict,
    "attribute-dict": _attribute_dict,
    "cached": _cached,
    "long-dict": _long_dict,
    "many-attributes": _many_attributes,
}


def _kept_in(place: Callable[[Any], Kept]) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        with run.scope():
            made = Net()
            tool = optim.Adam(made.parameters(), lr=0.01)
            schedule = optim.lr_scheduler.ExponentialLR(tool, 0.9)
        get = place((made, tool, schedule))

        def step(i: int) -> None:
            model, optimizer, scheduler = get()
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()

        run.go(step)
        return run.result(made, tool=tool, rate=tool.param_groups[0]["lr"], epoch=schedule.last_epoch)

    return program


for _name, _place in PLACES.items():
    add("steps", f"kept-in-{_name}", _kept_in(_place))


@case("steps", "optimizer-comes-late-into-a-dict")
def optimizer_comes_late_into_a_dict(run: Run) -> Any:
    with run.scope():
        model = Net()
    kept: dict[str, Any] = {}

    def step(i: int) -> None:
        x, y = run.xy(i)
        kept["o"].zero_grad()
        F.mse_loss(model(x), y).backward()
        kept["o"].step()

    kept["o"] = sgd(model)
    run.go(step, 3)
    kept["o"] = optim.Adam(model.parameters(), lr=0.01)
    run.go(step, 4)
    return run.result(model, optimizer=kept["o"])


@case("steps", "tensors-that-a-list-of-the-step-gets-late", differs=SHARED)
def tensors_that_a_list_of_the_step_gets_late(run: Run) -> Any:
    with run.scope():
        model = Net()
        optimizer = sgd(model)
    shadow: list[torch.Tensor] = []

    def step(i: int) -> None:
        x, y = run.xy(i)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        if not shadow:
            shadow.extend(p.detach().clone() for p in model.parameters())
        else:
            for q, p in zip(shadow, model.parameters(), strict=True):
                q.mul_(0.9).add_(p.detach(), alpha=0.1)

    run.go(step)
    return run.result(model, shadow=shadow)


def _counts(start: Any) -> Callable[[Run], Any]:
    def program(run: Run) -> Any:
        with run.scope():
            model = Net()
            optimizer = sgd(model)
        count = start()

        def step(i: int) -> None:
            nonlocal count
            count = count + 1
            x, y = run.xy(i)
            optimizer.zero_grad()
            (F.mse_loss(model(x), y) / count).backward()
            optimizer.step()

        run.go(step)
        return run.result(model)

    return program


add("steps", "counts-in-a-closure", _counts(int), differs=SHARED)
add("steps", "counts-in-a-closure-as-tensor", _counts(lambda: torch.zeros(())), differs=SHARED)
