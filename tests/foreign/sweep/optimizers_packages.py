"""Optimizers of other packages: every class of pytorch-optimizer and torch-optimizer, and some more."""

from __future__ import annotations

from typing import Any

import ema_pytorch
import lion_pytorch
import prodigyopt
import pytorch_optimizer
import schedulefree
import torch
import torch_ema
import torch_optimizer
from optimizers import OF_THE_REPLICA, ROUNDING, Made, Matrices, Normed, of, trained
from programs import DRAWS, Program, Run, add
from torch import optim
from torch.nn import functional as F

FORMS = ("replicas", "ranks")
GROUP = "optimizers"


def _low_rank(kind: Any) -> Made:
    options = {"rank": 2, "update_proj_gap": 2, "scale": 1.0, "projection_type": "std"}
    return lambda model: kind([{"params": list(model.parameters()), **options}], lr=1e-3)


def _classes(package: Any) -> dict[str, Any]:
    found = {name: value for name, value in vars(package).items() if isinstance(value, type)}
    return {name: kind for name, kind in sorted(found.items()) if issubclass(kind, optim.Optimizer)}


P = pytorch_optimizer
WRAPPERS: dict[str, Made] = {
    "Lookahead": lambda m: P.Lookahead(optim.Adam(m.parameters(), lr=1e-3), k=2),
    "OrthoGrad": lambda m: P.OrthoGrad(optim.AdamW(m.parameters(), lr=1e-3)),
    "ScheduleFreeWrapper": lambda m: P.ScheduleFreeWrapper(optim.AdamW(m.parameters(), lr=1e-3)),
    "TRAC": lambda m: P.TRAC(optim.AdamW(m.parameters(), lr=1e-3)),
}
SHARPNESS: dict[str, Made] = {
    kind.__name__: lambda m, kind=kind: kind(m.parameters(), optim.SGD, lr=0.05)
    for kind in (P.SAM, P.FriendlySAM, P.LookSAM)
}
SHARPNESS["WSAM"] = lambda m: P.WSAM(m, m.parameters(), optim.SGD, lr=0.05)
ASKS: dict[str, str] = {
    "AdaHessian": "graph",
    "SophiaH": "graph",
    "AliG": "loss",
    "LBFGS": "closure",
}
FUSED = {"LOMO": P.LOMO, "AdaLOMO": P.AdaLOMO}
SINGLE = ("FAdam", "Magma")
"""Mix fp32 with the default type."""
ONLY_MATRICES = ("SpectralSphere", "DistributedMuon", "DeMo")
NOT_HERE = {
    *WRAPPERS,
    *SHARPNESS,
    *ONLY_MATRICES,
    *FUSED,
    "GSAM",
    "PCGrad",
    "SafeFP16Optimizer",
    "Optimizer",
    "BaseOptimizer",
    "BSAM",  # raises on one device, like DistributedMuon
}

for _name, _kind in _classes(P).items():
    if _name in NOT_HERE:
        continue
    _make = of(_kind)
    _options: dict[str, Any] = {"dtype": "fp32", "tolerance": 2e-5} if _name in SINGLE else {}
    if _name in ("AdaHessian", "SophiaH"):
        _options["differs"] = OF_THE_REPLICA
        # They ask autograd for each parameter, and all replicas but the first have none.
        _options["refused"] = {"central": "The replicas made different calls"}
    if _name in ("Gravity", "Kron", "Magma"):
        _options["differs"] = {"elastic": DRAWS}
    if _name == "Kron":  # numpy draws whether its factors are balanced, which changes the rounding alone
        _options["tolerance"] = 1e-7
    if _name == "SOAP":
        _options["differs"] = ROUNDING
    if _name == "LBFGS":
        _options["refused"] = r"LBFGS calls its closure a different number of times"
    add(GROUP, f"pytorch_optimizer.{_name}", trained(_make, how=ASKS.get(_name, "plain")), **_options)
for _name, _make in WRAPPERS.items():
    add(GROUP, f"pytorch_optimizer.{_name}", trained(_make))
for _name, _make in SHARPNESS.items():
    add(GROUP, f"pytorch_optimizer.{_name}", trained(_make, how="two steps"))
add(GROUP, "pytorch_optimizer.SAM-closure", trained(SHARPNESS["SAM"], how="closure"))
for _name in ("SpectralSphere", "Muon", "GaLore", "SCION", "SOAP", "Alice", "Fira"):
    _options = {"differs": ROUNDING} if _name == "SOAP" else {}
    add(GROUP, f"pytorch_optimizer.{_name}-matrices", trained(of(getattr(P, _name)), Matrices), **_options)
for _name in ("GaLore", "APOLLO", "Fira", "Alice", "RACS", "Conda"):
    _options = {"differs": {"elastic": DRAWS}} if _name == "APOLLO" else {}
    add(GROUP, f"pytorch_optimizer.{_name}-low-rank", trained(_low_rank(getattr(P, _name)), Matrices), **_options)
for _name, _kind in FUSED.items():
    _make = lambda m, kind=_kind: kind(m, lr=1e-3)  # noqa: E731
    add(GROUP, f"pytorch_optimizer.{_name}-fused-backward", trained(_make, how="fused"), differs=(
        "updates inside of hooks, with the gradients of one replica: the replicas drift apart"
    ))  # fmt: skip

for _name, _kind in _classes(torch_optimizer).items():
    if _name in ("Adafactor", "Lookahead", "Optimizer", "Shampoo", "Adahessian"):
        continue
    add(GROUP, f"torch_optimizer.{_name}", trained(of(_kind)))
add(GROUP, "torch_optimizer.Shampoo", trained(of(torch_optimizer.Shampoo), Matrices))
add(GROUP, "torch_optimizer.Adafactor", trained(of(torch_optimizer.Adafactor)))
add(
    GROUP,
    "torch_optimizer.Adahessian",
    trained(of(torch_optimizer.Adahessian), how="graph"),
    differs=OF_THE_REPLICA,
    refused={"central": "argument to `grad..` cannot be empty"},
)
add(GROUP, "torch_optimizer.Lookahead", trained(
    lambda m: torch_optimizer.Lookahead(torch_optimizer.Yogi(m.parameters(), lr=1e-2), k=2)
))  # fmt: skip

for _name in dir(schedulefree):
    _kind = getattr(schedulefree, _name)
    if not isinstance(_kind, type) or (not issubclass(_kind, optim.Optimizer) and "Wrapper" not in _name):
        continue
    if "Wrapper" in _name:
        _make = lambda m, kind=_kind: kind(optim.SGD(m.parameters(), lr=1e-2))  # noqa: E731
    else:
        _make = lambda m, kind=_kind: kind(m.parameters(), lr=1e-2)  # noqa: E731
    _how = "closure" if _name.endswith("Closure") else "plain"
    add(GROUP, f"schedulefree.{_name}", trained(_make, how=_how))
    if _how == "plain" and hasattr(_kind, "eval"):
        add(GROUP, f"schedulefree.{_name}-eval", trained(_make, ends=True))

OTHERS: dict[str, Made] = {
    "lion_pytorch.Lion": lambda m: lion_pytorch.Lion(m.parameters(), lr=1e-3),
    "lion_pytorch.Lion-decoupled": lambda m: lion_pytorch.Lion(
        m.parameters(), lr=1e-3, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "prodigyopt.Prodigy": lambda m: prodigyopt.Prodigy(m.parameters()),
    "prodigyopt.Prodigy-slice": lambda m: prodigyopt.Prodigy(
        m.parameters(), slice_p=3, safeguard_warmup=True, decouple=True
    ),
}
for _name, _make in OTHERS.items():
    add(GROUP, _name, trained(_make))


def _averaged(make: Made, inside: bool, in_step: bool) -> Program:
    def program(run: Run) -> Any:
        with run.scope():
            model = Normed()
            optimizer = optim.Adam(model.parameters(), lr=0.01)
            average = make(model) if inside else None
        average = average or make(model)

        def step(i: int) -> None:
            x, y = run.xy(i)
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            if in_step:
                average.update()

        def shadow() -> list[torch.Tensor]:
            own = getattr(average, "shadow_params", None)
            return list(average.ema_model.parameters() if own is None else own)

        for i in range(6):
            run.run(step, i)
            if not in_step:
                average.update()
        return {**run.result(model), "shadow": shadow(), "shadows": run.each(shadow)}

    return program


AVERAGES: dict[str, Made] = {
    "ema_pytorch.EMA": lambda m: ema_pytorch.EMA(m, beta=0.9, update_after_step=1, update_every=2),
    "ema_pytorch.KarrasEMA": lambda m: ema_pytorch.KarrasEMA(m, sigma_rel=0.05, update_every=1),
    "torch_ema": lambda m: torch_ema.ExponentialMovingAverage(m.parameters(), 0.9),
}
for _name, _make in AVERAGES.items():
    for _inside in (True, False):
        for _in_step in (True, False):
            _where = f"{'in-scope' if _inside else 'outside'}-{'in-step' if _in_step else 'after-run'}"
            add(GROUP, f"{_name}-{_where}", _averaged(_make, _inside, _in_step))
