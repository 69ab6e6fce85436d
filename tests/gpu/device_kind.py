"""Which accelerator the cases of this folder run on: the one of this machine, or the pretend one of the tests."""

from __future__ import annotations

import os
from typing import Any

import torch

KIND = os.environ.get("TFSTYLE_DEVICE_KIND", "cuda" if torch.cuda.is_available() else "pretend")


def load_kind() -> Any:
    """torch's module for the accelerator, such as ``torch.cuda``."""
    if KIND == "pretend":
        from pretend_accelerator import load

        load()
    return torch.get_device_module(KIND)
