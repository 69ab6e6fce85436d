"""Models of images: torchvision, timm, vit-pytorch, segmentation-models-pytorch, diffusers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
import segmentation_models_pytorch as segmentation
import timm
import torch
import torchvision
import vit_pytorch
from models import Recipe, mean_square, model
from programs import BATCH, BROAD, random
from torch import nn

FORMS = ("replicas", "ranks")


def _pictures(size: int, channels: int = 3, count: int = BATCH) -> Callable[[int], torch.Tensor]:
    return lambda i: random(i, count, channels, size, size)


def _loss(made: nn.Module, share: torch.Tensor) -> torch.Tensor:
    found = made(share)
    return mean_square((found[0] if isinstance(found, tuple) else found) - 0.5)  # some heads begin with zeros


def _add(name: str, build: Callable[[], nn.Module], size: int, forms: tuple[str, ...] = FORMS) -> None:
    # Nearly all have batch statistics or dropout, so one device does the shares by themselves.
    model("images", name, Recipe(build, _pictures(size), _loss, 0.01), shares=True, forms=forms)


# Four replicas of two pictures each: of 32 x 32 its last layers would norm two numbers, and rounding errors grow by a
# factor of 10,000 in each step.
TORCHVISION = {"resnet18": 64, "mobilenet_v3_small": 32, "shufflenet_v2_x0_5": 32, "squeezenet1_1": 48}
TORCHVISION |= {"mnasnet0_5": 32, "regnet_y_400mf": 32, "googlenet": 48}
for _name, _size in TORCHVISION.items():
    _options = {"init_weights": False, "aux_logits": False} if _name == "googlenet" else {}
    _build = lambda name=_name, options=_options: torchvision.models.get_model(name, num_classes=5, **options)  # noqa: E731
    _add(f"torchvision.{_name}", _build, _size, BROAD if _name == "resnet18" else FORMS)
_add(
    "torchvision.VisionTransformer",
    lambda: torchvision.models.VisionTransformer(16, 8, 2, 2, 32, 64, dropout=0.1, num_classes=5), 16,
)  # fmt: skip
_add(
    "torchvision.SwinTransformer",
    lambda: torchvision.models.SwinTransformer([2, 2], 16, [1, 1], [2, 2], [4, 4], num_classes=5), 32,
)  # fmt: skip

TIMM = {
    "test_resnet": 32, "test_vit": 32, "test_convnext": 32, "test_efficientnet": 32, "test_nfnet": 32,
    "test_byobnet": 32, "test_mambaout": 32, "test_vit2": 32, "mobilenetv2_035": 64, "ghostnet_050": 32,
    "lcnet_035": 32, "tinynet_e": 32, "test_efficientnet_evos": 32,
}  # fmt: skip
for _name, _size in TIMM.items():
    if _name not in timm.list_models():
        continue
    _fixed = {"img_size": 32} if "vit" in _name else {}
    _build = lambda name=_name, fixed=_fixed: timm.create_model(name, num_classes=5, drop_rate=0.1, **fixed)  # noqa: E731
    _add(f"timm.{_name}", _build, _size)


def _small(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    common = {"image_size": 16, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 48}
    return lambda: kind(**{**common, **options})


_add("vit_pytorch.ViT", _small(vit_pytorch.ViT, dropout=0.1, emb_dropout=0.1), 16)
_add("vit_pytorch.SimpleViT", _small(vit_pytorch.SimpleViT), 16)
_add("segmentation.Unet", lambda: segmentation.Unet("resnet18", encoder_weights=None, classes=2), 32)
_add("segmentation.FPN", lambda: segmentation.FPN("mobilenet_v2", encoder_weights=None, classes=2), 64)


def _denoise(made: nn.Module, share: Any) -> torch.Tensor:
    noisy, noise, times = share
    return nn.functional.mse_loss(made(noisy, times).sample, noise)


def _noisy(i: int) -> tuple[torch.Tensor, ...]:
    times = torch.arange(BATCH) * 7 + i
    return random(i, BATCH, 1, 8, 8), random(i + 50, BATCH, 1, 8, 8), times


def _unet() -> nn.Module:
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def _autoencoder() -> nn.Module:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, block_out_channels=(8,), down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",), latent_channels=2, norm_num_groups=4, sample_size=8,
    )  # fmt: skip


model("images", "diffusers.UNet2DModel", Recipe(_unet, _noisy, _denoise), forms=BROAD)
model(
    "images",
    "diffusers.AutoencoderKL",
    Recipe(_autoencoder, _pictures(8), lambda m, x: nn.functional.mse_loss(m(x, sample_posterior=True).sample, x)),
    shares=True,
)
