"""The operations that programs are made of, and what a plan of a program says."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from objects import FEATURES, TARGETS, Program

EXAMPLES = 4
BETWEEN_STEPS = "between steps"
BEFORE, BACKWARD, GRADIENTS, UPDATE, AFTER = "before", "backward", "gradients", "update", "after"
"""The places of operations in a step, in their order."""


class Exchange(Protocol):
    """What replicas do together, in the package or by hand."""

    def backward(
        self,
        loss: torch.Tensor,
        program: Program,
        *,
        inputs: list[torch.Tensor] | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
    ) -> None:
        """A backward pass, after which every replica has the mean of all gradients."""

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of all replicas' values."""


@dataclass
class StepRun:
    """What the operations of one replica's step have in common.

    Attributes:
        features: of its examples.
        targets: of its examples.
        exchange: with the other replica.
        replica: its number.
        same_data: whether all replicas have the same examples.
        factor: by which the model's output is multiplied.
        output: of the last forward pass of the step.
    """

    features: torch.Tensor
    targets: torch.Tensor
    exchange: Exchange
    replica: int
    same_data: bool
    factor: torch.Tensor | None = None
    output: torch.Tensor | None = None


BetweenFunction = Callable[[Program, int], None]
InsideFunction = Callable[[Program, StepRun, int], None]

BETWEEN: dict[str, BetweenFunction] = {}
INSIDE: dict[str, InsideFunction] = {}
PLACES: dict[str, list[str]] = {place: [] for place in (BETWEEN_STEPS, BEFORE, BACKWARD, GRADIENTS, UPDATE, AFTER)}
"""For each place the names of what may stand there, each as often as its odds say."""
VARYING: set[str] = set()
"""What leaves other values in replicas that have other data, so that the same operation between steps, which sees those
of the first replica, means something else than in programs that know nothing of each other."""


def between(odds: int = 1, varies: bool = False) -> Callable[[BetweenFunction], BetweenFunction]:
    """Makes a function one of the things that a program does between steps.

    Args:
        odds: how much more often than others it is drawn.
        varies: whether it belongs to ``VARYING``.
    """

    def register(function: BetweenFunction) -> BetweenFunction:
        BETWEEN[function.__name__] = function
        PLACES[BETWEEN_STEPS].extend([function.__name__] * odds)
        if varies:
            VARYING.add(function.__name__)
        return function

    return register


def inside(*places: str, odds: int = 1, varies: bool = False) -> Callable[[InsideFunction], InsideFunction]:
    """Makes a function one of the things that a step does.

    Args:
        places: where in the step.
        odds: how much more often than others it is drawn.
        varies: whether it belongs to ``VARYING``.
    """

    def register(function: InsideFunction) -> InsideFunction:
        INSIDE[function.__name__] = function
        for place in places:
            PLACES[place].extend([function.__name__] * odds)
        if varies:
            VARYING.add(function.__name__)
        return function

    return register


def _seed(number: int) -> None:
    if torch.get_default_device().type == "cpu":
        torch.default_generator.manual_seed(number)  # without the devices, which takes longer
    else:
        torch.manual_seed(number)


@dataclass(frozen=True)
class Call:
    """An operation, and the number that it gets; a program does it between steps, or a step does it."""

    name: str
    number: int

    def between(self, program: Program) -> None:
        """Does it between steps."""
        _seed(self.number)
        BETWEEN[self.name](program, self.number)

    def inside(self, program: Program, run: StepRun) -> None:
        """Does it in a step."""
        _seed(self.number)
        INSIDE[self.name](program, run, self.number)

    def __str__(self) -> str:
        return f"{self.name}({self.number})"


@dataclass(frozen=True)
class Step:
    """What all replicas do in one run.

    Attributes:
        calls: one after another.
        seed: of the examples.
    """

    calls: tuple[Call, ...]
    seed: int

    def run(
        self,
        program: Program,
        exchange: Exchange,
        replica: int,
        same_data: bool,
        before: Callable[[int], None] = lambda place: None,
    ) -> None:
        """Does a replica's step.

        Args:
            program: the replica's.
            exchange: with the other replica.
            replica: its number.
            same_data: whether all replicas have the same examples.
            before: called before each call with its place, and with their number at the end.
        """
        generator = torch.Generator().manual_seed(self.seed * 2 + (0 if same_data else replica))
        features = torch.randn(EXAMPLES, FEATURES, generator=generator)
        targets = torch.randn(EXAMPLES, TARGETS, generator=generator)
        run = StepRun(features, targets, exchange, replica, same_data)
        for place, call in enumerate(self.calls):
            before(place)
            call.inside(program, run)
        before(len(self.calls))

    def __str__(self) -> str:
        return f"run: {', '.join(map(str, self.calls))}; examples {self.seed}"


@dataclass(frozen=True)
class Plan:
    """A program before it runs.

    Attributes:
        seed: of which it was drawn.
        same_data: whether all replicas have the same examples.
        names: of the model, the optimizer, the grouping of its parameters and the scheduler.
        operations: what happens between steps, and steps.
        often: whether all values are looked at after each operation, which is a run; at the end only, if not.
    """

    seed: int
    same_data: bool
    names: dict[str, str]
    operations: tuple[Call | Step, ...]
    often: bool

    def looks(self, place: int) -> bool:
        """Whether all values are looked at after the operation at a place."""
        return self.often or place == len(self.operations) - 1

    def without(self, names: Set[str]) -> Plan:
        """The same without some operations, in steps and between them.

        Args:
            names: of the operations.
        """
        operations = (
            replace(o, calls=tuple(call for call in o.calls if call.name not in names)) if isinstance(o, Step) else o
            for o in self.operations
            if isinstance(o, Step) or o.name not in names
        )
        return replace(self, operations=tuple(operations))

    def build(self) -> Program:
        """The objects of the program."""
        return Program(self.seed, **self.names)

    def __str__(self) -> str:
        data = "the same examples" if self.same_data else "examples of their own"
        looks = "after each operation" if self.often else "at the end"
        lines = [f"program {self.seed}: replicas with {data}, values compared {looks}"]
        lines.append("  " + ", ".join(f"{part}: {name}" for part, name in self.names.items()))
        return "\n".join([*lines, *(f"  {place}. {operation}" for place, operation in enumerate(self.operations))])
