"""A TensorBoard callback that needs no TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tfstyle_dist.integrations.keras.backend import keras
from tfstyle_dist.monitoring.scalars import summary_writer


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes losses and metrics for TensorBoard, as ``keras.callbacks.TensorBoard`` does, which needs TensorFlow.

    Training goes to ``log_dir/train``, validation to ``log_dir/validation``; tags are ``epoch_loss``, and with
    ``update_freq`` also ``batch_loss``.

    Args:
        log_dir: a directory; on several workers the chief alone writes.
        update_freq: ``"epoch"``, ``"batch"`` or a number of batches.

    Raises:
        ImportError: the package tensorboard is missing.
        ValueError: another ``update_freq``.

    Example:
        >>> model.fit(x, y, callbacks=[TensorBoard("logs")])
    """

    def __init__(self, log_dir: str | Path = "logs", update_freq: str | int = "epoch") -> None:
        super().__init__()
        if not (update_freq in ("epoch", "batch") or (isinstance(update_freq, int) and update_freq > 0)):
            raise ValueError(f"update_freq must be 'epoch', 'batch' or a number of batches, got {update_freq!r}.")
        self.log_dir, self.update_freq = Path(log_dir), update_freq
        self._new_writer: Any = summary_writer("The callback TensorBoard")
        self._writers: dict[str, Any] = {}
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes after every ``update_freq`` batches."""
        self._batches += 1
        every = 1 if self.update_freq == "batch" else self.update_freq
        if every != "epoch" and self._batches % int(every) == 0:
            self._write("train", "batch", logs or {}, self._batches)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the epoch's numbers and the learning rate."""
        logs = dict(logs or {})
        validation = {k.removeprefix("val_"): v for k, v in logs.items() if k.startswith("val_")}
        training = {k: v for k, v in logs.items() if not k.startswith("val_")}
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is not None:
            training["learning_rate"] = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        self._write("train", "epoch", training, epoch)
        if validation:
            self._write("validation", "epoch", validation, epoch)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Closes the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def _write(self, part: str, prefix: str, logs: dict[str, Any], step: int) -> None:
        if part not in self._writers:
            self._writers[part] = self._new_writer(str(self.log_dir / part))
        for name, value in logs.items():
            self._writers[part].add_scalar(f"{prefix}_{name}", float(value), step)
        self._writers[part].flush()
