"""The files of a checkpoint, and how they come and go so that a crash at any moment loses none.

A checkpoint ``ckpt-7`` is the file ``ckpt-7.index`` and the folder that this file names, ``ckpt-7.data-<token>``. The
folder is written as ``ckpt-7.data-<token>.tmp`` and renamed when it is complete. The checkpoint exists from the moment
the index file gets its name. The file ``checkpoint`` says which one is the latest.
"""

from __future__ import annotations

import glob
import json
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tfstyle_dist.checkpoint import index_content
from tfstyle_dist.core import json_text
from tfstyle_dist.core.errors import DataLossError, NotFoundError

FORMAT = "tfstyle_dist checkpoint"
VERSION = 1
_LEFT_SECONDS = 3600
INDEX, DATA, UNFINISHED = ".index", ".data-", ".tmp"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_SEPARATORS = re.escape(f"{os.sep}{os.altsep or ''}")
_FOLDER = re.compile(rf"[^{_SEPARATORS}\0]*{re.escape(DATA)}[0-9a-f]+")


def check_local(path: str) -> None:
    """Raises ValueError for a URL, which would be a folder of that name on this machine."""
    if _URL.match(path):
        raise ValueError(
            f"{path!r} is a URL, and checkpoints are written to folders. Mount what it names, as a file system that "
            "can rename folders, and give the path of the mounted folder, the same on all workers."
        )


def sync_folder(directory: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, text: str, shared: bool = False) -> None:
    """Gives ``path`` this content in one step: whoever reads it finds the old or the new one.

    Args:
        path: the file.
        text: its content.
        shared: whether other programs and threads may write it at the same time, as the list of a folder's checkpoints.
    """
    temporary = path.with_name(f"{path.name}{f'-{secrets.token_hex(4)}' if shared else ''}{UNFINISHED}")
    if shared:
        _remove_old(path)
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _remove_old(path: Path) -> None:
    """What writers of ``path`` that were killed left behind: nobody writes a small file for an hour."""
    for left in path.parent.glob(f"{glob.escape(path.name)}-*{UNFINISHED}"):
        with suppress(OSError):
            if time.time() - left.stat().st_mtime > _LEFT_SECONDS:
                left.unlink()


def fingerprint(path: Path) -> dict[str, int]:
    """Size and checksum of a file."""
    checksum, size = 0, 0
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    return {"bytes": size, "crc32": checksum}


# ---- the index file -----------------------------------------------------------------------------------------------


def index_file(path: str) -> Path:
    """The index file of a checkpoint."""
    return Path(f"{path}{INDEX}")


def write_index(path: str, content: Mapping[str, Any]) -> None:
    """Makes a checkpoint exist."""
    text = json.dumps({"format": FORMAT, "version": VERSION, **content})
    write_atomically(index_file(path), f'{{"crc32": {zlib.crc32(text.encode())}, "content":\n{text}}}\n')


def read_index(path: str) -> dict[str, Any]:
    """The content of an index file.

    Raises:
        NotFoundError: there is no such checkpoint; the message lists what is there.
        DataLossError: the file is damaged, or was not written by this package.
        ValueError: the path is a URL.
    """
    check_local(path)
    file = index_file(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise NotFoundError(f"There is no checkpoint {path!r}: {_what_is_there(Path(path).parent)}.") from None
    except UnicodeDecodeError as error:
        raise DataLossError(f"The index file {file} is damaged: {error}.") from error
    first, _, rest = text.partition("\n")
    found = re.fullmatch(r'\{"crc32": ([0-9]{1,10}), "content":', first)
    body = rest.removesuffix("\n").removesuffix("}")
    if found is None or zlib.crc32(body.encode()) != int(found[1]):
        raise DataLossError(
            f"The index file {file} is damaged: {len(text)} characters that are not what was written. "
            "Restore an earlier checkpoint."
        )
    try:
        return index_content.checked(json_text.parse(body), FORMAT, VERSION, _FOLDER)
    except ValueError as error:
        raise DataLossError(
            f"The index file {file} cannot be used: {error}. This package reads {FORMAT!r} up to version {VERSION}; "
            f"the data of a checkpoint are beside its index, in a folder such as {Path(path).name}{DATA}0a1b2c. "
            "Restore an earlier checkpoint."
        ) from None


def _what_is_there(directory: Path) -> str:
    if not directory.is_dir():
        return f"{str(directory)!r} is no folder"
    names = sorted(file.name.removesuffix(INDEX) for file in directory.glob(f"*{INDEX}"))
    return f"{str(directory)!r} holds {', '.join(names)}" if names else f"{str(directory)!r} holds no checkpoint"


def data_folder(path: str, content: Mapping[str, Any]) -> Path:
    """Where the tensors of a checkpoint are."""
    return Path(path).parent / str(content["data"])


def verify(path: str, content: Mapping[str, Any], share: int = 0, of: int = 1) -> None:
    """Compares the files of a checkpoint with their checksums.

    Args:
        path: the checkpoint.
        content: of its index file.
        share: which of ``of`` shares of the files to read; the sizes of all are looked at.
        of: number of shares, so that several workers can divide the reading.

    Raises:
        DataLossError: a file is missing, or not what was written.
    """
    folder = data_folder(path, content)
    for number, (name, expected) in enumerate(sorted(content["files"].items())):
        file = folder / name
        try:
            size = file.stat().st_size
            found = fingerprint(file) if number % of == share and size == expected["bytes"] else None
        except OSError as error:
            raise unreadable(path, file, error) from error
        if size != expected["bytes"]:
            raise DataLossError(
                f"Checkpoint {path!r} is damaged: {file} has {size} bytes, {expected['bytes']} were written."
            )
        if found not in (None, expected):
            raise DataLossError(f"Checkpoint {path!r} is damaged: the checksum of {file} is wrong.")


def unreadable(path: str, file: Path, error: OSError) -> NotFoundError | DataLossError:
    """What to raise when a file of a checkpoint cannot be read: the checkpoint may have been deleted meanwhile."""
    if isinstance(error, FileNotFoundError) and not index_file(path).exists():
        return NotFoundError(
            f"Checkpoint {path!r} was deleted while it was read: {_what_is_there(Path(path).parent)}. Whoever writes "
            "it keeps too few: let its manager keep more (max_to_keep), or restore a newer one."
        )
    return DataLossError(f"Checkpoint {path!r} is damaged: {file} cannot be read ({error}).")


# ---- coming and going ---------------------------------------------------------------------------------------------


def new_folder(path: str, token: str) -> Path:
    """The folder in which a checkpoint is written."""
    return Path(f"{path}{DATA}{token}{UNFINISHED}")


def publish(folder: Path, path: str, content: Mapping[str, Any]) -> None:
    """Turns a complete folder into the checkpoint ``path``, replacing an older one of that name.

    Args:
        folder: from ``new_folder``, with everything in it on the disk.
        path: the checkpoint.
        content: for the index file, without the name of the folder.
    """
    before = None
    if index_file(path).exists():
        with suppress(DataLossError):
            before = read_index(path).get("data")
    sync_folder(folder)
    final = folder.with_name(folder.name.removesuffix(UNFINISHED))
    folder.rename(final)
    try:
        sync_folder(final.parent)
        write_index(path, {"data": final.name, **content})
    except OSError:
        if not _in_use(Path(path), final.name):
            shutil.rmtree(final, ignore_errors=True)
        raise
    if before is not None:
        shutil.rmtree(final.with_name(before), ignore_errors=True)


def remove_checkpoint(path: str) -> None:
    """Deletes a checkpoint, its name first: half of a deletion leaves no half of a checkpoint."""
    file = index_file(path)
    folder = None
    with suppress(DataLossError, NotFoundError):
        folder = data_folder(path, read_index(path))
    file.unlink(missing_ok=True)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        remove_leftovers(path)


def remove_leftovers(path: str, numbered: bool = False, under_way: Collection[Path] = ()) -> None:
    """Deletes what interrupted saves of ``path`` left behind.

    Args:
        path: a checkpoint.
        numbered: whether ``dir/ckpt-7`` stands for all ``dir/ckpt-<number>``, which are the program's own.
        under_way: folders that are being written now, from ``new_folder``; they stay, renamed or not.
    """
    directory, name = Path(path).parent, re.escape(Path(path).name)
    if numbered:
        name = re.escape(re.sub(r"-\d+$", "", Path(path).name)) + r"(-\d+)?"
    pattern = re.compile(rf"(?P<name>{name}){re.escape(DATA)}[0-9a-f]+(?P<unfinished>{re.escape(UNFINISHED)})?")
    for entry in list(directory.iterdir()):
        found = pattern.fullmatch(entry.name)
        if not found or {entry, entry.with_name(f"{entry.name}{UNFINISHED}")} & set(under_way):
            continue
        if found["unfinished"] or not _in_use(directory / found["name"], entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def _in_use(path: Path, folder: str) -> bool:
    """Whether a checkpoint has this folder, or has an index that cannot tell."""
    try:
        return bool(read_index(str(path))["data"] == folder)
    except NotFoundError:
        return False
    except DataLossError:
        return True
