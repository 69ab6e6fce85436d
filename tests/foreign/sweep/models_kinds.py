"""Models of packages: graphs, spikes, pictures, losses, adapters, quantization."""

from __future__ import annotations

from typing import Any

import egnn_pytorch
import kornia
import loralib
import peft
import pytorch_metric_learning.losses
import pytorch_msssim
import spikingjelly.activation_based.functional
import spikingjelly.activation_based.layer
import spikingjelly.activation_based.neuron
import torch
from models import Recipe, trained
from models_more import images, more, square, tokens, vectors
from programs import BATCH, add, random
from sentence_transformers.base.modules.dense import Dense
from sentence_transformers.sentence_transformer.modules.pooling import Pooling
from torch import nn
from torch.ao import quantization
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig


class _Molecules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(egnn_pytorch.EGNN(dim=8, m_dim=4, norm_coors=True) for _ in range(2))

    def forward(self, share: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        feats, coors = share
        for layer in self.layers:
            feats, coors = layer(feats, coors)
        return feats, coors


more("egnn.EGNN", _Molecules, lambda i: (random(i, BATCH, 5, 8), random(i + 50, BATCH, 5, 3)), rate=1e-3)
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


more("spikingjelly.LIF", lambda: _Spikes(lambda: spiking.neuron.LIFNode(tau=2.0)), vectors, _spiked)
more("spikingjelly.ParametricLIF", lambda: _Spikes(lambda: spiking.neuron.ParametricLIFNode()), vectors, _spiked)


class _Kornia(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)
        self.colour = kornia.enhance.ZCAWhitening()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = kornia.filters.gaussian_blur2d(self.net(x), (3, 3), (1.0, 1.0))
        found = kornia.geometry.transform.rotate(found, torch.full((len(x),), 10.0, dtype=x.dtype))
        return kornia.losses.total_variation(found).mean() / 100 + found.pow(2).mean()


more("kornia.filters-and-losses", _Kornia, images, lambda m, x: m(x))


class _Similar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Conv2d(3, 3, 3, padding=1)
        self.ssim = pytorch_msssim.SSIM(data_range=1.0, win_size=5, channel=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ssim.win = self.ssim.win.to(x.dtype)
        return 1 - self.ssim(torch.sigmoid(self.net(x)), torch.sigmoid(x))


more("pytorch_msssim.SSIM", _Similar, images, lambda m, x: m(x))


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
    more(f"metric_learning.{_name}", lambda kind=_kind: _Metric(kind()),
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
    more(f"peft.{_name}", lambda config=_config, llama=_llama: _adapted(config(), llama), tokens,
         lambda m, ids: m(input_ids=ids, labels=ids).loss)  # fmt: skip


def _lora() -> nn.Module:
    made = nn.Sequential(loralib.Linear(6, 16, r=2), nn.Tanh(), loralib.Linear(16, 3, r=2))
    for k in (0, 2):
        made[k].lora_B.data = random(k, *made[k].lora_B.shape) * 0.1
    loralib.mark_only_lora_as_trainable(made)
    return made


more("loralib.Linear", _lora, vectors)


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


more("sentence_transformers.pooling", _Sentences, tokens)


def _remembers() -> nn.Module:
    return _Metric(losses.CrossBatchMemory(losses.ContrastiveLoss(), 4, memory_size=16))


_recipe = Recipe(_remembers, lambda i: (random(i, BATCH, 6), torch.arange(BATCH) % 3), lambda m, x: m(x))
add("packages", "metric_learning.CrossBatchMemory", trained(_recipe, False), reference="ranks")


def _quantized() -> nn.Module:
    made = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).train()
    made.qconfig = quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(made)


_recipe = Recipe(_quantized, vectors, square)
add("packages", "torch.ao.quantization-aware", trained(_recipe, False), reference="ranks", dtype="fp32")
