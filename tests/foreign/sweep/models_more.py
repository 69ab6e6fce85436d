"""Models of packages that were tried after the others: flows, processes, liquid networks, experts, graphs, adapters."""

from __future__ import annotations

import random as python_random
from typing import Any

import egnn_pytorch
import entmax
import g_mlp_pytorch
import hyper_connections
import kan
import kornia
import linformer
import local_attention
import loralib
import mambapy.mamba
import mixture_of_experts
import ncps.torch
import ncps.wirings
import nystrom_attention
import peft
import perceiver_pytorch
import performer_pytorch
import product_key_memory
import pytorch_metric_learning.losses
import pytorch_msssim
import pytorch_tcn
import reformer_pytorch
import rotary_embedding_torch
import siren_pytorch
import soft_moe_pytorch
import spikingjelly.activation_based.functional
import spikingjelly.activation_based.layer
import spikingjelly.activation_based.neuron
import st_moe_pytorch
import torch
import torchcde
import torchcrf
import torchsde
import zuko
from models import Recipe, mean_square, model, trained
from programs import BATCH, BROAD, add, integers, random
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from torch import nn
from torch.ao import quantization
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig


def _vectors(i: int) -> torch.Tensor:
    return random(i, BATCH, 6)


def _pairs(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random(i, BATCH, 6), random(i + 50, BATCH, 3)


def _series(i: int) -> torch.Tensor:
    return random(i, BATCH, 16, 8)


def _tokens(i: int) -> torch.Tensor:
    return integers(i, 50, BATCH, 16)


def _images(i: int) -> torch.Tensor:
    return random(i, BATCH, 3, 16, 16)


def _next(made: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    found = made(ids)
    return F.cross_entropy((found[0] if isinstance(found, tuple) else found).transpose(1, 2), ids.roll(1, 1))


def _square(made: nn.Module, x: Any) -> torch.Tensor:
    return mean_square(made(x))


def _add(name: str, build: Any, batch: Any, loss: Any = _square, shares: bool = False, rate: float = 0.05, **more: Any):
    forms = BROAD if not shares else ("replicas", "ranks", "grouped")
    model("packages", name, Recipe(build, batch, loss, rate), shares=shares, forms=forms, **more)


# ---- sequences ----------------------------------------------------------------------------------------------------

_add("performer.lm", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=2, heads=2, dim_head=8, max_seq_len=16, causal=False, nb_features=8
), _tokens, _next)  # fmt: skip
_add("performer.reversible", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=2, heads=2, dim_head=8, max_seq_len=16, causal=False, nb_features=8, reversible=True
), _tokens, _next)  # fmt: skip
_add("performer.redraws", lambda: performer_pytorch.PerformerLM(
    num_tokens=60, dim=16, depth=1, heads=2, dim_head=8, max_seq_len=16, nb_features=8, feature_redraw_interval=2
), _tokens, _next, shares=True)  # fmt: skip
_add("linformer.lm", lambda: linformer.LinformerLM(num_tokens=60, dim=16, seq_len=16, depth=2, heads=2, k=8), _tokens,
     _next)  # fmt: skip
_add("linformer.reversible", lambda: linformer.LinformerLM(
    num_tokens=60, dim=16, seq_len=16, depth=2, heads=2, k=8, reversible=True
), _tokens, _next)  # fmt: skip
_add("reformer.lm", lambda: reformer_pytorch.ReformerLM(
    num_tokens=60, dim=16, depth=2, max_seq_len=16, heads=2, bucket_size=4, n_hashes=2, causal=True
), _tokens, _next, shares=True)  # fmt: skip


def _local() -> nn.Module:
    python_random.seed(0)  # it draws where the residual streams begin
    return local_attention.LocalTransformer(
        num_tokens=60, dim=16, depth=2, max_seq_len=16, heads=2, dim_head=8, local_attn_window_size=4
    )


_add("local_attention.transformer", _local, _tokens, _next)
_add("g_mlp.gMLP", lambda: g_mlp_pytorch.gMLP(num_tokens=60, dim=16, depth=2, seq_len=16, causal=True), _tokens, _next)
_add("nystrom.Nystromformer", lambda: nystrom_attention.Nystromformer(
    dim=8, depth=2, dim_head=4, heads=2, num_landmarks=4
), _series, shares=True)  # fmt: skip  # it divides by the largest value of the batch
_add("mambapy.Mamba", lambda: mambapy.mamba.Mamba(mambapy.mamba.MambaConfig(d_model=8, n_layers=2)), _series)
_add("perceiver.Perceiver", lambda: perceiver_pytorch.Perceiver(
    num_freq_bands=2, depth=2, max_freq=4.0, num_latents=4, latent_dim=8, latent_heads=2, cross_dim_head=4,
    latent_dim_head=4, num_classes=3, weight_tie_layers=True,
), lambda i: random(i, BATCH, 8, 8, 3))  # fmt: skip
_add(
    "pytorch_tcn.TCN", lambda: pytorch_tcn.TCN(8, [8, 8], kernel_size=3, dropout=0.0), lambda i: random(i, BATCH, 8, 16)
)
_add("ncps.LTC", lambda: ncps.torch.LTC(8, ncps.wirings.AutoNCP(12, 3)), _series)
_add("ncps.CfC", lambda: ncps.torch.CfC(8, 6, mode="pure"), _series)
_add("ncps.CfC-mixed-memory", lambda: ncps.torch.CfC(8, 6, mixed_memory=True), _series)


class _Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = rotary_embedding_torch.RotaryEmbedding(4, learned_freq=True, cache_if_possible=True)
        self.a = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.a(x).chunk(3, -1))
        q, k = (self.rotary.rotate_queries_or_keys(t) for t in (q, k))
        return F.scaled_dot_product_attention(q, k, v)


_add("rotary_embedding.learned", _Rotary, _series)


class _Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.crf = nn.Linear(8, 5), torchcrf.CRF(5, batch_first=True)

    def forward(self, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        return -self.crf(self.a(x), tags, reduction="mean")


_add("torchcrf.CRF", _Tagger, lambda i: (_series(i), integers(i, 5, BATCH, 16)), lambda m, share: m(*share))


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 24)
        self.alpha = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        weights = entmax.entmax_bisect(q @ k.mT, self.alpha.clamp(1.1, 2.0), dim=-1)
        return entmax.sparsemax(weights, -1) @ v


_add("entmax.learned-alpha", _Attends, _series)

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


_add("hyper_connections.streams", _Streams, _series)
_add(
    "soft_moe.SoftMoE",
    lambda: soft_moe_pytorch.SoftMoE(dim=8, seq_len=16, num_experts=4, is_distributed=False),
    _series,
)
_add("mixture_of_experts.MoE", lambda: mixture_of_experts.MoE(
    dim=8, num_experts=4, second_policy_train="all"
), _series, lambda m, x: m(x)[0].pow(2).mean())  # fmt: skip
_add("st_moe.MoE", lambda: st_moe_pytorch.MoE(
    dim=8, num_experts=4, is_distributed=False
), _series, lambda m, x: m(x).outputs.pow(2).mean(), shares=True)  # fmt: skip
_add("product_key_memory.PKM", lambda: product_key_memory.PKM(dim=8, heads=2, num_keys=4, topk=2), _series, shares=True)

# ---- functions, flows, processes ----------------------------------------------------------------------------------

_add("siren.SirenNet", lambda: siren_pytorch.SirenNet(6, 16, 3, 2), _vectors, rate=1e-3)
_add("kan.KANLayer", lambda: kan.KANLayer(6, 3), _vectors, lambda m, x: m(x)[0].pow(2).mean())
_add("kan.KAN", lambda: kan.MultKAN(
    width=[6, 4, 3], grid=3, k=3, seed=1, save_act=True, auto_save=False
), _vectors, rate=1e-3)  # fmt: skip
for _name, _flow in {
    "NSF": lambda: zuko.flows.NSF(6, transforms=2, hidden_features=(8, 8)),
    "MAF": lambda: zuko.flows.MAF(6, transforms=2, hidden_features=(8, 8)),
    "NICE": lambda: zuko.flows.NICE(6, transforms=2, hidden_features=(8, 8)),
    "CNF": lambda: zuko.flows.CNF(6, hidden_features=(8, 8), exact=True),
    "GF": lambda: zuko.flows.GF(6, transforms=2),
    "BPF": lambda: zuko.flows.BPF(6, degree=4, transforms=1, hidden_features=(8,)),
    "UNAF": lambda: zuko.flows.UNAF(6, transforms=1, hidden_features=(8,), signal=4),
}.items():
    _add(f"zuko.{_name}", _flow, _vectors, lambda m, x: -m().log_prob(x).mean(), rate=1e-3)


class _Controlled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start, self.inner, self.end = nn.Linear(8, 6), nn.Linear(6, 48), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        path = torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x))
        func = lambda t, z: self.inner(z).tanh().unflatten(-1, (6, 8))  # noqa: E731
        z = torchcde.cdeint(path, func, self.start(path.evaluate(0.0)), path.interval, adjoint=False, method="rk4")
        return self.end(z[:, -1])


_add("torchcde.cdeint", _Controlled, _series, rate=1e-5)


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


_add("torchsde.sdeint", _Stochastic, _vectors, lambda m, x: m.solved(x, False).pow(2).mean(), shares=True)
_add("torchsde.sdeint_adjoint", _Stochastic, _vectors, lambda m, x: m.solved(x, True).pow(2).mean(), shares=True)


# ---- graphs, spikes, pictures, losses -----------------------------------------------------------------------------


class _Molecules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(egnn_pytorch.EGNN(dim=8, m_dim=4, norm_coors=True) for _ in range(2))

    def forward(self, share: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        feats, coors = share
        for layer in self.layers:
            feats, coors = layer(feats, coors)
        return feats, coors


_add("egnn.EGNN", _Molecules, lambda i: (random(i, BATCH, 5, 8), random(i + 50, BATCH, 5, 3)), rate=1e-3)
spiking = spikingjelly.activation_based


class _Spikes(nn.Module):
    def __init__(self, neuron: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), neuron(), nn.Linear(16, 3), neuron())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spiking.functional.reset_net(self)
        return sum(self.net(3 * x) for _ in range(4))


def _spiked(made: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (made(x) - 1).pow(2).mean()


_add("spikingjelly.LIF", lambda: _Spikes(lambda: spiking.neuron.LIFNode(tau=2.0)), _vectors, _spiked)
_add("spikingjelly.ParametricLIF", lambda: _Spikes(lambda: spiking.neuron.ParametricLIFNode()), _vectors, _spiked)


class _Kornia(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)
        self.colour = kornia.enhance.ZCAWhitening()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = kornia.filters.gaussian_blur2d(self.net(x), (3, 3), (1.0, 1.0))
        found = kornia.geometry.transform.rotate(found, torch.full((len(x),), 10.0, dtype=x.dtype))
        return kornia.losses.total_variation(found).mean() / 100 + found.pow(2).mean()


_add("kornia.filters-and-losses", _Kornia, _images, lambda m, x: m(x))


class _Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)
        self.ssim = pytorch_msssim.SSIM(data_range=1.0, win_size=5, channel=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ssim.win = self.ssim.win.to(x.dtype)
        return 1 - self.ssim(torch.sigmoid(self.net(x)), torch.sigmoid(x))


_add("pytorch_msssim.SSIM", _Similar, _images, lambda m, x: m(x))


class _Metric(nn.Module):
    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.net, self.loss = nn.Linear(6, 4), loss

    def forward(self, share: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.loss(self.net(share[0]), share[1])


losses = pytorch_metric_learning.losses
for _name, _kind, _shares in (
    ("ArcFace", lambda: losses.ArcFaceLoss(3, 4), False), ("ProxyAnchor", lambda: losses.ProxyAnchorLoss(3, 4), True),
    ("SoftTriple", lambda: losses.SoftTripleLoss(3, 4), False), ):  # fmt: skip
    _add(f"metric_learning.{_name}", lambda kind=_kind: _Metric(kind()),
         lambda i: (random(i, BATCH, 6), torch.arange(BATCH) % 3), lambda m, x: m(x), shares=_shares)  # fmt: skip

# ---- adapters, quantization ---------------------------------------------------------------------------------------


def _adapted(config: Any, llama: bool = False) -> nn.Module:
    if llama:
        plain: Any = LlamaConfig(vocab_size=60, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                                 num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    else:
        plain = GPT2Config(
            vocab_size=60, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
        )
    return peft.get_peft_model(AutoModelForCausalLM.from_config(plain), config)


CAUSAL = "CAUSAL_LM"
LINEAR = ["q_proj", "v_proj"]
ADAPTERS: dict[str, Any] = {
    "prefix": (lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, task_type=CAUSAL), False),
    "p-tuning": (lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=2, encoder_hidden_size=8, task_type=CAUSAL), False),
    "rsLoRA": (lambda: peft.LoraConfig(r=4, target_modules=LINEAR, use_rslora=True, task_type=CAUSAL), True),
    "PiSSA": (lambda: peft.LoraConfig(
        r=4, target_modules=LINEAR, init_lora_weights="pissa", task_type=CAUSAL), True),
    "OFT": (lambda: peft.OFTConfig(oft_block_size=4, target_modules=LINEAR, task_type=CAUSAL), True),
    "BOFT": (lambda: peft.BOFTConfig(boft_block_size=4, target_modules=LINEAR, task_type=CAUSAL), True),
    "LoHa": (lambda: peft.LoHaConfig(r=2, target_modules=LINEAR, task_type=CAUSAL), True),
    "LoKr": (lambda: peft.LoKrConfig(r=2, target_modules=LINEAR, task_type=CAUSAL), True),
    "AdaLoRA": (lambda: peft.AdaLoraConfig(total_step=6, target_modules=LINEAR, task_type=CAUSAL), True),
    "VeRA": (lambda: peft.VeraConfig(r=4, target_modules=LINEAR, task_type=CAUSAL), True),
    "FourierFT": (lambda: peft.FourierFTConfig(n_frequency=10, target_modules=LINEAR, task_type=CAUSAL), True),
    "LN": (lambda: peft.LNTuningConfig(target_modules=["input_layernorm"], task_type=CAUSAL), True),
    "LoRA-modules-to-save": (lambda: peft.LoraConfig(
        r=4, target_modules=LINEAR, modules_to_save=["lm_head"], task_type=CAUSAL), True),
}  # fmt: skip
for _name, (_config, _llama) in ADAPTERS.items():
    _add(f"peft.{_name}", lambda config=_config, llama=_llama: _adapted(config(), llama), _tokens,
         lambda m, ids: m(input_ids=ids, labels=ids).loss)  # fmt: skip


def _lora() -> nn.Module:
    made = nn.Sequential(loralib.Linear(6, 16, r=2), nn.Tanh(), loralib.Linear(16, 3, r=2))
    for k in (0, 2):
        made[k].lora_B.data = random(k, *made[k].lora_B.shape) * 0.1
    loralib.mark_only_lora_as_trainable(made)
    return made


_add("loralib.Linear", _lora, _vectors)


class _Sentences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(
            vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        ))  # fmt: skip
        self.pool, self.dense = Pooling(16), Dense(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        mask = torch.ones_like(ids)
        found = self.bert(ids, mask).last_hidden_state
        pooled = self.pool({"token_embeddings": found, "attention_mask": mask})
        return self.dense(pooled)["sentence_embedding"]


_add("sentence_transformers.pooling", _Sentences, _tokens)


def _remembers() -> nn.Module:
    return _Metric(losses.CrossBatchMemory(losses.ContrastiveLoss(), 4, memory_size=16))


_recipe = Recipe(_remembers, lambda i: (random(i, BATCH, 6), torch.arange(BATCH) % 3), lambda m, x: m(x))
add("packages", "metric_learning.CrossBatchMemory", trained(_recipe, False), reference="ranks")


def _quantized() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).train()
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(made)


_recipe = Recipe(_quantized, _vectors, _square)
add("packages", "torch.ao.quantization-aware", trained(_recipe, False), reference="ranks", dtype="fp32")
