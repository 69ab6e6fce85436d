"""What a restore has matched, in TensorFlow's terms."""

from __future__ import annotations

from collections.abc import Sequence

from tfstyle_dist.core.logging import get_logger


class CheckpointLoadStatus:
    """The result of ``Checkpoint.restore``.

    If something did not match and none of the methods is called, a warning says what.

    Args:
        path: the checkpoint; ``None`` when nothing was restored.
        missing: objects, or parts of them, that the checkpoint does not have.
        unused: what the checkpoint has and no object took.
        matched: number of objects that were restored.

    Source: the status objects of ``tf.train.Checkpoint.restore``.
    """

    def __init__(self, path: str | None, missing: Sequence[str], unused: Sequence[str], matched: int) -> None:
        self.path, self.missing, self.unused, self.matched = path, tuple(missing), tuple(unused), matched
        self._quiet = path is None

    def assert_consumed(self) -> CheckpointLoadStatus:
        """Checks that every object was restored, and everything in the checkpoint was taken.

        Raises:
            AssertionError: it was not so; the message lists the names.
        """
        self.assert_existing_objects_matched()
        if self.unused:
            raise AssertionError(
                f"Checkpoint {self.path!r} has what no object took: {_list(self.unused)}. Give the objects under the "
                "names they were saved with, before restore() is called, or call expect_partial() if that is intended."
            )
        return self

    def assert_existing_objects_matched(self) -> CheckpointLoadStatus:
        """Checks that every object was restored; more may be in the checkpoint.

        Raises:
            AssertionError: one was not; the message lists the names.
        """
        self._quiet = True
        if self.path is None:
            raise AssertionError("No checkpoint was given to restore: the path is None.")
        if self.missing:
            raise AssertionError(
                f"Checkpoint {self.path!r} does not have {_list(self.missing)}; what it has and nobody took: "
                f"{_list(self.unused) or 'nothing'}."
            )
        return self

    def assert_nontrivial_match(self) -> CheckpointLoadStatus:
        """Checks that something was restored.

        Raises:
            AssertionError: nothing was.
        """
        self._quiet = True
        if not self.matched:
            raise AssertionError(f"Nothing of checkpoint {self.path!r} was restored; it has {_list(self.unused)}.")
        return self

    def expect_partial(self) -> CheckpointLoadStatus:
        """Says that it need not match, so that no warning is given."""
        self._quiet = True
        return self

    def __del__(self) -> None:
        if self._quiet or not (self.missing or self.unused):
            return
        get_logger().warning(
            "Checkpoint %s did not match: not in it: %s; in it and not used: %s. What is made after restore() is not "
            "restored: make it before. Call expect_partial() on the result of restore() if it need not match, or "
            "assert_consumed() to have it raised.",
            self.path,
            _list(self.missing) or "nothing",
            _list(self.unused) or "nothing",
        )


def _list(names: Sequence[str], most: int = 10) -> str:
    text = ", ".join(names[:most])
    return f"{text}, ... ({len(names)} in all)" if len(names) > most else text
