"""How the programs begin that train Keras models with parameter servers."""

from __future__ import annotations

from pathlib import Path

import on_devices

ENVIRONMENT = (
    {"KERAS_TORCH_DEVICE": "cpu", "TFSTYLE_PS_PATIENCE_SECONDS": "300"}  # the pretend accelerator is slow
    if on_devices.NAMES
    else {"CUDA_VISIBLE_DEVICES": ""}
)
"""On devices the strategies without servers take all of them; what servers hold is on the CPU."""

_PRETEND = f"""
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from pretend_accelerator import load
from tfstyle_dist.core import devices

load()
devices.find_local_devices = lambda: (devices.parse("pretend:0"), devices.parse("pretend:1"))
"""

TASKS = f"""
import os, sys

os.environ["KERAS_BACKEND"] = "torch"
import torch
import tfstyle_dist as tfd
{_PRETEND if on_devices.KIND == "pretend" else ""}

torch.set_num_threads(1)
resolver = tfd.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type in ("worker", "ps"):
    tfd.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    sys.exit()

import keras
import numpy as np
"""
"""The worker and ps tasks serve; the chief goes on, with Keras on torch."""
