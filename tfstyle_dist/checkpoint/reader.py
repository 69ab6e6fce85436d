"""What is in a checkpoint, without the objects it was made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec, files
from tfstyle_dist.checkpoint.dcp import TensorReader
from tfstyle_dist.checkpoint.listing import latest_checkpoint
from tfstyle_dist.core.errors import DataLossError, NotFoundError


class CheckpointReader:
    """Reads a checkpoint without the objects it was made of (``tf.train.CheckpointReader``).

    Args:
        path: the checkpoint.

    Attributes:
        content: of its index file.

    Raises:
        NotFoundError: there is no such checkpoint.
        DataLossError: it is damaged.
    """

    def __init__(self, path: str) -> None:
        self.path, self.content = path, files.read_index(path)
        self._facts: dict[str, dict[str, Any]] = self.content["tensors"]
        self._reader: TensorReader | None = None

    def get_variable_to_shape_map(self) -> dict[str, list[int]]:
        """The shape of each tensor by its name in the checkpoint, e.g. ``model/weight``."""
        return {name: list(facts["shape"]) for name, facts in self._facts.items()}

    def get_variable_to_dtype_map(self) -> dict[str, torch.dtype]:
        """The element type of each tensor by its name in the checkpoint."""
        return {name: getattr(torch, facts["dtype"]) for name, facts in self._facts.items()}

    def has_tensor(self, tensor_str: str) -> bool:
        """Whether there is a tensor of this name."""
        return tensor_str in self._facts

    def get_tensor(self, tensor_str: str) -> torch.Tensor:
        """One tensor, on the CPU.

        Args:
            tensor_str: its name, one of ``get_variable_to_shape_map()``.

        Raises:
            NotFoundError: there is none of this name.
            DataLossError: a file is damaged.

        Example:
            >>> load_checkpoint("job1").get_tensor("model/weight").shape
            torch.Size([1, 2])
        """
        return self.read([tensor_str])[tensor_str]

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Some tensors, on the CPU.

        Args:
            names: some of ``get_variable_to_shape_map()``.

        Returns:
            The tensors by name.

        Raises:
            NotFoundError: a name that the checkpoint does not have.
            DataLossError: a file is damaged.
        """
        if missing := [name for name in names if name not in self._facts]:
            raise NotFoundError(f"Checkpoint {self.path!r} has no tensor {missing}; it has {sorted(self._facts)}.")
        try:
            return self._tensors().read(names)
        except (NotFoundError, DataLossError):
            raise
        except Exception as error:
            files.verify(self.path, self.content)  # a damaged file is the likely reason
            raise DataLossError(
                f"Checkpoint {self.path!r} cannot be read: {error!r}. Its files are as they were written; restore an "
                "earlier checkpoint."
            ) from error

    def _tensors(self) -> TensorReader:
        if self._reader is None:
            folder = files.data_folder(self.path, self.content)
            try:
                reader = TensorReader(folder, self._facts)
            except FileNotFoundError as error:
                raise files.unreadable(self.path, folder, error) from error
            reader.check()
            self._reader = reader
        return self._reader

    def check(self) -> None:
        """Compares the index with the files' own list of tensors, whose checksums are right.

        Raises:
            DataLossError: they differ.
        """
        self._tensors()

    def state_dict(self, name: str) -> Any:
        """The state of one object, as its ``state_dict()`` was: for programs that do not use this package.

        The state of an optimizer has the names of the parameters in place of their numbers.

        Args:
            name: under which the object was given to ``Checkpoint``.

        Returns:
            What the object's ``load_state_dict`` takes.

        Raises:
            NotFoundError: there is no object of this name.

        Example:
            >>> model.load_state_dict(load_checkpoint("job1").state_dict("model"))
            <All keys matched successfully>
        """
        if name not in self.content["objects"]:
            raise NotFoundError(f"Checkpoint {self.path!r} has no {name!r}; it has {sorted(self.content['objects'])}.")
        tree = self.content["objects"][name]["tree"]
        tensors = self.read(codec.tensor_names(tree))
        return codec.decode(tree, tensors.__getitem__)


def load_checkpoint(ckpt_dir_or_file: str | os.PathLike[str]) -> CheckpointReader:
    """A reader of a checkpoint, or of the latest one of a folder (``tf.train.load_checkpoint``).

    Args:
        ckpt_dir_or_file: a folder, or a checkpoint's path.

    Raises:
        NotFoundError: there is none.
        DataLossError: it is damaged.

    Example:
        >>> load_checkpoint("job1").get_variable_to_shape_map()
        {'model/weight': [1, 2], 'model/bias': [1]}
    """
    path = os.fspath(ckpt_dir_or_file)
    if Path(path).is_dir():
        latest = latest_checkpoint(path)
        if latest is None:
            raise NotFoundError(
                f"There is no checkpoint in {path!r}: the folder has no file 'checkpoint' that names one. Give the "
                "folder that Checkpoint.save wrote to, or the path that it returned."
            )
        path = latest
    return CheckpointReader(path)


def list_variables(ckpt_dir_or_file: str | os.PathLike[str]) -> list[tuple[str, list[int]]]:
    """Names and shapes of the tensors (``tf.train.list_variables``); arguments as for ``load_checkpoint``.

    Raises:
        NotFoundError: there is no checkpoint.
        DataLossError: it is damaged.

    Example:
        >>> list_variables("job1")
        [('model/bias', [1]), ('model/weight', [1, 2])]
    """
    return sorted(load_checkpoint(ckpt_dir_or_file).get_variable_to_shape_map().items())


def load_variable(ckpt_dir_or_file: str | os.PathLike[str], name: str) -> torch.Tensor:
    """One tensor (``tf.train.load_variable``); arguments as for ``load_checkpoint`` and ``get_tensor``.

    Raises:
        NotFoundError: there is no checkpoint, or no such tensor in it.
        DataLossError: it is damaged.

    Example:
        >>> load_variable("job1", "model/bias").shape
        torch.Size([1])
    """
    return load_checkpoint(ckpt_dir_or_file).get_tensor(name)
