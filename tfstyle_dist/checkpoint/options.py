"""Options of saving and restoring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of saving and restoring (``tf.train.CheckpointOptions``).

    Args:
        enable_async: write in the background; ``sync()``, or the next save, tells how it went.
        experimental_enable_async_checkpoint: the older name of the same.
    """

    enable_async: bool = False
    experimental_enable_async_checkpoint: bool = False

    @property
    def asynchronous(self) -> bool:
        """Whether one of the two was asked for."""
        return self.enable_async or self.experimental_enable_async_checkpoint


def is_async(options: CheckpointOptions | None, block: bool) -> bool:
    """Whether a save returns before the files are written."""
    return not block or (options is not None and options.asynchronous)
