"""Moves batches to the replicas' devices ahead of time."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tfstyle_dist.core.devices import accelerator, is_accelerator
from tfstyle_dist.input.forks import leave_garbage_to_the_parent
from tfstyle_dist.input.layouts import memory_of
from tfstyle_dist.input.pipeline import Step
from tfstyle_dist.input.split import leaves_of, map_leaves


class DevicePrefetcher:
    """The steps of a pipeline with their parts on the replicas' devices.

    On an accelerator the copies run on a stream of their own, ``depth`` steps ahead of the training step; from pinned
    memory they do not wait. What is no tensor and has a method ``to`` is moved when its step is asked for. On the CPU
    nothing is copied and nothing is read ahead. Nor is it behind a batch that is on the device already: it is not
    copied, and its memory may be filled again for the next one. What the pipeline raises while it is read ahead is
    raised in its place.

    Args:
        steps: a pipeline's steps.
        devices: one for each local replica.
        depth: how many steps are moved ahead.
    """

    def __init__(self, steps: Iterator[Step], devices: Sequence[torch.device], depth: int) -> None:
        leave_garbage_to_the_parent()
        self._steps, self._devices, self._depth = steps, devices, depth
        self._ready: deque[tuple[Step, list[Any]]] = deque()
        self._raised: list[Exception] = []
        self._last_stays = False  # whether the batch that was read last was on a device already, in part
        self._streams = {d: accelerator(d.type).Stream(d) for d in set(devices) if is_accelerator(d.type)}

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        if not self._streams:
            return self._moved(next(self._steps)) if any(d.type != "cpu" for d in self._devices) else next(self._steps)
        self._read_ahead()
        if not self._ready:
            raise self._raised.pop() if self._raised else StopIteration
        step, events = self._ready.popleft()
        for part, device, event in zip(step.parts, self._devices, events, strict=True):
            stream = accelerator(device.type).current_stream(device)
            stream.wait_event(event)
            # The memory belongs to the copying stream: it must not be given away while this one still reads it.
            for leaf in _device_leaves(part):
                for memory in memory_of(leaf):
                    memory.record_stream(stream)
        return self._moved(step)

    def _read_ahead(self) -> None:
        while not self._raised and (not self._ready or (len(self._ready) <= self._depth and not self._last_stays)):
            try:
                step = next(self._steps, None)
                if step is None:
                    break
                self._last_stays = any(map(_stays, step.parts, self._devices))
                self._ready.append(self._copied(step))
            except Exception as error:
                # Without this frame, which would make a circle of the two.
                self._raised.append(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))

    def _moved(self, step: Step) -> Step:
        return replace(step, parts=[to_device(p, d) for p, d in zip(step.parts, self._devices, strict=True)])

    def _copied(self, step: Step) -> tuple[Step, list[Any]]:
        parts, events = [], []
        for part, device in zip(step.parts, self._devices, strict=True):
            stream, module = self._streams[device], accelerator(device.type)
            # What was made on a device comes from work that may not be done yet.
            for other in {leaf.device for leaf in _device_leaves(part)}:
                stream.wait_stream(accelerator(other.type).current_stream(other))
            with module.stream(stream):
                parts.append(map_leaves(partial(_tensor_to, device), part))
                event = module.Event()
                event.record(stream)
            events.append(event)
        return replace(step, parts=parts), events


def to_device(batch: Any, device: torch.device) -> Any:
    """``batch`` on ``device``: its tensors, and copies of objects that have ``to(device)``; all else stays as it is."""
    return map_leaves(partial(_leaf_to, device), batch)


def _leaf_to(device: torch.device, leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return _tensor_to(device, leaf)
    if isinstance(leaf, type) or not callable(getattr(leaf, "to", None)):
        return leaf
    try:
        own = copy.copy(leaf)  # some are moved in place
        moved = own.to(device)
    except (AttributeError, TypeError, ValueError):
        return leaf  # another method of that name
    return own if moved is None else moved


def _tensor_to(device: torch.device, leaf: Any) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


def _stays(batch: Any, device: torch.device) -> bool:
    """Whether a part of a batch is not copied."""
    return any(leaf.device == device for leaf in _device_leaves(batch))


def _device_leaves(batch: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor) and is_accelerator(leaf.device.type)]
