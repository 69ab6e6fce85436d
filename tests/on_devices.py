"""The suites a second time, on devices: ``TFSTYLE_TEST_DEVICES=pretend:0,pretend:1 pytest tests/variables``.

The tests say ``cpu:0``, ``cpu:1`` and so on for the places of their replicas. With the variable set, those names mean
its devices, one after the other; a strategy without ``devices`` takes the first. Tensors that a test makes without
saying where are on the device too, as after ``torch.set_default_device``, and where the code of a test, not that of
the package, mixes tensors of several devices, they come to the current one, as TensorFlow would do it; those of the CPU
outside of replicas alone. Real devices can be named as well: ``cuda:0#0,cuda:0#1``. A test that is about the CPU alone
is marked ``cpu_only`` with the reason.
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_gpu import on_a_host_of_its_own
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_map_only

from tfstyle_dist.core import devices, launch_env
from tfstyle_dist.core.devices import ReplicaDevice
from tfstyle_dist.runtime import context

VARIABLE = "TFSTYLE_TEST_DEVICES"
NAMES = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
KIND = NAMES[0].partition(":")[0] if NAMES else "cpu"
IS_CUDA = KIND == "cuda"
"""For libraries that choose a device themselves and do not know the pretend one."""
READS_FIRST = ("input/test_", "integrations/test_accelerate", "integrations/test_trainer")
"""Tests of what is read on the CPU and moved then."""
_TORCH, _TESTS = (str(Path(str(file)).parent) + os.sep for file in (torch.__file__, __file__))
_parse = devices.parse
_DRAWS = (torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal)


def _device(number: int) -> ReplicaDevice:
    """The device of this number; after the last one named come others like it."""
    if number < len(NAMES):
        return _parse(NAMES[number])
    last = _parse(NAMES[-1])
    return dataclasses.replace(last, slot=number) if last.slot else dataclasses.replace(last, index=number)


def _translated(name: Any) -> ReplicaDevice:
    found = _parse(name)
    if not isinstance(name, str) or found.type != "cpu" or found.slot:
        return found
    launch = launch_env.launch()
    return _device(found.index + (0 if launch is None else launch.local_rank))


def _found() -> tuple[Any, ...]:
    """What a strategy without ``devices`` sees: one device, each rank of a test its own."""
    launch = launch_env.launch()
    return tuple(_device(number) for number in range(1 if launch is None else launch.local_world_size))


def load() -> None:
    """Makes the names of CPU devices mean others in this process."""
    if devices.parse is _translated:  # a rank serves several sessions
        return
    if KIND == "pretend":
        from pretend_accelerator import collectives, load as load_pretend

        load_pretend()
        collectives.register()
    devices.parse, devices.find_local_devices = _translated, _found
    DeviceContext.__torch_function__ = _brought_together(DeviceContext.__torch_function__)
    torch.testing.assert_close = _on_the_host(torch.testing.assert_close)
    torch.set_default_device(KIND)
    os.environ["KERAS_TORCH_DEVICE"] = KIND  # Keras looks for devices that it knows


def _brought_together(inner: Callable[..., Any]) -> Callable[..., Any]:
    """What the default device does with a call of torch, and then what is said above."""

    def called(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__get__":  # of attributes, as most calls are: nothing to bring together
            return func(*args)
        if self.device.type == KIND and func in _DRAWS and _draws_on_the_cpu(kwargs or {}):
            return func(*args, **{**kwargs, "device": "cpu"}).to(KIND)
        frame = context.current_frame()
        kinds = (KIND,) if frame is not None and frame.replica is not None else (KIND, "cpu")
        given = {t.device for t in _tensors_in((*args, kwargs)) if t.device.type in kinds}
        if len(given) > 1 and _is_of_a_test(sys._getframe(1)):
            here = torch.device(KIND, torch.get_device_module(KIND).current_device())
            args, kwargs = tree_map_only(
                torch.Tensor, lambda t: t.to(here) if t.device.type in kinds else t, (args, kwargs)
            )
        return inner(self, func, types, args, kwargs)

    return called


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Those in the arguments of a call; ``tree_leaves`` takes a third of the time of small tests."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple | dict):
            yield from _tensors_in(value.values() if isinstance(value, dict) else value)


def _draws_on_the_cpu(kwargs: dict[str, Any]) -> bool:
    """Whether a generator of the CPU is to make numbers for a device, whose functions would refuse it."""
    generator = kwargs.get("generator")
    return generator is not None and generator.device.type == "cpu" and kwargs.get("device") is None


def _is_of_a_test(frame: Any) -> bool:
    """Whether the innermost code that is not torch's is that of a test."""
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_TESTS)


def _on_the_host(compare: Callable[..., Any]) -> Callable[..., Any]:
    """A comparison of what different replicas have, wherever they have it."""

    def compared(*values: Any, **options: Any) -> Any:
        return compare(*tree_map_only(torch.Tensor, lambda t: t.cpu(), values), **options)

    return compared


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves out what is about the CPU, with its reason."""
    for item in items:
        marker = item.get_closest_marker("cpu_only")
        if marker is not None:
            item.add_marker(pytest.mark.skip(reason=f"about the CPU: {marker.args[0]}"))


def _makes_tensors_of(node: Any) -> None:
    path = "/".join(Path(getattr(node, "path", "")).parts[-2:])
    torch.set_default_device("cpu" if path.startswith(READS_FIRST) else KIND)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Files make tensors when they are read, too."""
    _makes_tensors_of(collector)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Says where tensors are made."""
    _makes_tensors_of(item)
    launch = launch_env.launch()
    if launch is not None:  # as a program of ranks does when it begins
        torch.get_device_module(KIND).set_device(_device(launch.local_rank).index)
        if IS_CUDA and torch.cuda.device_count() < launch.local_world_size:
            os.environ.update(on_a_host_of_its_own(launch.rank))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    """Says of a test that it needs what the devices lack."""
    try:
        yield
    except NotImplementedError as error:
        for kind in ("Sparse", "Nested"):
            if re.search(rf"'{kind}\w*pretend' backend", str(error)):
                pytest.skip(f"the pretend accelerator has no {kind.lower()} tensors")
        raise
    except RuntimeError as error:
        if "`fused=True` requires" in str(error):
            pytest.skip("this torch has no fused form of the optimizer for the device")
        raise
