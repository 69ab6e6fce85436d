"""Small models on real data, each with what once broke, or could break, a way of replicating modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations

BATCH = 12
"""Examples in a global batch: 6 and 6 for two replicas, 6, 4 and 2 for three."""

Batch = tuple[torch.Tensor, ...]


# ---- data ----


@functools.cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Handwritten digits: 1797 images of 8 x 8 and their classes."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16.0, dtype=torch.float64), torch.tensor(labels)


@functools.cache
def breast_cancer() -> tuple[torch.Tensor, torch.Tensor]:
    """569 examples of 30 standardised features, two classes."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    values = torch.tensor(features, dtype=torch.float64)
    return (values - values.mean(0)) / values.std(0), torch.tensor(labels)


@functools.cache
def diabetes() -> tuple[torch.Tensor, torch.Tensor]:
    """442 examples of 10 features; the target is a number."""
    from sklearn.datasets import load_diabetes

    features, target = load_diabetes(return_X_y=True)
    values = torch.tensor(features, dtype=torch.float64) * 20.0
    numbers = torch.tensor(target, dtype=torch.float64)
    return values, (numbers - numbers.mean()) / numbers.std()


@functools.cache
def python_text(length: int = 16) -> torch.Tensor:
    """Rows of ``length`` characters of Python's own documentation, as numbers below 64."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)[:6])
    codes = torch.tensor([min(max(ord(c) - 32, 0), 95) * 2 // 3 for c in text])
    return codes[: len(codes) // length * length].view(-1, length)


def global_batch(data: Batch, step: int, dtype: torch.dtype) -> Batch:
    """The examples of one step, floating point ones in ``dtype``."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(step))[:BATCH]
    return tuple(d[order].to(dtype) if d.is_floating_point() else d[order] for d in data)


# ---- models ----


class Mlp(nn.Module):
    """Two linear layers on the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.layers(images), labels, reduction="none")


class Cnn(nn.Module):
    """Convolution, pooling and a linear layer; no batch statistics, which differ from replica to replica."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.head = nn.Linear(4 * 16, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = functional.avg_pool2d(torch.tanh(self.convolution(images.view(-1, 1, 8, 8))), 2)
        return functional.cross_entropy(self.head(hidden.flatten(1)), labels, reduction="none")


class Lstm(nn.Module):
    """Reads an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states, _ = self.lstm(images.view(-1, 8, 8))
        return functional.cross_entropy(self.head(states[:, -1]), labels, reduction="none")


class TiedGpt2(nn.Module):
    """A transformer whose output layer is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        )  # fmt: skip
        self.model = GPT2LMHeadModel(config)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        logits = self.model(codes).logits[:, :-1]
        losses = functional.cross_entropy(logits.transpose(1, 2), codes[:, 1:], reduction="none")
        return losses.mean(1)


class _Linear(torch.autograd.Function):
    """``x @ weight.T``; autograd calls it with the parameter object itself, past ``__torch_function__``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight, grads[0].t() @ x


class CustomFunction(nn.Module):
    """One parameter is used by a custom autograd Function alone, another also by an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(8, 30))
        self.second = nn.Parameter(torch.empty(2, 8))
        nn.init.normal_(self.first, std=0.2)
        nn.init.normal_(self.second, std=0.2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(_Linear.apply(features, self.first))
        logits = _Linear.apply(hidden, self.second) + 0.5 * functional.linear(hidden, self.second)
        return functional.cross_entropy(logits, labels, reduction="none")


class Parametrized(nn.Module):
    """Spectral and weight normalisation.

    Spectral normalisation changes two buffers in each forward of training mode, from the weight alone.
    Replicas that begin with equal buffers and make equally many forwards keep equal buffers, whatever their data. So
    parity with one device is defined in training mode: a replica makes one forward a step, however small its
    share.
    """

    def __init__(self) -> None:
        super().__init__()
        self.spectral = parametrizations.spectral_norm(nn.Linear(10, 8))
        self.weighted = parametrizations.weight_norm(nn.Linear(8, 1))

    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.weighted(torch.tanh(self.spectral(features))).squeeze(1) - target) ** 2


class PartlyUsed(nn.Module):
    """Parameters that are frozen, used by nobody, and used only for the last two examples of a global batch.

    The last two are in the last replica's share, so ``sometimes`` has a gradient on that replica alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(30, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.sometimes = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.base(features))))
        if last.any():
            hidden = torch.cat([hidden[~last], self.sometimes(hidden[last])])
        return functional.cross_entropy(self.head(hidden), labels, reduction="none")


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the module; its forward gives one loss for each example.
        data: the whole data set.
    """

    build: Callable[[], nn.Module]
    data: Callable[[], Batch]
    marks_last: bool = False

    def batches(self, steps: int, dtype: torch.dtype) -> Iterator[Batch]:
        """The global batches of a training."""
        last = torch.arange(BATCH) >= BATCH - 2
        for step in range(steps):
            batch = global_batch(self.data(), step, dtype)
            yield (*batch, last) if self.marks_last else batch


CASES = {
    "mlp": Case(Mlp, digits),
    "cnn": Case(Cnn, digits),
    "lstm": Case(Lstm, digits),
    "gpt2": Case(TiedGpt2, lambda: (python_text(),)),
    "custom_function": Case(CustomFunction, breast_cancer),
    "parametrized": Case(Parametrized, diabetes),
    "partly_used": Case(PartlyUsed, breast_cancer, marks_last=True),
}
