"""One training loop, run by plain PyTorch and by a strategy, and the comparison of what comes out."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from models import BATCH, CASES, Batch
from torch import nn

import tfstyle_dist as td

STEPS = 50
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}

# Adam divides by the size of a gradient. Some are zero but for rounding (the key bias of attention); with an
# epsilon far below the rounding error Adam makes a full step of that noise, on one device too.
_EPSILON = 1e-3

PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.003, eps=_EPSILON, weight_decay=0.01),
}
TF_STYLE: dict[str, Callable[[], td.train.TFOptimizer]] = {
    "sgd": lambda: td.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: td.train.MomentumOptimizer(0.05, 0.9),
    "adam": lambda: td.train.AdamOptimizer(0.003, epsilon=_EPSILON),
}

Weights = dict[str, torch.Tensor]


def build(name: str, dtype: torch.dtype) -> nn.Module:
    """The model of a case with the same weights at every call."""
    torch.manual_seed(11)
    return CASES[name].build().to(dtype)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]


def values_of(model: nn.Module) -> Weights:
    """Copies of all parameters and buffers."""
    with torch.no_grad():
        return {n: t.clone() for n, t in (*model.named_parameters(), *model.named_buffers())}


@functools.cache
def one_device(name: str, optimizer: str, dtype: torch.dtype, tf_style: bool) -> Weights:
    """What plain PyTorch gives; with ``tf_style`` by the package's optimizer, but without a strategy."""
    model = build(name, dtype)
    plain = None if tf_style else PLAIN[optimizer](model.parameters())
    styled = TF_STYLE[optimizer]() if tf_style else None
    for batch in CASES[name].batches(STEPS, dtype):
        loss = model(*batch).sum() / BATCH
        if styled is not None:
            styled.minimize(loss, var_list=trainable(model))
            continue
        assert plain is not None
        plain.zero_grad()
        loss.backward()
        plain.step()
    return values_of(model)


def share(batch: Batch, sizes: Sequence[int], replica: int) -> Batch:
    """The part of a global batch that is one replica's, on the calling replica's device."""
    here = torch.empty(0).device
    return tuple(part.split(list(sizes))[replica].to(here) for part in batch)


def distributed(
    strategy: td.Strategy, name: str, optimizer: str, dtype: torch.dtype, sizes: Sequence[int], reduction: str
) -> Weights:
    """Trains under a strategy.

    Args:
        strategy: in force during the training.
        name: a case.
        optimizer: a name of ``PLAIN`` or ``TF_STYLE``.
        dtype: of weights and data.
        sizes: each replica's share of the global batch.
        reduction: ``"mean"``: plain optimizer, each replica takes the mean of its share; ``"sum"``: plain
            optimizer whose gradients are summed; ``"tf"``: TF-style optimizer. The last two scale by the
            global batch.

    Returns:
        The weights of all replicas, the replica first.
    """
    with strategy.scope():
        model = build(name, dtype)
        styled = TF_STYLE[optimizer]() if reduction == "tf" else None
        plain = None if reduction == "tf" else PLAIN[optimizer](model.parameters())
    if reduction == "sum":
        strategy.set_gradient_policy(scale="SUM")

    def step(batch: Batch) -> None:
        context = td.get_replica_context()
        assert context is not None
        losses = model(*share(batch, sizes, context.replica_id_in_sync_group))
        if reduction == "mean":
            loss = losses.sum() / len(losses)
        else:
            loss = td.nn.compute_average_loss(losses, global_batch_size=BATCH)
        if styled is not None:
            styled.minimize(loss, var_list=trainable(model))
            return
        assert plain is not None
        plain.zero_grad()
        loss.backward()
        plain.step()

    def gather() -> Weights:
        context = td.get_replica_context()
        assert context is not None
        return {n: context.all_gather(v.unsqueeze(0), axis=0) for n, v in values_of(model).items()}

    for batch in CASES[name].batches(STEPS, dtype):
        strategy.run(step, args=(batch,))
    weights: Any = strategy.experimental_local_results(strategy.run(gather))[0]
    return weights


def check_parity(
    strategy: td.Strategy,
    name: str,
    optimizer: str,
    dtype: torch.dtype,
    sizes: Sequence[int],
    reduction: str,
    tolerance: float | None = None,
    twice: bool = True,
) -> None:
    """Trains, maybe ``twice``, and compares with one device, between the replicas, and between the runs.

    The weights of all replicas are the same on every worker, so the first one alone compares.
    """
    assert sum(sizes) == BATCH
    assert len(sizes) == strategy.num_replicas_in_sync
    weights = distributed(strategy, name, optimizer, dtype, sizes, reduction)
    again = weights
    if twice:
        gc.collect()  # a first model that is still there would share buckets with the second
        again = distributed(strategy, name, optimizer, dtype, sizes, reduction)
    if not strategy.is_chief:
        return
    expected = one_device(name, optimizer, dtype, reduction == "tf")
    assert list(weights) == list(expected)
    start = values_of(build(name, dtype))
    assert any(not torch.equal(start[n], expected[n]) for n in expected), "the reference did not train"
    for key, reference in expected.items():
        replicas = weights[key]
        assert replicas.shape == (len(sizes), *reference.shape)
        assert replicas.dtype == reference.dtype
        assert all(torch.equal(r, replicas[0]) for r in replicas), f"{key} differs between the replicas"
        assert torch.equal(replicas, again[key]), f"{key} differs from run to run"
        error = float((replicas[0] - reference).abs().max() / reference.abs().max().clamp_min(1e-30))
        limit = TOLERANCE[dtype] if tolerance is None else tolerance
        assert error <= limit, f"{key}: max|dw| / max|w| = {error:.3g}"
