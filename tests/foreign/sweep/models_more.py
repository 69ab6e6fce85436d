"""Models of packages that were tried after the others: flows, processes, liquid networks, experts."""

from __future__ import annotations

import random as python_random
from typing import Any

import entmax
import g_mlp_pytorch
import hyper_connections
import kan
import linformer
import local_attention
import mambapy.mamba
import mixture_of_experts
import ncps.torch
import ncps.wirings
import nystrom_attention
import perceiver_pytorch
import performer_pytorch
import product_key_memory
import pytorch_tcn
import reformer_pytorch
import rotary_embedding_torch
import siren_pytorch
import soft_moe_pytorch
import st_moe_pytorch
import torch
import torchcde
import torchcrf
import torchsde
import zuko
from models import Recipe, mean_square, model
from programs import BATCH, BROAD, integers, random
from torch import nn
from torch.nn import functional as F


def vectors(i: int) -> torch.Tensor:
    return random(i, BATCH, 6)


def pairs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(i, BATCH, 6), random(i + 50, BATCH, 3)


def series(i: int) -> torch.Tensor:
    return random(i, BATCH, 16, 8)


def tokens(i: int) -> torch.Tensor:
    return integers(i, 50, BATCH, 16)


def images(i: int) -> torch.Tensor:
    return random(i, BATCH, 3, 16, 16)


def next_token(made: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = made(ids)
    return F.cross_entropy((found[0] if isinstance(found, tuple) else found).transpose(1, 2), ids.roll(1, 1))


def square(made: nn.Module, x: Any) -> torch.Tensor:
    return mean_square(made(x))


def more(
    name: str, build: Any, batch: Any, loss: Any = square, shares: bool = False, rate: float = 0.05, **options: Any
):
    forms = BROAD if not shares else ("replicas", "ranks", "grouped")
    model("packages", name, Recipe(build, batch, loss, rate), shares=shares, forms=forms, **options)


# ---- sequences ----------------------------------------------------------------------------------------------------

more("performer.lm", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=2, heads=2, dim_head=8, max_seq_len=16, causal=False, nb_features=8
), tokens, next_token)  # fmt: skip
more("performer.reversible", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=2, heads=2, dim_head=8, max_seq_len=16, causal=False, nb_features=8, reversible=True
), tokens, next_token)  # fmt: skip
more("performer.redraws", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=1, heads=2, dim_head=8, max_seq_len=16, nb_features=8, feature_redraw_interval=2
), tokens, next_token, shares=True)  # fmt: skip
more("linformer.lm", lambda: linformer.LinformerLM(num_tokens=60, dim=16, seq_len=16, depth=2, heads=2, k=8), tokens,
     next_token)  # fmt: skip
more("linformer.reversible", lambda: linformer.LinformerLM(
    num_tokens=60, dim=16, seq_len=16, depth=2, heads=2, k=8, reversible=True
), tokens, next_token)  # fmt: skip
more("reformer.lm", lambda: reformer_pytorch.ReformerLM(
    num_tokens=60, dim=16, depth=2, max_seq_len=16, heads=2, bucket_size=4, n_hashes=2, causal=True
), tokens, next_token, shares=True)  # fmt: skip


def _local() -> nn.Module:
    python_random.seed(0)  # it draws where the residual streams begin
    return local_attention.LocalTransformer(
        num_tokens=60, dim=16, depth=2, max_seq_len=16, heads=2, dim_head=8, local_attn_window_size=4
    )


more("local_attention.transformer", _local, tokens, next_token)
more(
    "g_mlp.gMLP",
    lambda: g_mlp_pytorch.gMLP(num_tokens=60, dim=16, depth=2, seq_len=16, causal=True),
    tokens,
    next_token,
)
more("nystrom.Nystromformer", lambda: nystrom_attention.Nystromformer(
    dim=8, depth=2, dim_head=4, heads=2, num_landmarks=4
), series, shares=True)  # fmt: skip  # it divides by the largest value of the batch
more("mambapy.Mamba", lambda: mambapy.mamba.Mamba(mambapy.mamba.MambaConfig(d_model=8, n_layers=2)), series)
more("perceiver.Perceiver", lambda: perceiver_pytorch.Perceiver(
    num_freq_bands=2, depth=2, max_freq=4.0, num_latents=4, latent_dim=8, latent_heads=2, cross_dim_head=4,
    latent_dim_head=4, num_classes=3, weight_tie_layers=True,
), lambda i: random(i, BATCH, 8, 8, 3))  # fmt: skip
more(
    "pytorch_tcn.TCN", lambda: pytorch_tcn.TCN(8, [8, 8], kernel_size=3, dropout=0.0), lambda i: random(i, BATCH, 8, 16)
)
more("ncps.LTC", lambda: ncps.torch.LTC(8, ncps.wirings.AutoNCP(12, 3)), series)
more("ncps.CfC", lambda: ncps.torch.CfC(8, 6, mode="pure"), series)
more("ncps.CfC-mixed-memory", lambda: ncps.torch.CfC(8, 6, mixed_memory=True), series)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = rotary_embedding_torch.RotaryEmbedding(4, learned_freq=True, cache_if_possible=True)
        self.a = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.a(x).chunk(3, -1))
        q, k = (self.rotary.rotate_queries_or_keys(t) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


more("rotary_embedding.learned", _Rotary, series)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.crf = nn.Linear(8, 5), torchcrf.CRF(5, batch_first=True)

    def forward(self, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.a(x), tags, reduction="mean")


more("torchcrf.CRF", _Tagger, lambda i: (series(i), integers(i, 5, BATCH, 16)), lambda m, share: m(*share))


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 24)
        self.alpha = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        weights = entmax.entmax_bisect(q @ k.mT, self.alpha.clamp(1.1, 2.0), dim=-1)
        return entmax.sparsemax(weights, -1) @ v


more("entmax.learned-alpha", _Attends, series)

# ---- experts, streams, memories -----------------------------------------------------------------------------------


class _Streams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        make, self.expand, self.reduce = hyper_connections.get_init_and_expand_reduce_stream_functions(2)
        self.layers = nn.ModuleList(make(dim=8, branch=nn.Linear(8, 8), layer_index=k) for k in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.expand(x)
        for layer in self.layers:
            x = layer(x)
        return self.reduce(x)


more("hyper_connections.streams", _Streams, series)
more(
    "soft_moe.SoftMoE",
    lambda: soft_moe_pytorch.SoftMoE(dim=8, seq_len=16, num_experts=4, is_distributed=False),
    series,
)
more("mixture_of_experts.MoE", lambda: mixture_of_experts.MoE(
    dim=8, num_experts=4, second_policy_train="all"
), series, lambda m, x: m(x)[0].pow(2).mean())  # fmt: skip
more("st_moe.MoE", lambda: st_moe_pytorch.MoE(
    dim=8, num_experts=4, is_distributed=False
), series, lambda m, x: m(x).outputs.pow(2).mean(), shares=True)  # fmt: skip
more("product_key_memory.PKM", lambda: product_key_memory.PKM(dim=8, heads=2, num_keys=4, topk=2), series, shares=True)

# ---- functions, flows, processes ----------------------------------------------------------------------------------

more("siren.SirenNet", lambda: siren_pytorch.SirenNet(6, 16, 3, 2), vectors, rate=1e-3)
more("kan.KANLayer", lambda: kan.KANLayer(6, 3), vectors, lambda m, x: m(x)[0].pow(2).mean())
more("kan.KAN", lambda: kan.MultKAN(
    width=[6, 4, 3], grid=3, k=3, seed=1, save_act=True, auto_save=False
), vectors, rate=1e-3)  # fmt: skip
for _name, _flow in {
    "NSF": lambda: zuko.flows.NSF(6, transforms=2, hidden_features=(8, 8)),
    "MAF": lambda: zuko.flows.MAF(6, transforms=2, hidden_features=(8, 8)),
    "NICE": lambda: zuko.flows.NICE(6, transforms=2, hidden_features=(8, 8)),
    "CNF": lambda: zuko.flows.CNF(6, hidden_features=(8, 8), exact=True),
    "GF": lambda: zuko.flows.GF(6, transforms=2),
    "BPF": lambda: zuko.flows.BPF(6, degree=4, transforms=1, hidden_features=(8,)),
    "UNAF": lambda: zuko.flows.UNAF(6, transforms=1, hidden_features=(8,), signal=4),
}.items():
    more(f"zuko.{_name}", _flow, vectors, lambda m, x: -m().log_prob(x).mean(), rate=1e-3)


class _Controlled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.end = nn.Linear(8, 6), nn.Linear(6, 48), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
        func = lambda t, z: self.inner(z).tanh().unflatten(-1, (6, 8))  # noqa: E731
        z = torchcde.cdeint(path, func, self.start(path.evaluate(0.0)), path.interval, adjoint=False, method="rk4")
        return self.end(z[:, -1])


more("torchcde.cdeint", _Controlled, series, rate=1e-5)


class _Stochastic(nn.Module):
    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.drift, self.spread = nn.Linear(6, 6), nn.Linear(6, 6)

    def f(self, t: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.drift(y))

    def g(self, t: Any, y: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(self.spread(y))

    def solved(self, x: torch.Tensor, adjoint: bool) -> torch.Tensor:
        solve = torchsde.sdeint_adjoint if adjoint else torchsde.sdeint
        times = torch.linspace(0, 1, 3)
        motion = torchsde.BrownianInterval(0.0, 1.0, size=tuple(x.shape), dtype=x.dtype, entropy=7)
        return solve(self, x, times, bm=motion, dt=0.25, method="euler")[-1]


more("torchsde.sdeint", _Stochastic, vectors, lambda m, x: m.solved(x, False).pow(2).mean(), shares=True)
more("torchsde.sdeint_adjoint", _Stochastic, vectors, lambda m, x: m.solved(x, True).pow(2).mean(), shares=True)
