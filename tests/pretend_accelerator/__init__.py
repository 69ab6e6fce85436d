"""A pretend accelerator for tests: devices ``pretend:0`` to ``pretend:3``, made of the CPU.

Its autograd has device threads, its memory cannot be read by the host without a copy, its tensors refuse to mix with
those of other devices, and a stream that touches what another stream has written must have been ordered after it.
``backend.cpp`` is compiled when a session first needs it.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

_SOURCE = Path(__file__).with_name("backend.cpp")


class Unavailable(Exception):
    """The pretend accelerator cannot be made here; says why."""


def load() -> None:
    """Makes ``pretend:0`` and so on devices of this process.

    Raises:
        Unavailable: no C++ compiler is here.
    """
    if hasattr(torch, "pretend"):
        return
    torch.ops.load_library(str(_compiled()))
    torch.utils.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _compiled() -> Path:
    compiler = shutil.which("g++")
    if compiler is None:
        raise Unavailable("the pretend accelerator needs g++")
    from torch.utils.cpp_extension import include_paths, library_paths

    version = f"{torch.__version__} {sys.version} {_SOURCE.read_text()}"
    folder = _SOURCE.parents[2] / "build" / f"pretend-{hashlib.sha256(version.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "pretend.so"
    with (folder / "lock").open("w") as lock:  # several test processes come at once
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            made = folder / "new.so"
            command = [compiler, "-std=c++20", "-O1", "-fPIC", "-shared", "-w", str(_SOURCE), "-o", str(made)]
            command += [f"-isystem{path}" for path in include_paths()] + [f"-L{path}" for path in library_paths()]
            command += ["-ltorch", "-ltorch_cpu", "-lc10"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise RuntimeError(f"backend.cpp does not compile:\n{done.stderr[-4000:]}")
            made.rename(library)
    return library


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    if device is None:
        return int(torch.ops.pretend.current_device())
    index = torch.device(device).index
    return int(torch.ops.pretend.current_device()) if index is None else index


class _Device:
    """``torch.pretend.device``, as ``torch.cuda.device``."""

    def __init__(self, device: Any) -> None:
        self._index, self._before = _index(device), 0

    def __enter__(self) -> None:
        self._before = torch.ops.pretend.current_device()
        torch.ops.pretend.set_device(self._index)

    def __exit__(self, *_: object) -> None:
        torch.ops.pretend.set_device(self._before)


class _Stream:
    """``torch.pretend.stream``, as ``torch.cuda.stream``: one stream may be entered by several threads."""

    def __init__(self, stream: torch.Stream) -> None:
        self._stream, self._before = stream, stream

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_stream(self._stream.device_index)
        self._set(self._stream)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)

    def _set(self, stream: torch.Stream) -> None:
        device = torch.ops.pretend.current_device()
        torch.accelerator.set_stream(stream)
        torch.ops.pretend.set_device(device)


def _module() -> ModuleType:
    module: Any = ModuleType("torch.pretend")
    ops = torch.ops.pretend
    count = ops.device_count()
    module.is_initialized = module.is_available = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: count
    module.current_device = ops.current_device
    module.set_device = lambda device: ops.set_device(_index(device))
    module.device = _Device
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.manual_seed = lambda seed: ops.seed(ops.current_device(), seed)
    module.manual_seed_all = lambda seed: [ops.seed(index, seed) for index in range(count)]
    module.get_rng_state = lambda device=None: ops.get_state(_index(device))
    module.set_rng_state = lambda state, device=None: ops.set_state(_index(device), state)
    module.Stream = lambda device=None, priority=0: torch.Stream(device=torch.device("pretend", _index(device)))
    module.Event = lambda: torch.Event(device="pretend")
    module.stream = _Stream
    module.current_stream = lambda device=None: torch.accelerator.current_stream(_index(device))
    module.synchronize = lambda device=None: torch.accelerator.synchronize(_index(device))
    return module  # type: ignore[no-any-return]
