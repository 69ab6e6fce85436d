"""Models of transformers with tiny random configurations."""

from __future__ import annotations

import random as python_random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import torch
from models import FORMS, MORE, Recipe, mean_square, model
from programs import BATCH, integers, random
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PretrainedConfig

_COUNTS = {
    32: "hidden_size d_model n_embd dim emb_dim embed_dim word_embed_proj_dim attention_hidden_size "
    "max_source_positions max_target_positions",
    2: "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_key_value_heads num_experts_per_tok",
    48: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim hidden_dim n_inner",
    64: "max_position_embeddings n_positions n_ctx",
    4: "num_local_experts num_experts n_routed_experts state_size",
    16: "head_dim d_kv moe_intermediate_size shared_expert_intermediate_size embedding_size",
}
SIZES: dict[str, Any] = {
    **{name: count for count, names in _COUNTS.items() for name in names.split()},
    "vocab_size": 60, "type_vocab_size": 2, "image_size": 16, "patch_size": 8, "num_channels": 3, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "initializer_range": 0.1, "rescale_every": 0,
    "use_cache": False,
}  # fmt: skip
MASKS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop", "mask_time_prob", "mask_feature_prob", "drop_path_rate")
"""Left out whatever the reference: transformers draws these from numpy, or by layer."""
SPEECH = {
    "conv_dim": (16, 16), "conv_kernel": (4, 3), "conv_stride": (2, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
WINDOWS = {"embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2], "window_size": 2, "image_size": 16, "patch_size": 2}
STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "patch_size": 4}
OWN: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 32},
    "convnext": STAGES,
    "convnextv2": STAGES,
    "data2vec-audio": SPEECH,
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "falcon": {"alibi": False},
    "longformer": {"attention_window": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1, "chunk_size": 4},
    "modernbert": {"reference_compile": False},
    "regnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "squeezebert": {"embedding_size": 32},
    "swin": WINDOWS,
    "swinv2": WINDOWS,
    "videomae": {"num_frames": 4},
    "whisper": {"num_mel_bins": 8, "max_source_positions": 16},
}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8,
}  # fmt: skip
OWN |= {"deepseek_v2": LATENT, "deepseek_v3": LATENT}
ONLY: dict[str, dict[str, Any]] = {
    "gptj": {"rotary_dim": 8, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 60},
    "codegen": {"rotary_dim": 4, "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60},
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 48, "vocab_size": 60, "dropout": 0.0},
    "gpt_neo": {
        "attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2, "hidden_size": 32,
        "num_heads": 2, "vocab_size": 60,
    },
    "funnel": {"block_sizes": [1, 1], "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 48, "vocab_size": 60,
               "architectures": ["FunnelModel"]},
    "hiera": {"embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1]},
    "prophetnet": {
        "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_encoder_layers": 2,
        "num_decoder_layers": 2, "num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2,
        "vocab_size": 60, "max_position_embeddings": 64,
    },
}  # fmt: skip
"""Configurations that nothing else is added to."""
TEXT = """
    bert roberta gpt2 llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text phi phi3 phimoe opt
    bloom gpt_neox gpt_neo gptj codegen gpt_bigcode falcon distilbert albert electra deberta deberta-v2 longformer
    convbert cohere2 esm funnel glm4 granite granitemoe mamba mamba2 falcon_mamba mpnet mobilebert modernbert
    nystromformer olmo2 olmoe openai-gpt rembert roformer rwkv smollm3 squeezebert stablelm starcoder2 recurrent_gemma
    xlm-roberta xlnet diffllama deepseek_v3 gpt_oss doge lfm2 exaone4
"""
PAIRS = (
    "t5 mt5 umt5 switch_transformers bart mbart pegasus marian m2m_100 nllb-moe blenderbot-small led prophetnet fsmt"
)
IMAGES = (
    "vit deit beit dinov2 ijepa swin swinv2 convnext convnextv2 resnet regnet yolos vit_msn siglip_vision_model hiera"
)
SOUNDS = "wav2vec2 hubert wavlm sew unispeech-sat data2vec-audio"
SPECIAL = "whisper speech_to_text clip siglip audio-spectrogram-transformer videomae timesformer"
BROAD = [
    "bert",
    "gpt2",
    "llama",
    "mixtral",
    "t5",
    "vit",
    "wav2vec2",
    "mamba",
    "switch_transformers",
    "whisper",
    "resnet",
]
"""In every form."""
REFUSED = {"wav2vec2": {"servers": "torch.nn.Parameter was called with 'conv.weight', which lives on"}}
DROPS = ["bert", "gpt2", "t5", "vit", "bart", "wav2vec2", "opt", "electra", "resnet", "regnet"]
"""A second time with dropout and batch statistics, against shares."""
PICTURE = {"convnext": 32, "convnextv2": 32, "resnet": 64, "regnet": 64}


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Of these values the ones that a configuration has; one for each stage where it has a list."""
    usual = kind()
    names = {*kind.__init__.__code__.co_varnames, *(getattr(kind, "attribute_map", None) or {})}
    found = {}
    for key, value in values.items():
        if key in names or hasattr(usual, key):
            old = getattr(usual, key, None)
            found[key] = type(old)([value] * len(old)) if isinstance(old, list | tuple) else value
    return found


def _is_drop(key: str) -> bool:
    return "drop" in key or key in MASKS


def configuration(name: str, kind: str, dropout: bool) -> PretrainedConfig:
    """A tiny one."""
    made = CONFIG_MAPPING[name]
    if kind == "text and image":
        return _two(made)
    if name in ONLY:
        values = dict(ONLY[name])
    else:
        values = _known(made, SIZES)
        if kind == "sound":
            values.update(SPEECH)
        if name == "falcon":
            values.pop("head_dim")
        values.update(OWN.get(name, {}))
    config = made(**values)
    for key, value in list(vars(config).items()):
        if _is_drop(key) and isinstance(value, float) and (not dropout or key in MASKS):
            setattr(config, key, 0.0)
    return config


def _two(made: Any) -> PretrainedConfig:
    text = "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size max_position_embeddings"
    image = "hidden_size intermediate_size num_hidden_layers num_attention_heads image_size patch_size"
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text_config = {**{key: SIZES[key] for key in text.split()}, **tokens}
    return made(text_config=text_config, vision_config={k: SIZES[k] for k in image.split()}, projection_dim=16)


def _built(name: str, kind: str, dropout: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        python_random.seed(0)
        numpy.random.seed(0)
        made = AutoModel.from_config(configuration(name, kind, dropout))
        for module in made.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"
            if not dropout and isinstance(module, nn.Dropout):
                module.p = 0.0
            if not dropout and isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.momentum, module.track_running_stats = 0.1, True
                module.train = lambda mode=True, module=module: module
                module.training = False
        count = sum(p.numel() for p in made.parameters())
        if count > 30_000_000:
            raise AssertionError(f"{count} parameters are not tiny")
        return made

    return build


def _batch(name: str, kind: str) -> Callable[[int], dict[str, torch.Tensor]]:
    size = PICTURE.get(name, 224 if name == "hiera" else 16)

    def tokens(i: int, length: int = 8) -> torch.Tensor:
        return integers(i, 50, BATCH, length) + 3

    def batch(i: int) -> dict[str, torch.Tensor]:
        if kind == "text":
            return {"input_ids": tokens(i)}
        if kind == "pair":
            return {"input_ids": tokens(i), "decoder_input_ids": tokens(i + 30, 6)}
        if kind == "image":
            return {"pixel_values": random(i, BATCH, 3, size, size)}
        if kind == "sound":
            return {"input_values": random(i, BATCH, 200)}
        if kind == "spectrum and text":
            shape = (8, 32) if name == "whisper" else (32, 80)
            return {"input_features": random(i, BATCH, *shape), "decoder_input_ids": tokens(i + 30, 6)}
        if kind == "text and image":
            return {"input_ids": tokens(i), "pixel_values": random(i, BATCH, 3, 16, 16)}
        if kind == "spectrum":
            return {"input_values": random(i, BATCH, 32, 32)}
        frames = 4 if name == "videomae" else 8
        return {"pixel_values": random(i, BATCH, frames, 3, 16, 16)}

    return batch


def _loss(made: nn.Module, share: dict[str, torch.Tensor]) -> torch.Tensor:
    found = made(**share)
    main = [found[k] for k in ("last_hidden_state", "text_embeds", "image_embeds") if found.get(k) is not None]
    # Half of each, as the mean square of a normalized vector is a constant.
    return mean_square([t[..., : max(1, t.shape[-1] // 2)] for t in main])


def _kinds() -> dict[str, str]:
    kinds = dict.fromkeys(TEXT.split(), "text")
    kinds |= dict.fromkeys(PAIRS.split(), "pair") | dict.fromkeys(IMAGES.split(), "image")
    kinds |= dict.fromkeys(SOUNDS.split(), "sound")
    special = [
        "spectrum and text",
        "spectrum and text",
        "text and image",
        "text and image",
        "spectrum",
        "video",
        "video",
    ]
    return kinds | dict(zip(SPECIAL.split(), special, strict=True))


for _name, _kind in _kinds().items():
    _recipe = Recipe(_built(_name, _kind, False), _batch(_name, _kind), _loss)
    # phimoe draws which experts take part, without a probability in its configuration.
    _forms = MORE if _name in BROAD else FORMS
    model("transformers", _name, _recipe, shares=_name == "phimoe", forms=_forms, refused=REFUSED.get(_name, {}))
for _name in DROPS:
    _kind = _kinds()[_name]
    _recipe = Recipe(_built(_name, _kind, True), _batch(_name, _kind), _loss)
    model(
        "transformers", f"{_name}-with-dropout", _recipe, shares=True, forms=("replicas", "ranks", "central", "grouped")
    )
