"""What a random program is made of: its model, its optimizer, its scheduler, and whatever else it comes to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import of_their_own
import torch
from torch import nn, optim
from torch.nn.utils import parametrizations
from torch.optim import lr_scheduler

FEATURES, TARGETS = 6, 3

_T = TypeVar("_T")


class Counting(nn.Module):
    """Writes down in many ways what it has seen: numbers, lists, dicts, tensors that are buffers and others."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, 8)
        self.b = nn.Linear(8, 8)
        self.c = nn.Linear(8, TARGETS)
        self.calls = 0
        self.history: list[float] = []
        self.last: torch.Tensor | None = None
        self.info: dict[str, Any] = {"max": 0.0, "seen": []}
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.ema = torch.zeros(TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden = torch.tanh(self.a(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
            self.n += 1
        hidden = self.b(hidden) + self.mean
        self.last = hidden.detach()
        out = self.c(torch.relu(hidden))
        seen = out.detach()
        self.ema.mul_(0.5).add_(seen.mean(0))
        self.history.append(float(seen.sum()))
        self.info["max"] = max(self.info["max"], float(seen.abs().max()))
        self.info["seen"] = [*self.info["seen"][-2:], seen.sum()]
        return out


class Tied(nn.Module):
    """Two of its layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 6)
        self.encoder = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, TARGETS)
        self.decoder = nn.Linear(6, 6, bias=False)
        self.decoder.weight = self.encoder.weight
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.decoder(torch.relu(self.encoder(self.first(x))))
        return self.last(self.norm(hidden) * self.scale)


class Recurrent(nn.Module):
    """Keeps its last state."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cells = kind(3, 5, batch_first=True)
        self.last = nn.Linear(5, TARGETS)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, state = self.cells(x.reshape(-1, 2, 3))
        self.state = (state[0] if isinstance(state, tuple) else state).detach()
        return self.last(out[:, -1])


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4 * FEATURES, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(x[:, None]))).flatten(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
        self.last = nn.Linear(4, TARGETS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(self.first(x.reshape(-1, 2, 3))).mean(1))


def _grouped() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Identity(), nn.PReLU(), nn.GroupNorm(2, 8), nn.Linear(8, TARGETS))


def _reparametrized() -> nn.Module:
    first = parametrizations.weight_norm(nn.Linear(FEATURES, 8))
    return nn.Sequential(first, nn.Tanh(), parametrizations.spectral_norm(nn.Linear(8, TARGETS)))


def _batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, TARGETS))


WITHOUT_TRACES: dict[str, Callable[[], nn.Module]] = {
    "grouped": _grouped,
    "tied": Tied,
    "attention": Attention,
    "reparametrized": _reparametrized,
    **of_their_own.MODELS,
}
"""Models in which a forward pass leaves nothing of its data, so that replicas with data of their own stay alike."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    **WITHOUT_TRACES,
    "counting": Counting,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "convolution": Convolution,
    "batch norm": _batch_norm,
}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.05),
    "nesterov": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "foreach momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, foreach=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
    "asgd": lambda p: optim.ASGD(p, lr=0.05),
    "adam with a tensor as rate": lambda p: optim.Adam(p, lr=torch.tensor(0.01)),
    "fused adam": lambda p: optim.Adam(p, lr=0.01, fused=True),
    "fused adamw": lambda p: optim.AdamW(p, lr=0.01, fused=True),
    "fused momentum": lambda p: optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "fused adagrad": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
    "foreach adam": lambda p: optim.Adam(p, lr=0.01, foreach=True),
    **of_their_own.OPTIMIZERS,
}
SCHEDULERS: dict[str, Callable[[optim.Optimizer], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=100, cycle_momentum=False),
}


def _one_group(model: nn.Module) -> list[Any]:
    return [*model.parameters()]


def _two_groups(model: nn.Module) -> list[Any]:
    found = [*model.parameters()]
    return [{"params": found[:2], "lr": 0.02}, {"params": found[2:], "weight_decay": 0.01}]


def _a_group_for_each(model: nn.Module) -> list[Any]:
    return [{"params": [p], "name": str(i)} for i, p in enumerate(model.parameters())]


GROUPINGS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "one": _one_group,
    "two": _two_groups,
    "each": _a_group_for_each,
}


def picked(table: Mapping[str, _T], number: int) -> _T:
    """The entry that a number means.

    Args:
        table: the entries.
        number: any.
    """
    return table[list(table)[number % len(table)]]


class Holder:
    """An object of a class that nobody but the program knows, with whatever attributes it gets."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Program:
    """All that a program holds; the operations give it more attributes (``view``, ``mods``, ``helper`` and so on).

    Args:
        seed: of the weights, and of the generator that the program has.
        model: a name of ``MODELS``.
        optimizer: a name of ``OPTIMIZERS``.
        grouping: a name of ``GROUPINGS``.
        scheduler: a name of ``SCHEDULERS``, or "none".
    """

    def __init__(self, seed: int, model: str, optimizer: str, grouping: str, scheduler: str) -> None:
        torch.manual_seed(seed)
        self.model: Any = MODELS[model]()
        self.optimizer = OPTIMIZERS[optimizer](GROUPINGS[grouping](self.model))
        self.scheduler = None if scheduler == "none" else SCHEDULERS[scheduler](self.optimizer)
        self.generator = torch.Generator().manual_seed(seed)
        self.saved: dict[str, Any] | None = None
        self.saved_optimizer: dict[str, Any] = {}
        self.teacher: Any = None
        self.extra: nn.Module | None = None
        self.average: optim.swa_utils.AveragedModel | None = None
        self.buffer: torch.Tensor | None = None
        self.count = 0
        self.log: list[int] = []
        self.best: dict[str, Any] = {}
        self.hooks: list[Any] = []

    def parameters(self) -> list[nn.Parameter]:
        """Those of the model, and of the layer that may have been put behind it."""
        return [*self.model.parameters(), *(() if self.extra is None else self.extra.parameters())]

    def trained(self) -> list[nn.Parameter]:
        """Those that are not frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def parameter(self, number: int) -> nn.Parameter:
        """The one that a number means."""
        found = self.parameters()
        return found[number % len(found)]

    def has(self, name: str) -> bool:
        """Whether it has got an attribute."""
        return getattr(self, name, None) is not None

    def take_optimizer(self, number: int, grouping: str = "one") -> None:
        """Goes on with a new optimizer of the model, without what was there for the old one.

        Args:
            number: which one.
            grouping: of the parameters.
        """
        self.optimizer = picked(OPTIMIZERS, number)(GROUPINGS[grouping](self.model))
        self.scheduler = self.extra = self.saved = None

    def load(self) -> None:
        """Loads the model that was saved, if it still fits."""
        if self.saved is not None and set(self.saved) == set(self.model.state_dict()):
            self.model.load_state_dict(self.saved)

    def step_scheduler(self) -> None:
        """One step of the scheduler, if there is one."""
        if self.scheduler is not None:
            metrics = [1.0] if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau) else []
            self.scheduler.step(*metrics)

    def average_into_teacher(self) -> None:
        """Moves the teacher, if there is one, towards the model."""
        if self.teacher is None:
            return
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.model.parameters(), strict=False):
                if old.shape == new.shape:
                    old.lerp_(new, 0.3)

    def update_average(self) -> None:
        """One update of the averaged model, if there is one that still fits."""
        if self.average is None:
            return
        try:
            self.average.update_parameters(self.model)
        except RuntimeError:
            self.average = None
