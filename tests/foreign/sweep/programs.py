"""Programs of other people's code: each trains something once, on whatever form of a strategy it is given.

A program takes a ``Run``, builds its model and optimizer in ``run.scope()``, makes steps with ``run.run(step, i)``, in
which each replica takes its share of the batch with ``run.share``, and returns what is to be equal in every form.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import tfstyle_dist as tfd

BATCH = 8
STEPS = 6
SEED = 7
ALL_FORMS = ("replicas", "ranks", "central", "shared", "grouped", "elastic", "servers")
USUAL = ("replicas", "ranks")
BROAD = ("replicas", "ranks", "central", "grouped", "elastic", "servers")
WITHOUT_SERVERS, ALONE = BROAD[:-1], BROAD[:-2]
"""Without servers, where a function has objects of its own; and without elastic jobs, where a worker has some."""
DRAWS = "random numbers are a function of the seed before the first step, the number of the step, and the replica"
REPLICAS = {"one": 1, "replicas": 2, "ranks": 2, "central": 2, "shared": 2, "grouped": 4, "elastic": 4, "servers": 1}

Program = Callable[["Run"], Any]


class Each(list[torch.Tensor]):
    """What a program returned on each replica of this process: every one is compared."""


@dataclass(frozen=True)
class Case:
    """One program and how it is judged.

    Attributes:
        name: in its group.
        group: of the table.
        program: what is run.
        forms: in which it is run, beside one device.
        dtype: "fp32", then "fp64" if that is not equal enough ("auto"), or the one named.
        tolerance: largest difference, relative to the largest value where that is above 1; by dtype if not given.
        reference: "one" device with the whole batch; "shares": one device that does each replica's share by itself, for
            batch statistics and random numbers; "ranks": the form ranks, for what depends on the replicas' number.
        refused: what the message says where the case is refused on purpose, by form ("*" for all).
        differs: why it differs on purpose, by form; the sentence stands in docs/status.md.
        raises: what one device says, where a program raises there and shall in every form.
        limit: seconds for one form.
    """

    name: str
    group: str
    program: Program
    forms: tuple[str, ...] = USUAL
    dtype: str = "fp64"
    tolerance: float | None = None
    reference: str = "one"
    refused: Mapping[str, str] = field(default_factory=dict)
    differs: Mapping[str, str] = field(default_factory=dict)
    raises: str | None = None
    limit: float = 60.0

    @property
    def title(self) -> str:
        return f"{self.group}/{self.name}"


CASES: dict[str, Case] = {}


def add(group: str, name: str, program: Program, **options: Any) -> None:
    """Puts a case into the table.

    What one device shows is compared with more replicas too: without ``forms`` these are all but servers. Ranks run it
    with a copy each, and with one copy.

    Raises:
        ValueError: the name is taken.
    """
    for key in ("refused", "differs"):
        table = options.get(key, {})
        if isinstance(table, str):
            options[key] = {"*": table}
            continue
        if "ranks" in table:
            options[key] = table = {"shared": table["ranks"], **table}
        if "replicas" in table:  # of one process: so in each of several
            options[key] = {"grouped": table["replicas"], "elastic": table["replicas"], **table}
    if options.get("reference", "one") == "one" and options.get("forms", USUAL) == USUAL:
        options["forms"] = BROAD
    forms = options.get("forms", USUAL)
    options["forms"] = (*forms, "shared") if "ranks" in forms else forms
    made = Case(name, group, program, **options)
    if made.title in CASES:
        raise ValueError(f"two cases are named {made.title}")
    CASES[made.title] = made


def case(group: str, name: str, **options: Any) -> Callable[[Program], Program]:
    """Puts the decorated program into the table."""

    def decorate(program: Program) -> Program:
        add(group, name, program, **options)
        return program

    return decorate


def random(seed: int, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Normal numbers that depend on the seed alone."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")
    return made.to(torch.get_default_device())


def integers(seed: int, high: int, *shape: int) -> torch.Tensor:
    """Numbers below ``high`` that depend on the seed alone."""
    made = torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.to(torch.get_default_device())


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Run:
    """What a program sees of the form that it runs in.

    Args:
        form: its name.
        strategy: None on one device.
        shares: into how many shares one device is to divide the batch, where the reference does so.
    """

    def __init__(self, form: str, strategy: Any = None, shares: int = 1) -> None:
        self.form, self.strategy, self.shares = form, strategy, shares
        self.replicas = REPLICAS[form]

    def scope(self) -> contextlib.AbstractContextManager[Any]:
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def replica(self) -> int:
        if self.strategy is None or self.form == "servers":
            return 0
        context = tfd.get_replica_context()
        assert context is not None
        return context.replica_id_in_sync_group

    def share(self, whole: Any) -> Any:
        """This replica's part of tensors, of lists of examples, or of dicts and tuples of these."""
        if isinstance(whole, Mapping):
            return {key: self.share(value) for key, value in whole.items()}
        if isinstance(whole, tuple):
            return tuple(self.share(value) for value in whole)
        count = len(whole) // self.replicas
        return whole[self.replica() * count : (self.replica() + 1) * count]

    def xy(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.share((random(i, BATCH, 6), random(i + 50, BATCH, 3)))

    def x(self, i: int, *shape: int) -> torch.Tensor:
        return self.share(random(i, BATCH, *(shape or (6,))))

    def ids(self, i: int, high: int, *shape: int) -> torch.Tensor:
        return self.share(integers(i, high, BATCH, *shape))

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.strategy is None:
            return function(*args, **kwargs)
        return self.strategy.run(function, args=args, kwargs=kwargs)

    def go(self, step: Callable[..., Any], count: int = STEPS, *args: Any) -> None:
        for i in range(count):
            self.run(step, i, *args)

    def local(self, value: Any) -> list[Any]:
        return list(self.strategy.experimental_local_results(value)) if self.strategy else [value]

    def each(self, function: Callable[[], Any]) -> Each:
        """The values of what ``function`` returns, of every replica of this process."""
        return Each(self.local(self.run(lambda: flat(function()))))

    def result(self, *modules: Any, **values: Any) -> dict[str, Any]:
        """What most programs return: modules as they are outside, and on every replica."""
        return {**values, "outside": list(modules), "each": self.each(lambda: list(modules))}

    def result_with_own_buffers(self, *modules: Any) -> dict[str, Any]:
        """As ``result``, where each replica's buffers are its own: outside, each process sees those of its first."""
        return {"weights": [list(m.parameters()) for m in modules], "each": self.each(lambda: list(modules))}

    def mean(self, gradients: Any) -> Any:
        """The mean over the replicas, for programs that reduce by themselves."""
        return gradients if self.strategy is None else tfd.get_replica_context().all_reduce("MEAN", gradients)


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        value = value.to_dense() if value.layout != torch.strided else value
        yield (torch.view_as_real(value) if value.is_complex() else value).reshape(-1).to(torch.float64)
    elif isinstance(value, bool | int | float):
        yield torch.tensor([float(value)], dtype=torch.float64)
    elif isinstance(value, nn.Module):
        yield from _leaves(dict(value.state_dict()))
    elif isinstance(value, torch.optim.Optimizer):
        # Where servers hold the state, it is in what state_dict() gives alone, and so is what a rule counts in a group.
        told = {"param_groups": value.param_groups, "state": value.state} if value.state else value.state_dict()
        for group in told["param_groups"]:
            yield from _leaves({k: v for k, v in group.items() if isinstance(v, int | float | torch.Tensor)})
            for parameter in group["params"]:
                yield from _leaves(told["state"].get(parameter, {}))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif hasattr(value, "state_dict"):
        yield from _leaves(value.state_dict())
    elif value is not None and not isinstance(value, str) and not callable(value):
        raise TypeError(f"a program returned a {type(value).__name__}, which cannot be compared")


def flat(value: Any) -> torch.Tensor:
    """All numbers in a value, one after the other, on the CPU."""
    found = [leaf.cpu() for leaf in _leaves(value)]
    return torch.cat(found).clone() if found else torch.zeros(0, dtype=torch.float64, device="cpu")


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def plain(run: Run, model: nn.Module, optimizer: Any, loss: Any = None, extra: Any = None) -> Callable[[int], Any]:
    """The step that most programs make."""

    def step(i: int) -> torch.Tensor:
        x, y = run.xy(i)
        optimizer.zero_grad()
        value = loss(x, y) if loss else nn.functional.mse_loss(model(x), y)
        value.backward()
        optimizer.step()
        if extra:
            extra(i)
        return value.detach()

    return step


def trains(
    make: Callable[[], nn.Module],
    optimizer: Any = sgd,
    loss: Any = None,
    count: int = STEPS,
    result: Callable[[Run, nn.Module], Any] = Run.result,
) -> Program:
    """A program of a model that is made in the scope."""

    def program(run: Run) -> Any:
        with run.scope():
            model = make()
            made = optimizer(model)
        run.go(plain(run, model, made, loss and (lambda x, y: loss(model, x, y))), count)
        return result(run, model)

    return program
