"""Datasets that list their files: lines of text, tar shards, or any reader of one file."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike, fspath
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, get_worker_info


@runtime_checkable
class ListsFiles(Protocol):
    """What ``AutoShardPolicy.FILE`` needs of a dataset.

    Attributes:
        files: all its files, in the same order on every worker.
    """

    @property
    def files(self) -> Sequence[Any]:
        """All files, in the same order on every worker."""

    def with_files(self, files: Sequence[Any]) -> Any:
        """The same dataset over some of the files.

        Args:
            files: a part of ``files``, perhaps empty.
        """


def read_lines(path: str) -> Iterator[str]:
    """The lines of a text file, without their line ends."""
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            yield line.rstrip("\r\n")


def read_tar(path: str) -> Iterator[dict[str, Any]]:
    """The samples of a tar shard as WebDataset writes them: neighbours with one base name make a sample.

    Args:
        path: of the tar file.

    Yields:
        ``{"__key__": base name, "jpg": bytes, "cls": bytes, ...}``.
    """
    sample: dict[str, Any] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, extension = name.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            if sample and sample["__key__"] != key:
                yield sample
                sample = {}
            content = archive.extractfile(member)
            sample.setdefault("__key__", key)
            sample[extension] = content.read() if content is not None else b""
    if sample:
        yield sample


class FileDataset(IterableDataset[Any]):
    """Samples of several files, one file after the other.

    In a ``DataLoader`` with ``num_workers`` the files are dealt out to its processes, so no sample is read twice.

    Args:
        files: paths, in the same order on every worker.
        read: yields the samples of one file: ``read_lines``, ``read_tar`` or a function of the user's.
        decode: turns a sample into what is collated, e.g. ``int`` or an image decoder.

    Example:
        >>> dataset = FileDataset(["a.txt", "b.txt"], decode=float)
        >>> batches = strategy.experimental_distribute_dataset(dataset, global_batch_size=64)
    """

    def __init__(
        self,
        files: Iterable[str | PathLike[str]],
        read: Callable[[str], Iterable[Any]] = read_lines,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        self.files: Sequence[str] = tuple(fspath(f) for f in files)
        self._read, self._decode = read, decode

    def with_files(self, files: Sequence[str]) -> FileDataset:
        """The same dataset over other files."""
        return FileDataset(files, self._read, self._decode)

    def __iter__(self) -> Iterator[Any]:
        process = get_worker_info()
        mine = self.files if process is None else self.files[process.id :: process.num_workers]
        for path in mine:
            samples = iter(self._read(path))
            yield from samples if self._decode is None else map(self._decode, samples)
