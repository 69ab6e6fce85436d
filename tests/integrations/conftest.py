"""Keras takes its backend from the environment when it is imported first, by whichever of these files that is."""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")
