"""``torch.distributed.checkpoint`` writes and reads the tensors; the only module that imports it.

Each worker writes a part of its own, without communication; worker 0 then joins the parts' metadata, so that the whole
folder is one checkpoint of ``torch.distributed.checkpoint``, which plain ``torch.distributed.checkpoint.load`` reads.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tfstyle_dist.checkpoint import files
from tfstyle_dist.core.errors import DataLossError

METADATA_FILE = ".metadata"


def write_part(directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes one worker's tensors into a folder of their own, and waits until they are on the disk.

    Args:
        directory: is made if it does not exist.
        tensors: by name; on any device.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner

    writer = _writer(directory)
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    _write(directory, writer, planner, plans, metadata)


def _writer(directory: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemWriter

    # Copying ahead waits for the current device's stream alone: from another device it would write unfinished copies.
    return FileSystemWriter(directory, sync_files=True, per_thread_copy_ahead=0)


def _write(directory: Path, writer: Any, planner: Any, plans: Any, metadata: Any) -> None:
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    try:
        written = writer.write_data(plan, planner)
        written.wait()
        writer.finish(metadata, [written.value()])
    except RuntimeError as error:
        raise _cause(error, directory) from error


@dataclasses.dataclass
class Piece:
    """Some rows of a tensor.

    Attributes:
        name: of the tensor.
        tensor: the rows.
        start: the first row.
        shape: of the whole tensor.
    """

    name: str
    tensor: torch.Tensor
    start: int
    shape: tuple[int, ...]

    def offsets(self) -> tuple[int, ...]:
        """Where the rows begin in the whole tensor."""
        return (self.start, *[0] * (len(self.shape) - 1)) if self.shape else ()


def write_pieces(directory: Path, pieces: Sequence[Piece]) -> None:
    """Writes rows of tensors into a folder of their own; the other rows are in other parts of the checkpoint.

    Args:
        directory: is made if it does not exist.
        pieces: the rows, on the CPU.

    Raises:
        OSError: the disk is full, or cannot be written to.
    """
    from torch.distributed.checkpoint import DefaultSavePlanner, SavePlan
    from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    known = {(piece.name, piece.offsets()): piece.tensor for piece in pieces}

    class Planner(DefaultSavePlanner):
        def resolve_data(self, write_item: Any) -> Any:
            return known[write_item.index.fqn, tuple(write_item.index.offset)]

    items = []
    for piece in pieces:
        offsets = torch.Size(piece.offsets())
        items.append(
            WriteItem(
                index=MetadataIndex(piece.name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=piece.tensor.shape),
                    properties=TensorProperties.create_from_tensor(piece.tensor),
                    size=torch.Size(piece.shape),
                ),
            )
        )
    writer, planner = _writer(directory), Planner()
    writer.set_up_storage_writer(True)
    plan = writer.prepare_local_plan(SavePlan(items))
    _write(directory, writer, planner, *create_default_global_save_plan([plan]))


def read_rows(
    directory: Path, name: str, shape: Sequence[int], dtype: str, rows: tuple[int, int] | None
) -> torch.Tensor:
    """Reads some rows of a tensor.

    Args:
        directory: a folder that ``join_parts`` completed.
        name: of the tensor.
        shape: of the whole tensor.
        dtype: of the tensor, e.g. ``"float32"``.
        rows: the first one and how many; ``None``: the whole tensor.
    """
    from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    start, count = (0, shape[0] if shape else 1) if rows is None else rows
    size = torch.Size([count, *shape[1:]] if shape else [])
    target = torch.empty(size, dtype=getattr(torch, dtype), device="cpu")

    class Planner(DefaultLoadPlanner):
        def lookup_tensor(self, index: Any) -> torch.Tensor:
            return target

    reader, planner = FileSystemReader(directory), Planner()
    metadata = reader.read_metadata()
    offsets = torch.Size([start, *[0] * (len(shape) - 1)] if shape else [])
    wanted: Any = metadata.state_dict_metadata[name]
    items = create_read_items_for_chunk_list(name, wanted, [ChunkStorageMetadata(offsets=offsets, sizes=size)])
    reader.set_up_storage_reader(metadata, True)
    reader.read_data(reader.prepare_local_plan(LoadPlan(items)), planner).wait()
    return target


def _cause(error: RuntimeError, directory: Path) -> Exception:
    """What the operating system said: torch.save closes its archive after a failed write, and that fails too."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return OSError(inner.errno, inner.strerror, str(directory))
        inner = inner.__cause__ or inner.__context__
    return error


def finish_part(part: Path, facts: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Says beside a part that it is complete: its files with their checksums, and what is told of its tensors.

    Args:
        part: its folder.
        facts: of the tensors, by name.
        own: what objects have on this worker alone.
    """
    written = [file for file in sorted(part.iterdir()) if file.name != METADATA_FILE]
    listing = {f"{part.name}/{file.name}": files.fingerprint(file) for file in written}
    files.sync_folder(part)
    about = {"files": listing, "tensors": facts, "own": own}
    files.write_atomically(part.with_suffix(".json"), json.dumps(about))


def join_parts(directory: Path, parts: Sequence[str]) -> None:
    """Makes one checkpoint of the parts in a folder.

    Args:
        directory: the folder.
        parts: the folders of the workers' parts in it.
    """
    from torch.distributed.checkpoint import FileSystemReader, Metadata
    from torch.distributed.checkpoint.storage import WriteResult

    everything: dict[str, Any] = {}
    results = []
    for part in parts:
        metadata = FileSystemReader(directory / part).read_metadata()
        for name, about in metadata.state_dict_metadata.items():
            known = everything.setdefault(name, about)
            if known is not about:
                known.chunks.extend(getattr(about, "chunks", ()))  # other rows of the same tensor
        for index, info in metadata.storage_data.items():
            moved = dataclasses.replace(info, relative_path=f"{part}/{info.relative_path}")
            results.append(WriteResult(index=index, size_in_bytes=info.length, storage_data=moved))
    joined = Metadata(state_dict_metadata=everything, planner_data={name: (name,) for name in everything})
    _writer(directory).finish(joined, [results])
    for part in parts:
        (directory / part / METADATA_FILE).unlink()


class TensorReader:
    """Reads tensors by name.

    Args:
        directory: a folder that ``join_parts`` completed.
        facts: shape and dtype of each tensor, as the index file has them.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Mapping[str, Any]]) -> None:
        from torch.distributed.checkpoint import FileSystemReader

        self._directory, self._facts = directory, facts
        self._metadata = FileSystemReader(directory).read_metadata()

    def check(self) -> None:
        """Compares the facts with what was written.

        Raises:
            DataLossError: a tensor is not there, or has another shape or element type.
        """
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        for name, facts in self._facts.items():
            about = self._metadata.state_dict_metadata.get(name)
            found = None
            if isinstance(about, TensorStorageMetadata):
                found = list(about.size), str(about.properties.dtype).removeprefix("torch.")
            if found != (facts["shape"], facts["dtype"]):
                raise DataLossError(
                    f"The index has the tensor {name!r} with shape {facts['shape']} and {facts['dtype']}; in "
                    f"{self._directory} it has {'no such tensor' if found is None else found}."
                )

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors, on the CPU.

        Args:
            names: of tensors in the checkpoint.
        """
        from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader

        wanted: dict[str, Any] = {name: self._empty(self._facts[name]) for name in names}
        reader = FileSystemReader(self._directory)
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(wanted, self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = planner.finish_plan(reader.prepare_global_plan(planner.create_global_plan([plan]))[0])
        reader.read_data(plan, planner).wait()
        return wanted

    @staticmethod
    def _empty(facts: Mapping[str, Any]) -> torch.Tensor:
        return torch.empty(facts["shape"], dtype=getattr(torch, facts["dtype"]), device="cpu")
