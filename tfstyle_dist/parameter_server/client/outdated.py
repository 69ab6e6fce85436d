"""A worker's copies of parameters: pulled again once a function has sent an update, and not to be written to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from tfstyle_dist.core import nest, torch_internals
from tfstyle_dist.core.untraced import untraced
from tfstyle_dist.parameter_server.client.remote_record import RemoteRecord
from tfstyle_dist.variables.content.parameter_marks import address_of
from tfstyle_dist.variables.record import raw
from tfstyle_dist.variables.torch_functions import WITHOUT_VALUE

PUT_BACK = 1e-6
"""A function has put a parameter back if it differs by no more than this, relative to its largest element."""


class _Pulling(Protocol):
    def pull_outdated(self) -> None:
        """Makes all outdated copies as fresh as the servers."""


_with_outdated: weakref.WeakSet[Any] = weakref.WeakSet()


class OutdatedParameter(torch.nn.Parameter):
    """What a worker's copy is between an update that its function has sent and the next use of its value.

    Whatever uses the value pulls it first, so a function may take several steps. Nothing is pulled if nothing does.
    """

    @classmethod
    @untraced
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Every torch operation with such a parameter comes through here."""
        if func in WITHOUT_VALUE:
            with raw():
                return func(*args, **(kwargs or {}))
        _pull_all()
        for leaf in nest.leaves((args, kwargs)):
            make_current(leaf)  # copy.deepcopy makes a copy of the same class
        return func(*args, **(kwargs or {}))


def _pull_all() -> None:
    for servers in list(_with_outdated):
        servers.pull_outdated()


def mark(records: Iterable[RemoteRecord], servers: _Pulling) -> list[RemoteRecord]:
    """Makes the copies outdated that a function's module holds.

    Args:
        records: of what was sent.
        servers: what pulls it.

    Returns:
        The records of those copies.
    """
    marked = [record for record in records if record.fixed and record.kind == "parameter"]
    for record in marked:
        record.components[0].__class__ = OutdatedParameter
    if marked:
        _with_outdated.add(servers)
    return marked


def make_current(local: Any) -> None:
    """A copy has been pulled: it is a plain parameter again."""
    if type(local) is OutdatedParameter:
        local.__class__ = torch.nn.Parameter  # type: ignore[assignment]


def has_changed(record: RemoteRecord) -> bool:
    """Whether a function wrote to the local copy of a module's parameter since it was pulled, or moved it."""
    if not record.fixed or record.kind != "parameter":
        return False
    local, (version, address) = record.components[0], record.pulled_as
    return torch_internals.version_of(local) != version or address not in (None, address_of(local))


def check_unwritten(records: Iterable[RemoteRecord]) -> None:
    """What a function writes to a parameter would be lost.

    A function may put back what was there, as optimizers that look around do: from then on the values of that
    parameter are compared each time. Those of the others are compared where there is a ``baseline``.

    Raises:
        RuntimeError: it has left another value.
    """
    with raw(), torch.no_grad():
        for record in records:
            if not record.fixed or record.kind != "parameter":
                continue
            changed, baseline = has_changed(record), record.baseline
            if baseline is None and not changed:
                continue
            if baseline is None or not _is_back(record.components[0], baseline):
                raise RuntimeError(_refusal(record))
            record.put_back = record.put_back or changed


def _is_back(local: torch.Tensor, baseline: torch.Tensor) -> bool:
    if local.device != baseline.device or local.dtype != baseline.dtype or torch.equal(local, baseline):
        return True  # a copy on a GPU of the function's own is no other value
    if not (local.is_floating_point() or local.is_complex()):
        return False
    largest = float(torch.nan_to_num(baseline.abs(), posinf=0.0).max())
    return torch.allclose(local, baseline, rtol=0.0, atol=PUT_BACK * largest, equal_nan=True)


def _refusal(record: RemoteRecord) -> str:
    return (
        f"A scheduled function wrote to the parameter {record.describe()!r}, which lives on parameter servers. They "
        "take the gradients of optimizer.step() and what a function writes to buffers and Variables, but nothing that "
        "it writes to parameters: that would be lost. Let an optimizer make the update, keep the value in a "
        "tfstyle_dist.Variable, or write to the parameter in the coordinator's program, after join(). A function may "
        "change a parameter for a while if it puts back what was there, and does so from its first run on."
    )
