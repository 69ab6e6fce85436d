"""What a restore has matched, in TensorFlow's terms."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from tfstyle_dist.checkpoint.restored import Restored
from tfstyle_dist.core.logging import get_logger


class CheckpointLoadStatus:
    """The result of ``Checkpoint.restore``.

    If something did not match and none of the methods is called, a warning says what. What is attached later counts
    from then on.

    Args:
        restored: what the objects have taken; ``None`` when nothing was restored.

    Source: the status objects of ``tf.train.Checkpoint.restore``.
    """

    def __init__(self, restored: Restored | None) -> None:
        self.restored = restored
        self._warning = None if restored is None else weakref.finalize(self, _warn, restored)

    @property
    def path(self) -> str | None:
        """The checkpoint; ``None`` when nothing was restored."""
        return None if self.restored is None else self.restored.reader.path

    @property
    def missing(self) -> tuple[str, ...]:
        """Objects, or parts of them, that the checkpoint does not have."""
        return () if self.restored is None else self.restored.missing

    @property
    def unused(self) -> tuple[str, ...]:
        """What the checkpoint has and no object took."""
        return () if self.restored is None else self.restored.unused

    @property
    def matched(self) -> int:
        """Number of objects that were restored."""
        return 0 if self.restored is None else self.restored.matched

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Checks that every object was restored, and everything in the checkpoint was taken.

        Raises:
            AssertionError: it was not so; the message lists the names.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise AssertionError(
                f"Checkpoint {self.path!r} has what no object took: {_list(self.unused)}. Give the objects under the "
                "names they were saved with, before this is called, or call expect_partial() if that is intended."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Checks that every object was restored; more may be in the checkpoint.

        Raises:
            AssertionError: one was not; the message lists the names.
        """
        self._something()
        if self.missing:
            raise AssertionError(
                f"Checkpoint {self.path!r} does not have {_list(self.missing)}; what it has and nobody took: "
                f"{_list(self.unused) or 'nothing'}."
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Checks that something was restored, if there was something to restore.

        Raises:
            AssertionError: nothing was.
        """
        self._something()
        if not self.matched and (self.missing or self.unused):
            raise AssertionError(f"Nothing of checkpoint {self.path!r} was restored; it has {_list(self.unused)}.")
        return self

    def _something(self) -> None:
        """Says that somebody has asked, and raises if there is nothing to ask for."""
        self.expect_partial()
        if self.restored is None:
            raise AssertionError(
                "No checkpoint was given to restore: the path is None. Ask only if latest_checkpoint() found one."
            )

    def initialize_or_restore(self, session: object = None) -> None:
        """Does nothing: everything has its value already, as in TensorFlow's eager mode; ``run_restore_ops`` too.

        Args:
            session: accepted for TF's signature.
        """

    run_restore_ops = initialize_or_restore

    def expect_partial(self) -> CheckpointLoadStatus:
        """Says that it need not match, so that no warning is given."""
        if self._warning is not None:
            self._warning.detach()
        return self


def _warn(restored: Restored) -> None:
    missing, unused = restored.missing, restored.unused
    if missing or unused:
        get_logger().warning(
            "Checkpoint %s did not match: not in it: %s; in it and not used: %s. What is attached to the Checkpoint "
            "later, under the name it was saved with, is restored then. Call expect_partial() on the result of "
            "restore() if it need not match, or assert_consumed() to have it raised.",
            restored.reader.path,
            _list(missing) or "nothing",
            _list(unused) or "nothing",
        )


def _list(names: Sequence[str], most: int = 10) -> str:
    text = ", ".join(names[:most])
    return f"{text}, ... ({len(names)} in all)" if len(names) > most else text
