"""Optimizers of packages that were tried after the others, as those who find this package will: unseen."""

from __future__ import annotations

from typing import Any

import adabelief_pytorch
import adabound
import adam_atan2_pytorch
import adamp
import adan_pytorch
import came_pytorch
import casmo
import core_optimizer
import dadaptation
import geoopt
import grokfast_pytorch
import heavyball
import madgrad
import muon
import optimi
import pytorch_ranger
import ranger21
import sophia_opt
import torch
import torchzero as tz
from optimizers import OF_THE_REPLICA, ROUNDING, Made, Matrices, of, trained
from programs import DRAWS, Program, Run, add
from torch import nn, optim
from torch.nn import functional as F

GROUP = "optimizers"
heavyball.utils.compile_mode = None  # a compiler would take longer than all the cases


def _classes(package: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(package).items() if isinstance(value, type)}
    return {name: kind for name, kind in sorted(found.items()) if issubclass(kind, optim.Optimizer)}


for _package, _without in (
    (dadaptation, ()), (madgrad, ()), (adan_pytorch, ()), (adabound, ()), (adamp, ()), (pytorch_ranger, ()),
    (core_optimizer, ()), (casmo, ()), (grokfast_pytorch, ()),
    (adam_atan2_pytorch, ("Adam", "Adopt", "MuonAdamAtan2", "PolarAdamAtan2")),
    (optimi, ("StableAdamW",)), (adabelief_pytorch, ()), (came_pytorch, ()),
):  # fmt: skip
    for _name, _kind in _classes(_package).items():
        if _name not in _without:
            add(GROUP, f"{_package.__name__}.{_name}", trained(of(_kind)))
SINGLE = ("SOAP", "SOLP", "Shampoo", "PSGD", "QSGD", "LATHER")
"""Mix fp32 with the default type."""
for _name, _kind in _classes(heavyball).items():
    if _name not in ("SAMWrapper", "SplitOpt", "PSGDBase", "SOAPBase"):
        _single: dict[str, Any] = {"dtype": "fp32"} if any(part in _name for part in SINGLE) else {}
        if "SOAP" in _name or "SOLP" in _name:
            _single["differs"] = ROUNDING
        if _name in ("LATHER", "PSGDKron", "PSGDLRA"):
            _single["differs"] = {"elastic": DRAWS}
        add(GROUP, f"heavyball.{_name}", trained(of(_kind), Matrices), limit=120.0, **_single)
add(GROUP, "heavyball.SplitOpt", trained(lambda m: heavyball.SplitOpt([
    {"params": [p for p in m.parameters() if p.ndim == 2], "optimizer": heavyball.Muon, "lr": 1e-3},
    {"params": [p for p in m.parameters() if p.ndim < 2], "optimizer": heavyball.AdamW, "lr": 1e-3},
])))  # fmt: skip

OTHERS: dict[str, Made] = {
    "ranger21.Ranger21": lambda m: ranger21.Ranger21(
        m.parameters(), lr=1e-2, num_epochs=3, num_batches_per_epoch=2, lookahead_mergetime=2, logging_active=False
    ),
    "ranger21.Ranger21-madgrad": lambda m: ranger21.Ranger21(
        m.parameters(), lr=1e-2, num_epochs=3, num_batches_per_epoch=2, use_madgrad=True, logging_active=False
    ),
    "sophia_opt.SophiaG": lambda m: sophia_opt.SophiaG(m.parameters(), lr=1e-3),
    "muon.SingleDeviceMuonWithAuxAdam": lambda m: muon.SingleDeviceMuonWithAuxAdam([
        {"params": [p for p in m.parameters() if p.ndim == 2], "use_muon": True},
        {"params": [p for p in m.parameters() if p.ndim < 2], "use_muon": False},
    ]),
    "geoopt.RiemannianAdam": lambda m: geoopt.optim.RiemannianAdam(m.parameters(), lr=1e-2, stabilize=2),
    "geoopt.RiemannianSGD": lambda m: geoopt.optim.RiemannianSGD(m.parameters(), lr=1e-2, momentum=0.9),
    "optimi.AdamW-decoupled": lambda m: optimi.AdamW(m.parameters(), lr=1e-3, weight_decay=1e-2, decouple_lr=True),
    "optimi.Adam-foreach": lambda m: optimi.Adam(m.parameters(), lr=1e-3, foreach=True),
    "optimi.param-groups": lambda m: optimi.StableAdamW(optimi.param_groups_weight_decay(m), lr=1e-3, triton=False),
}  # fmt: skip
for _name, _make in OTHERS.items():
    add(GROUP, _name, trained(_make))


class _Sphere(nn.Module):
    """A layer whose weight lies on a manifold."""

    def __init__(self, manifold: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3)
        self.point = geoopt.ManifoldParameter(manifold.random(5, 5), manifold=manifold)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)) @ self.point)


for _name, _manifold in {"Stiefel": geoopt.Stiefel, "Sphere": geoopt.Sphere, "Euclidean": geoopt.Euclidean}.items():
    add(GROUP, f"geoopt.{_name}", trained(
        lambda m: geoopt.optim.RiemannianAdam(m.parameters(), lr=1e-2), lambda made=_manifold: _Sphere(made())
    ))  # fmt: skip

# ---- chains of transformations ------------------------------------------------------------------------------------

M = tz.m
CHAINS: dict[str, Any] = {
    "Adam": lambda: (M.Adam(), M.LR(1e-2)),
    "clip-Adam-decay": lambda: (M.ClipNorm(1.0), M.Adam(), M.WeightDecay(1e-2), M.LR(1e-2)),
    "Cautious-NAG": lambda: (M.NAG(0.9), M.Cautious(), M.LR(1e-2)),
    "SOAP": lambda: (M.SOAP(), M.LR(1e-2)),
    "Shampoo": lambda: (M.Shampoo(), M.LR(1e-2)),
    "Lion-centralize": lambda: (M.Centralize(), M.Lion(), M.LR(1e-2)),
    "Muon-orthogonal": lambda: (M.NAG(0.95), M.Orthogonalize(), M.LR(1e-2)),
    "RMSprop-accumulate": lambda: (M.GradientAccumulation(2), M.RMSprop(), M.LR(1e-2)),
    "Averaging": lambda: (M.Averaging(3), M.LR(1e-2)),
    "Rprop": lambda: (M.Rprop(), M.LR(1e-2)),
    "BFGS": lambda: (M.BFGS(), M.LR(1e-1)),
    "LBFGS": lambda: (M.LBFGS(), M.LR(1e-1)),
}
for _name, _chain in CHAINS.items():
    _make = lambda m, chain=_chain: tz.Optimizer(m.parameters(), *chain())  # noqa: E731
    add(GROUP, f"torchzero.{_name}", trained(_make), differs=ROUNDING if _name == "SOAP" else {})
CLOSURES: dict[str, Any] = {
    "SAM": lambda: (M.SAM(), M.Adam(), M.LR(1e-2)),
    "Backtracking": lambda: (M.Adam(), M.Backtracking()),
    "LBFGS-Backtracking": lambda: (M.LBFGS(), M.Backtracking()),
    "Newton": lambda: (M.Newton(), M.LR(1e-1)),
    "NewtonCG": lambda: (M.NewtonCG(), M.LR(1e-1)),
    "SVRG": lambda: (M.SVRG(3), M.LR(1e-2)),
    "ESGD": lambda: (M.ESGD(), M.LR(1e-2)),
    "PolyakStep": lambda: (M.PolyakStepSize(),),
    "SPSA": lambda: (M.SPSA(), M.LR(1e-3)),
}


def _torchzero(chain: Any) -> Program:
    """A step whose closure is told whether to call ``backward()``, as this package asks for."""

    def program(run: Run) -> Any:
        with run.scope():
            model = Matrices()
            optimizer = tz.Optimizer(model.parameters(), *chain())

        def step(i: int) -> None:
            def closure(backward: bool = True) -> torch.Tensor:
                x, y = run.xy(i)
                loss = F.mse_loss(model(x), y)
                if backward:
                    optimizer.zero_grad()
                    loss.backward()
                return loss

            optimizer.step(closure)

        torch.manual_seed(0)
        run.go(step)
        return run.result(model)

    return program


LOSS = "its step depends on the loss that the closure returns, which is that of the replica's share"
OF_AUTOGRAD = {
    "Newton": {"differs": OF_THE_REPLICA},
    "NewtonCG": {"refused": "would apply a result of torch.autograd.grad|nder central storage"},
    "ESGD": {"refused": "would apply a result of torch.autograd.grad|nder central storage"},
}
for _name, _chain in CLOSURES.items():
    _options = OF_AUTOGRAD.get(_name, {})
    if _name in ("Backtracking", "LBFGS-Backtracking", "PolyakStep", "SPSA"):
        _options = {"differs": LOSS}
    add(GROUP, f"torchzero.{_name}-closure", _torchzero(_chain), **_options)

# ---- what wraps ---------------------------------------------------------------------------------------------------


def _gradient_release(run: Run) -> Any:
    """An optimizer that steps in hooks while ``backward()`` runs."""
    with run.scope():
        model = Matrices()
        optimizer = optimi.AdamW(model.parameters(), lr=1e-3, gradient_release=True)
        optimi.prepare_for_gradient_release(model, optimizer, ignore_existing_hooks=True)

    def step(i: int) -> None:
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()

    run.go(step)
    return run.result(model)


add(GROUP, "optimi.gradient-release", _gradient_release, refused="was called while backward.. is under way")


def _sophia(run: Run) -> Any:
    """The curvature is estimated from a second ``backward()`` of labels that the model draws."""
    with run.scope():
        model = Matrices()
        optimizer = sophia_opt.SophiaG(model.parameters(), lr=1e-3)

    def step(i: int) -> None:
        x, y = run.xy(i)
        F.mse_loss(model(x), y).backward()
        optimizer.step(bs=8)
        optimizer.zero_grad(set_to_none=True)
        if i % 2 == 1:
            F.mse_loss(model(x), y.sign()).backward()
            optimizer.update_hessian()
            optimizer.zero_grad(set_to_none=True)

    run.go(step)
    return run.result(model)


WRITES = "under central storage a write to optimizer.state is made once for each replica that makes it"
add(GROUP, "sophia_opt.SophiaG-hessian", _sophia, differs={"central": WRITES})
