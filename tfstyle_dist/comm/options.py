"""How a user tunes communication: ``tf.distribute.experimental.CommunicationOptions``."""

from __future__ import annotations

import enum
import numbers
from datetime import timedelta


class CommunicationImplementation(enum.Enum):
    """Which library moves the bytes (``tf.distribute.experimental.CommunicationImplementation``).

    * ``AUTO``: NCCL between GPUs, Gloo between CPUs; falls back loudly.
    * ``RING``: Gloo.
    * ``NCCL``: NCCL; raises where it is missing.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


CollectiveCommunication = CommunicationImplementation


class CommunicationOptions:
    """Options of collective operations (``tf.distribute.experimental.CommunicationOptions``).

    Args:
        bytes_per_pack: gradients are packed into buckets of about this many bytes; 0 lets the strategy choose.
        timeout_seconds: limit of every wait for other replicas or workers; ``None`` takes the strategy's default.
        implementation: a ``CommunicationImplementation`` or its name in any case.

    Raises:
        TypeError: ``bytes_per_pack`` is no whole number, or ``timeout_seconds`` no number.
        ValueError: ``bytes_per_pack`` is negative, ``timeout_seconds`` neither positive nor finite, or
            ``implementation`` unknown.

    Example:
        >>> CommunicationOptions(bytes_per_pack=50 * 1024 * 1024, timeout_seconds=120.0).bytes_per_pack
        52428800
    """

    def __init__(
        self,
        bytes_per_pack: int = 0,
        timeout_seconds: float | None = None,
        implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO,
    ) -> None:
        if not isinstance(bytes_per_pack, numbers.Real) or not float(bytes_per_pack).is_integer():
            raise TypeError(
                f"bytes_per_pack must be a whole number of bytes, got {bytes_per_pack!r}; write e.g. 2**20."
            )
        if bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be >= 0, got {bytes_per_pack}; 0 lets the strategy choose.")
        if timeout_seconds is not None and not isinstance(timeout_seconds, numbers.Real):
            raise TypeError(f"timeout_seconds must be a number of seconds or None, got {timeout_seconds!r}.")
        if timeout_seconds is not None and not 0 < timeout_seconds < timedelta.max.total_seconds():
            raise ValueError(
                f"timeout_seconds must be > 0 or None, got {timeout_seconds}; None takes the strategy's default, which "
                "TFSTYLE_TIMEOUT_SECONDS=0 makes unlimited."
            )
        if isinstance(implementation, str):
            if implementation.upper() not in CommunicationImplementation.__members__:
                raise ValueError(
                    f"implementation must be one of {list(CommunicationImplementation.__members__)}, got "
                    f"{implementation!r}."
                )
            implementation = CommunicationImplementation[implementation.upper()]
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                f"implementation must be a CommunicationImplementation or its name, got "
                f"{type(implementation).__name__}."
            )
        self.bytes_per_pack: int = int(bytes_per_pack)
        self.timeout_seconds: float | None = timeout_seconds
        self.implementation: CommunicationImplementation = implementation

    @property
    def timeout(self) -> timedelta | None:
        """``timeout_seconds`` as a ``timedelta``."""
        return None if self.timeout_seconds is None else timedelta(seconds=self.timeout_seconds)

    def __repr__(self) -> str:
        return (
            f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack}, timeout_seconds={self.timeout_seconds}, "
            f"implementation={self.implementation})"
        )


def options_or_default(options: CommunicationOptions | None) -> CommunicationOptions:
    """What a strategy was given, or the defaults.

    Args:
        options: of the user.

    Raises:
        TypeError: they are no ``CommunicationOptions``.
    """
    if options is not None and not isinstance(options, CommunicationOptions):
        raise TypeError(
            f"communication_options must be CommunicationOptions, got {options!r}; write e.g. "
            "communication_options=experimental.CommunicationOptions(timeout_seconds=60)."
        )
    return options or CommunicationOptions()


class CollectiveHints:
    """The older name of ``CommunicationOptions``: constructing one gives such an object.

    Source: ``tf.distribute.experimental.CollectiveHints``.

    Args:
        bytes_per_pack: as in ``CommunicationOptions``.
        timeout_seconds: as in ``CommunicationOptions``.
    """

    def __new__(  # type: ignore[misc]  # TF's class does the same: it only builds options
        cls, bytes_per_pack: int = 0, timeout_seconds: float | None = None
    ) -> CommunicationOptions:
        """Builds the options object."""
        return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)
