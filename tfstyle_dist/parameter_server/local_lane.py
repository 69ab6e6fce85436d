"""What a client shares with a server of its own host: a segment for requests and answers, a door, the variables."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from tfstyle_dist.core.errors import DeadlineExceededError, UnavailableError
from tfstyle_dist.core.logging import get_logger
from tfstyle_dist.parameter_server.segment import Segment
from tfstyle_dist.parameter_server.values_reader import ValuesReader
from tfstyle_dist.parameter_server.visit import Visit
from tfstyle_dist.shm import ordering

_NOTHING: dict[str, Any] = {"process": 0, "owner": "", "files": [], "bytes": [], "variables": []}


class LocalLane:
    """The client's end of everything that is shared.

    Args:
        name: of the server, for messages.
        timeout: limit of each wait.
        call: calls a method of the server; nothing else may be on its way.
        look: raises if the server is gone.
    """

    def __init__(
        self,
        name: str,
        timeout: timedelta | None,
        call: Callable[[dict[str, Any]], dict[str, Any]],
        look: Callable[[], None],
    ) -> None:
        self._name, self._timeout, self._call, self._look = name, timeout, call, look
        self.segment: Segment | None = None
        self._values: ValuesReader | None = None
        self._visit: Visit | None = None
        self.works = True  # until the server cannot map a segment
        try:
            told = call({"method": "door"})
            self._visit = Visit(str(told["name"]), str(told["token"]), timeout)
        except DeadlineExceededError:
            raise
        except OSError as error:  # of either end
            get_logger().info("%s: messages go by ZeroMQ (%s)", name, error)

    @property
    def open(self) -> bool:
        """Whether messages go through the door."""
        return self._visit is not None

    @property
    def description(self) -> str:
        """For the log."""
        return "shared memory" if self.open else "shared memory, messages by ZeroMQ"

    @property
    def visit(self) -> Visit | None:
        """The socket that requests go through; ``None``: ZeroMQ."""
        return self._visit

    def ended(self) -> bool:
        """Whether the server is gone; asked when no answer is on its way."""
        return self._visit is not None and self._visit.ended()

    # ---- tensors ----------------------------------------------------------------------------------------------

    def make_segment(self, nbytes: int) -> bool:
        """Makes the segment large enough; nothing may be on its way.

        Returns:
            Whether there is one now; if not, tensors travel by ZeroMQ from now on.
        """
        if self.segment is not None and self.segment.half >= nbytes:
            return True
        half = max(1 << 20, 1 << (nbytes - 1).bit_length())
        try:
            segment = Segment.create(half)
        except OSError as error:
            return self._give_up("no shared memory", error)
        try:
            self._call({"method": "segment", **segment.place})
        except BaseException as error:
            segment.close()
            if isinstance(error, UnavailableError | TimeoutError) or not isinstance(error, OSError | RuntimeError):
                raise
            return self._give_up("the server cannot map shared memory", error)
        segment.forget_place()
        if self.segment is not None:
            self.segment.close()
        self.segment = segment
        return True

    def _give_up(self, why: str, error: Exception) -> bool:
        get_logger().warning("%s: %s (%s); tensors travel by ZeroMQ", self._name, why, error)
        if self._visit is not None:  # else its end would be taken for that of this process
            self._call({"method": "leave"})
        self.close()
        self.works = False
        return False

    def values(self, variables: Iterable[int]) -> ValuesReader | None:
        """The variables that this process can read without asking; nothing may be on its way.

        Args:
            variables: those that are wanted.
        """
        if not ordering.possible() or not self.works:
            return None
        found = self._values
        if found is None or any(v not in found and v not in found.private for v in variables):
            description = self._call({"method": "values"})
            try:
                if found is None:
                    found = ValuesReader(description)
                else:
                    found.update(description)
            except OSError as error:
                get_logger().info("%s: its variables cannot be read directly (%s)", self._name, error)
                found = ValuesReader(_NOTHING)
            found.private.update(v for v in variables if v not in found)
            self._values = found
        return found

    def sweep(self) -> None:
        """Gives back what is not used in place any more."""
        if self._values is not None:
            self._values.sweep()

    def close(self) -> None:
        """Gives the memory back."""
        if self._visit is not None:
            self._visit.close()
            self._visit = None
        if self.segment is not None:
            self.segment.close()
            self.segment = None
        self._values = None
