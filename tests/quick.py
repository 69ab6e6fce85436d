"""The quick tests: what a plain ``pytest`` runs, to tell whether an installation is sound, in about 5 minutes.

All recorded TensorFlow cases, each strategy against one device, and the core of each room. ``pytest --rest``
runs the others, ``pytest --whole`` all.
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

QUICK = (
    "architecture/test_layers.py",
    "architecture/test_public_api.py",
    "architecture/test_rooms.py",
    "checkpoint/test_checkpoint_contents.py",
    "cluster_resolver",
    "comm/test_options.py",
    "conformance",
    "core",
    "elastic/test_protocol.py",
    "gradients/test_bucket_views.py",
    "gradients/test_reduction.py",
    "input/test_layouts.py",
    "input/test_shares.py",
    "monitoring",
    "multi_worker/test_multi_worker_strategy.py",
    "ops/test_aggregate.py",
    "ops/test_reference.py",
    "parameter_server/test_broken_links.py",
    "parity/test_parity.py",
    "runtime",
    "shm",
    "strategies/test_bad_input.py",
    "strategies/test_bad_training.py",
    "strategies/test_devices.py",
    "strategies/test_everyday.py",
    "test_seeds.py",
    "test_tensorflow_names.py",
    "test_tutorial_outputs.py",
    "train/test_optimizers.py",
    "variables",
)
"""Folders and files of ``tests/``; of these, what is marked ``slow`` is left out."""


def is_quick(path: Path, slow: bool) -> bool:
    """Whether a test is one of the quick ones.

    Args:
        path: of its file.
        slow: whether it is marked so.
    """
    where = path.relative_to(HERE).as_posix()
    return not slow and any(where == chosen or where.startswith(chosen + "/") for chosen in QUICK)
