"""What an index file may hold: all of it is looked at before any of it is used."""

from __future__ import annotations

import re
from typing import Any

from tfstyle_dist.checkpoint import codec

_MOST_ELEMENTS = 1 << 62


def checked(content: Any, kind: str, version: int, folder: re.Pattern[str]) -> dict[str, Any]:
    """The content of an index file, if it is one.

    Args:
        content: what the file holds.
        kind: the format that is read.
        version: up to which version of it.
        folder: how the folder with the data may be called.

    Raises:
        ValueError: it is not; the message says why.
    """
    if not isinstance(content, dict):
        raise ValueError("it holds no object")
    if content.get("format") != kind or type(content.get("version")) is not int or content["version"] > version:
        raise ValueError(
            f"it has format {str(content.get('format'))[:80]!r}, version {str(content.get('version'))[:80]}"
        )
    data = content.get("data")
    if not isinstance(data, str) or not folder.fullmatch(data):
        raise ValueError(f"it names the folder {str(data)[:80]!r}")
    tensors, files, objects = (_group(content, name) for name in ("tensors", "files", "objects"))
    for name, facts in tensors.items():
        _check_tensor(name, facts)
    for name, facts in files.items():
        _check_file(name, facts)
    for name, about in objects.items():
        if not isinstance(about, dict) or not isinstance(about.get("kind"), str) or "tree" not in about:
            raise ValueError(f"the object {name!r} has no kind or no value")
        try:
            codec.check(about["tree"], tensors)
        except ValueError as error:
            raise ValueError(f"the object {name!r}: {error}") from None
    return content


def _group(content: dict[str, Any], name: str) -> dict[str, Any]:
    found = content.get(name)
    if not isinstance(found, dict):
        raise ValueError(f"its {name!r} are no object")
    return found


def _check_tensor(name: str, facts: Any) -> None:
    shape = facts.get("shape") if isinstance(facts, dict) else None
    sizes_fit = isinstance(shape, list) and all(type(size) is int and 0 <= size < _MOST_ELEMENTS for size in shape)
    if not sizes_fit or not codec.is_dtype(facts.get("dtype")):
        raise ValueError(f"the tensor {name!r} has no shape or no element type: {str(facts)[:80]}")


def _check_file(name: str, facts: Any) -> None:
    numbers = [facts.get(key) for key in ("bytes", "crc32")] if isinstance(facts, dict) else [None]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the file {name!r} has no size or no checksum: {str(facts)[:80]}")
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise ValueError(f"the file {name!r} is not in the folder of the data")
