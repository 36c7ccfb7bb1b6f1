# SPDX-License-Identifier: Apache-2.0
"""Durable file steps: write, fsync, rename, directory sync.

Every function returns only after the kernel has been asked to make its effect durable. Files are 0600 and directories
0700: a snapshot is as sensitive as the Gym itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700

_AT_FDCWD: Final = -100
_RENAME_NOREPLACE: Final = 1


def make_dir(path: Path) -> None:
    """Create one directory and make its entry in the parent durable.

    Raises:
        FileExistsError: something is there already.
        OSError: it cannot be created.
    """
    path.mkdir(mode=DIRECTORY_MODE)
    sync_dir(path.parent)


def sync_dir(path: Path) -> None:
    """Make the entries of a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: bytes | Iterable[bytes]) -> int:
    """Write a new file and make its content durable; its entry in the directory is durable after ``sync_dir``.

    Args:
        path: where; nothing may be there yet.
        data: the content, or its parts in order.

    Returns:
        The number of bytes written.

    Raises:
        FileExistsError: something is there already.
        OSError: writing failed; what was written stays for the caller to remove.
    """
    parts = (data,) if isinstance(data, bytes) else data
    size = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        for part in parts:
            size += file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return size


def publish_file(path: Path, data: bytes, unnamed: Callable[[], None] = lambda: None) -> None:
    """Make a file appear whole or not at all: temporary file, fsync, rename, fsync of the directory.

    A file of that name is replaced. Only one writer at a time may publish to one path.

    Args:
        path: its name.
        data: its content.
        unnamed: called when it is complete and durable, and has a temporary name.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    write_file(temporary, data)
    unnamed()
    temporary.replace(path)
    sync_dir(path.parent)


def rename_noreplace(source: Path, destination: Path) -> None:
    """Rename a file or directory, never replacing, and make it durable in both parents.

    Raises:
        FileExistsError: something is at the destination; it is left alone.
        OSError: the file system cannot rename; with ``ENOTSUP`` it cannot do so without replacing.
    """
    code = _renameat2(source, destination)
    if code in (errno.EINVAL, errno.ENOSYS):
        _rename_checked(source, destination)
    elif code:
        raise OSError(code, os.strerror(code), str(source), None, str(destination))
    sync_dir(destination.parent)
    if source.parent != destination.parent:
        sync_dir(source.parent)


def _rename_checked(source: Path, destination: Path) -> None:
    """Rename where the kernel has no atomic form: a directory never replaces a non-empty one, so look, then rename.

    The window between the two calls is harmless for directories with content, which is all that is renamed this way.
    """
    if destination.exists() or destination.is_symlink():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(destination))
    if not source.is_dir():
        raise OSError(errno.ENOTSUP, "this file system cannot rename a file without replacing", str(source))
    source.rename(destination)


def _renameat2(source: Path, destination: Path) -> int:
    """Ask the kernel for a rename that never replaces; return 0 or the error number (``ENOSYS``: no such call)."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):  # Not Linux, or a C library without it.
        return errno.ENOSYS
    call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    failed = call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(destination), _RENAME_NOREPLACE)
    return ctypes.get_errno() if failed else 0
