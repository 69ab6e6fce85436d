"""Graphs, Gaussian processes, flows, tables, spikes, symmetric, differential equations, quantized, adapted models."""

from __future__ import annotations

import random as python_random
from typing import Any

import e3nn.nn.models.gate_points_2101
import e3nn.o3
import gpytorch
import nflows.distributions
import nflows.flows
import nflows.transforms
import normflows
import peft
import rtdl_revisiting_models as rtdl
import snntorch
import tab_transformer_pytorch
import torch
import torch_geometric.nn as graphs
import torchdiffeq
import vector_quantize_pytorch
import x_transformers
from models import Recipe, mean_square, model
from programs import BATCH, BROAD, integers, random
from pytorch_tabnet.tab_network import TabNet
from torch import nn
from torch.nn import functional as F
from torch_geometric.data import Batch, Data
from transformers import AutoModelForCausalLM, GPT2Config

FIRST_CALL = "its first call sets parameters from the replica's random numbers or share; a warning says so on replicas"

# ---- graphs: a batch is a list of graphs of the same size ----------------------------------------------------------


def _graphs(i: int) -> list[Data]:
    made = []
    for k in range(BATCH):
        edges = torch.stack([torch.arange(5), (torch.arange(5) + 1 + (i + k) % 3) % 5])
        made.append(Data(x=random(100 * i + k, 5, 6), edge_index=torch.cat([edges, edges.flip(0)], 1)))
    return made


class _OfGraphs(nn.Module):
    def __init__(self, layers: list[nn.Module], width: int = 8) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(width, 3)

    def forward(self, batch: Any) -> torch.Tensor:
        x = batch.x
        for layer in self.layers:
            x = layer(x, batch.edge_index).tanh()
        return self.head(graphs.global_mean_pool(x, batch.batch))


GRAPHS: dict[str, Any] = {
    "GCN": lambda: [graphs.GCNConv(6, 8), graphs.GCNConv(8, 8)],
    "GAT": lambda: [graphs.GATConv(6, 4, heads=2), graphs.GATv2Conv(8, 8, heads=2, concat=False)],
    "GIN": lambda: [graphs.GINConv(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)), train_eps=True)],
    "GraphSAGE": lambda: [graphs.SAGEConv(6, 8), graphs.SAGEConv(8, 8, aggr="max")],
    "Transformer": lambda: [graphs.TransformerConv(6, 4, heads=2, beta=True)],
    "Chebyshev": lambda: [graphs.ChebConv(6, 8, K=2)],
    "GatedGraph": lambda: [graphs.GatedGraphConv(8, 2)],
    "ARMA": lambda: [graphs.ARMAConv(6, 8, num_stacks=2, num_layers=2)],
}
for _name, _layers in GRAPHS.items():
    _recipe = Recipe(
        lambda layers=_layers: _OfGraphs(layers()),
        _graphs,
        lambda m, share: mean_square(m(Batch.from_data_list(share))),
    )
    model("packages", f"torch_geometric.{_name}", _recipe, forms=BROAD if _name == "GCN" else ("replicas", "ranks"))

# ---- Gaussian processes -------------------------------------------------------------------------------------------


class _Process(gpytorch.models.ApproximateGP):
    def __init__(self, features: int = 6) -> None:
        points = random(3, 5, features)
        spread = gpytorch.variational.CholeskyVariationalDistribution(5)
        super().__init__(gpytorch.variational.VariationalStrategy(self, points, spread))
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x: torch.Tensor) -> Any:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class _Likely(nn.Module):
    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Linear(6, 4), nn.Tanh()) if deep else nn.Identity()
        self.process = _Process(4 if deep else 6)
        self.likelihood = gpytorch.likelihoods.GaussianLikelihood()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        bound = gpytorch.mlls.VariationalELBO(self.likelihood, self.process, num_data=64)
        return -bound(self.process(self.features(x)), y)


def _pairs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(i, BATCH, 6), random(i + 50, BATCH)


for _deep in (False, True):
    _name = "gpytorch.deep-kernel" if _deep else "gpytorch.variational"
    model(
        "packages", _name, Recipe(lambda deep=_deep: _Likely(deep), _pairs, lambda m, share: m(*share)), forms=BROAD,
        differs=dict.fromkeys(("replicas", "grouped"), FIRST_CALL), refused={"central": "was written to by replica 0"},
    )  # fmt: skip

# ---- flows --------------------------------------------------------------------------------------------------------


def _real_nvp() -> nn.Module:
    mask = torch.tensor([1.0, 0.0] * 3)
    flows = []
    for k in range(3):
        nets = [normflows.nets.MLP([6, 12, 6], init_zeros=False) for _ in range(2)]
        flows += [normflows.flows.MaskedAffineFlow(mask if k % 2 else 1 - mask, *nets), normflows.flows.ActNorm(6)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(6), flows)


def _splines() -> nn.Module:
    flows = [normflows.flows.CoupledRationalQuadraticSpline(6, 2, 8), normflows.flows.LULinearPermute(6)]
    return normflows.NormalizingFlow(normflows.distributions.DiagGaussian(6, trainable=False), flows)


def _autoregressive() -> nn.Module:
    t = nflows.transforms
    made = [
        t.MaskedAffineAutoregressiveTransform(6, 12),
        t.RandomPermutation(6),
        t.MaskedAffineAutoregressiveTransform(6, 12),
    ]
    return nflows.flows.Flow(t.CompositeTransform(made), nflows.distributions.StandardNormal([6]))


def _vectors(i: int) -> torch.Tensor:
    return random(i, BATCH, 6)


model(
    "packages", "normflows.RealNVP-ActNorm", Recipe(_real_nvp, _vectors, lambda m, x: m.forward_kld(x), rate=1e-4),
    shares=True, differs={"*": FIRST_CALL},
)  # fmt: skip
model("packages", "normflows.splines", Recipe(_splines, _vectors, lambda m, x: m.forward_kld(x)))
model("packages", "nflows.MAF", Recipe(_autoregressive, _vectors, lambda m, x: -m.log_prob(x).mean()))

# ---- tables -------------------------------------------------------------------------------------------------------


def _table(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(i, BATCH, 5), integers(i, 4, BATCH, 2)


def _tabnet(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found, sparsity = made(x)
    return found.pow(2).mean() + 1e-3 * sparsity


def _tabnet_made() -> nn.Module:
    return TabNet(6, 3, n_d=4, n_a=4, n_steps=2, virtual_batch_size=4, group_attention_matrix=torch.eye(6))


def _transformed() -> nn.Module:
    return rtdl.FTTransformer(
        n_cont_features=5, cat_cardinalities=[4, 4], d_out=2, n_blocks=2, d_block=16, attention_n_heads=2,
        attention_dropout=0.1, ffn_d_hidden=None, ffn_d_hidden_multiplier=1.5, ffn_dropout=0.1, residual_dropout=0.0,
    )  # fmt: skip


def _tab_transformer() -> nn.Module:
    python_random.seed(0)  # it draws where the residual streams begin
    return tab_transformer_pytorch.FTTransformer(
        categories=(4, 4), num_continuous=5, dim=16, dim_out=2, depth=2, heads=2, attn_dropout=0.1, ff_dropout=0.1
    )


model("packages", "pytorch_tabnet.TabNet", Recipe(_tabnet_made, _vectors, _tabnet), shares=True)
model("packages", "rtdl.MLP", Recipe(
    lambda: rtdl.MLP(d_in=6, d_out=3, n_blocks=2, d_block=16, dropout=0.1), _vectors, lambda m, x: mean_square(m(x))
), shares=True)  # fmt: skip
model("packages", "rtdl.ResNet", Recipe(
    lambda: rtdl.ResNet(d_in=6, d_out=3, n_blocks=2, d_block=8, d_hidden=16, d_hidden_multiplier=None, dropout1=0.1,
                        dropout2=0.0), _vectors, lambda m, x: mean_square(m(x))
), shares=True)  # fmt: skip
model("packages", "rtdl.FTTransformer", Recipe(_transformed, _table, lambda m, s: mean_square(m(*s))), shares=True)
model("packages", "tab_transformer.FTTransformer", Recipe(
    _tab_transformer, _table, lambda m, s: mean_square(m(s[1], s[0]))
), shares=True)  # fmt: skip

# ---- what keeps state between calls -------------------------------------------------------------------------------


class _Spiking(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 3)
        self.first, self.second = kind(16), kind(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for cell in (self.first, self.second):
            (cell.reset_mem if hasattr(cell, "reset_mem") else cell.reset_hidden)()
        spikes = (self.first(self.a(x)).to(x.dtype) for _ in range(4))  # which are 32 bits wide whatever comes in
        found = sum((self.second(self.b(s))[1] for s in spikes), torch.zeros(()))
        for cell in (self.first, self.second):  # what is kept of a share has its length
            for name, kept in list(cell.named_buffers(recurse=False)):
                if kept.dim() > 1:
                    setattr(cell, name, kept.new_zeros(()))
        return found


SPIKES: dict[str, Any] = {
    "Leaky": lambda width: snntorch.Leaky(beta=0.9, init_hidden=True, output=width == 3, learn_beta=True),
    "Synaptic": lambda width: snntorch.Synaptic(alpha=0.8, beta=0.9, init_hidden=True, output=width == 3),
}
for _name, _kind in SPIKES.items():
    _recipe = Recipe(lambda kind=_kind: _Spiking(kind), _vectors, lambda m, x: mean_square(m(x)))
    model("packages", f"snntorch.{_name}", _recipe, forms=BROAD)


class _Quantized(nn.Module):
    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.a, self.quantizer, self.b = nn.Linear(6, 8), quantizer, nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.quantizer(torch.tanh(self.a(x))[:, None])
        return mean_square(self.b(found[0])) + (found[2].mean() if len(found) > 2 else 0.0)


model("packages", "vector_quantize.FSQ", Recipe(
    lambda: _Quantized(vector_quantize_pytorch.FSQ(levels=[5, 5, 5], dim=8)), _vectors, lambda m, x: m(x)
))  # fmt: skip
model("packages", "vector_quantize.VectorQuantize", Recipe(
    lambda: _Quantized(vector_quantize_pytorch.VectorQuantize(8, 4, decay=0.8, sync_codebook=False)), _vectors,
    lambda m, x: m(x),
), shares=True)  # fmt: skip

# ---- others -------------------------------------------------------------------------------------------------------


class _Equation(nn.Module):
    def __init__(self, adjoint: bool) -> None:
        super().__init__()
        self.net, self.adjoint = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)), adjoint

    def forward(self, t: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def solved(self, x: torch.Tensor) -> torch.Tensor:
        solve = torchdiffeq.odeint_adjoint if self.adjoint else torchdiffeq.odeint
        return solve(self, x, torch.linspace(0, 1, 3), method="rk4")[-1]


for _adjoint in (False, True):
    _recipe = Recipe(lambda adjoint=_adjoint: _Equation(adjoint), _vectors, lambda m, x: mean_square(m.solved(x)))
    model("packages", f"torchdiffeq.odeint{'_adjoint' if _adjoint else ''}", _recipe)


class _Symmetric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inside = e3nn.o3.Irreps("2x0e + 2x1o")
        self.a = e3nn.o3.FullyConnectedTensorProduct("1x1o", "1x1o", inside)
        self.b = e3nn.o3.Linear(inside, "3x0e")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x[:, :3], x[:, 3:]))


model("packages", "e3nn.TensorProduct", Recipe(_Symmetric, _vectors, lambda m, x: mean_square(m(x))))


def _tokens(i: int) -> torch.Tensor:
    return integers(i, 50, BATCH, 9)


def _language(**options: Any) -> nn.Module:
    layers = x_transformers.Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **options)
    return x_transformers.TransformerWrapper(num_tokens=60, max_seq_len=16, attn_layers=layers)


X_TRANSFORMERS: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 1},
    "glu-rmsnorm": {"ff_glu": True, "use_rmsnorm": True}, "one-kv-head": {"attn_one_kv_head": True},
    "sandwich": {"sandwich_norm": True}, "relative-bias": {"rel_pos_bias": True}, "dropout": {"attn_dropout": 0.1},
}  # fmt: skip


def _next(made: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = made(ids[:, :-1])
    return F.cross_entropy((found.logits if hasattr(found, "logits") else found).transpose(1, 2), ids[:, 1:])


for _name, _options in X_TRANSFORMERS.items():
    _recipe = Recipe(lambda options=_options: _language(**options), _tokens, _next)
    model("packages", f"x_transformers.{_name}", _recipe, shares="dropout" in _name)


def _adapted(config: Any) -> nn.Module:
    plain = GPT2Config(vocab_size=60, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return peft.get_peft_model(AutoModelForCausalLM.from_config(plain), config)


ADAPTERS: dict[str, Any] = {
    "LoRA": lambda: peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", init_lora_weights=False),
    "DoRA": lambda: peft.LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", use_dora=True),
    "IA3": lambda: peft.IA3Config(target_modules=["c_attn"], feedforward_modules=[], task_type="CAUSAL_LM"),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=0 + 2, task_type="CAUSAL_LM"),
}


def _next_of_prompt(made: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return made(input_ids=ids, labels=ids).loss


for _name, _config in ADAPTERS.items():
    _recipe = Recipe(lambda config=_config: _adapted(config()), _tokens, _next_of_prompt)
    model("packages", f"peft.{_name}", _recipe)
