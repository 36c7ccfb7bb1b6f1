# SPDX-License-Identifier: Apache-2.0
"""The directories that a controller names: inside a configured root, and the same one from first to last.

A path is judged once and used for as long as the writing or reading takes. Whoever may rename in a root could put a
link in its place meanwhile; so the directory is held open, and everything in it is reached through what is held.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from reference_gym.participant.errors import ForbiddenTarget

_REFUSED = "the path does not resolve to an existing directory inside a configured root"


def confine(path: str, roots: Iterable[Path]) -> Path:
    """Return the directory that a path names, links followed.

    Args:
        path: an absolute path, as the controller sent it.
        roots: the configured roots.

    Raises:
        ForbiddenTarget: it is no existing directory inside a root (CKPT-ERR-029).
    """
    given = Path(path)
    if not given.is_absolute() or ".." in given.parts or "\0" in path:
        raise ForbiddenTarget(_REFUSED)
    try:
        resolved = given.resolve(strict=True)
        inside = any(resolved.is_relative_to(root.resolve()) for root in roots)
        if not inside or not resolved.is_dir():
            raise ForbiddenTarget(_REFUSED)
    except (OSError, RuntimeError) as error:
        raise ForbiddenTarget(_REFUSED) from error
    return resolved


class Held:
    """A directory that is held open.

    Args:
        directory: as `confine` returned it.
        descriptor: the open directory.
    """

    def __init__(self, directory: Path, descriptor: int) -> None:
        self._directory = directory
        self._descriptor = descriptor
        by_descriptor = Path(f"/proc/self/fd/{descriptor}")
        self.path = by_descriptor if by_descriptor.is_dir() else directory

    def verify(self) -> None:
        """Require that the path still names what is held (CKPT-SEC-011).

        Raises:
            ForbiddenTarget: something else is there now, or nothing, or a link leads there.
        """
        try:
            there = self._directory.resolve(strict=True)
            same = there == self._directory and os.path.samestat(there.stat(), os.fstat(self._descriptor))
        except (OSError, RuntimeError) as error:
            raise ForbiddenTarget(_REFUSED) from error
        if not same:
            raise ForbiddenTarget(_REFUSED)


@contextlib.contextmanager
def hold(directory: Path) -> Iterator[Held]:
    """Hold a directory open; what is reached through its ``path`` lies in it, whatever becomes of its name.

    Args:
        directory: as `confine` returned it.

    Raises:
        ForbiddenTarget: it is no longer what was resolved (CKPT-SEC-011).
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ForbiddenTarget(_REFUSED) from error
    try:
        held = Held(directory, descriptor)
        held.verify()
        yield held
    finally:
        os.close(descriptor)
