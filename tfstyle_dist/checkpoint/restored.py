"""A checkpoint while objects take their state from it: what fits, what was taken, and what nobody took yet."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from tfstyle_dist.checkpoint import codec, files
from tfstyle_dist.checkpoint.leaves import Leaf, Match, Read, is_empty
from tfstyle_dist.checkpoint.on_servers import Restore
from tfstyle_dist.checkpoint.reader import CheckpointReader
from tfstyle_dist.core.errors import InvalidArgumentError

_BYTES_AT_A_TIME = 64 * 1024 * 1024


class Restored:
    """What objects have taken from a checkpoint so far.

    Args:
        reader: of the checkpoint.
        optional: names of objects that may be missing in it.

    Attributes:
        found: how the objects that have taken their state fit, by name.
        absent: names of objects that the checkpoint does not have.
    """

    def __init__(self, reader: CheckpointReader, optional: Collection[str] = ()) -> None:
        self.reader, self._optional = reader, frozenset(optional)
        self.objects: dict[str, Any] = reader.content["objects"]
        self.found: dict[str, Match] = {}
        self.absent: dict[str, None] = {}

    def match(self, leaves: Sequence[Leaf]) -> dict[str, Match]:
        """How objects fit that the checkpoint has.

        Raises:
            InvalidArgumentError: shapes, dtypes or kinds differ; the message lists them all.
        """
        facts = self.reader.content["tensors"]
        found, problems = {}, []
        for leaf in leaves:
            if leaf.path not in self.objects:
                continue
            kind = self.objects[leaf.path]["kind"]
            if kind != leaf.kind:
                problems.append(f"{leaf.path} is of kind {leaf.kind}, saved was a {kind}")
                continue
            found[leaf.path] = match = leaf.match(self.objects[leaf.path]["tree"], facts)
            problems += match.problems
        if problems:
            raise InvalidArgumentError("the objects do not fit: " + "; ".join(problems) + ".")
        return found

    def note(self, leaves: Iterable[Leaf], found: dict[str, Match]) -> None:
        """Keeps what objects have taken, and which of them the checkpoint does not have."""
        self.found.update(found)
        for leaf in leaves:
            if leaf.path not in self.found and leaf.path not in self._optional and not is_empty(leaf.target):
                self.absent[leaf.path] = None

    def reading(self) -> Read:
        """What reads tensors of it; ``servers.run()`` ends it."""
        content = self.reader.content
        return Read(self._pieces, Restore(files.data_folder(self.reader.path, content), content["tensors"]))

    def _pieces(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Reads so much at a time that memory for a whole model is not needed beside the model."""
        facts = self.reader.content["tensors"]
        piece: list[str] = []
        size = 0
        for name in dict.fromkeys(names):
            piece.append(name)
            numel = 1
            for length in facts[name]["shape"]:
                numel *= length
            size += numel * getattr(torch, facts[name]["dtype"]).itemsize
            if size >= _BYTES_AT_A_TIME:
                yield from self.reader.read(piece).items()
                piece, size = [], 0
        if piece:
            yield from self.reader.read(piece).items()

    def left(self) -> set[str]:
        """Names of what it has for objects that are not there yet; plain values are not among them."""
        left = self.objects.keys() - self.found.keys()
        return {path for path in left if self.objects[path]["kind"] not in ("counter", "value")}

    # ---- what came of it --------------------------------------------------------------------------------------

    @property
    def matched(self) -> int:
        """Number of objects that have taken their state."""
        return len(self.found.keys() - self._optional)

    @property
    def missing(self) -> tuple[str, ...]:
        """Objects, or parts of them, that the checkpoint does not have."""
        return (*self.absent, *(name for match in self.found.values() for name in match.missing))

    @property
    def unused(self) -> tuple[str, ...]:
        """What the checkpoint has and no object took."""
        used = {name for match in self.found.values() for name in match.used}
        unused: list[str] = []
        for path, about in self.objects.items():
            if path in self.found:
                unused += [name for name in codec.tensor_names(about["tree"]) if name not in used]
            elif about["kind"] != "counter" and not (about["kind"] == "value" and is_empty(about["tree"])):
                unused += codec.tensor_names(about["tree"]) or [path]
        return tuple(dict.fromkeys(unused))
