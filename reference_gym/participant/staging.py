# SPDX-License-Identifier: Apache-2.0
"""Files of the ``http`` scheme: committed cuts that can be fetched, and uploads that a restore reads.

``cuts/<id>/`` holds committed cuts until another id opens; ``uploads/<id>/`` holds uploaded files until a restore
ended; ``trash/`` holds what is about to be removed. The ids here name cuts; no order judges them (CKPT-ART-003).
Everything in here is private to the participant.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Iterable
from itertools import count
from pathlib import Path

from reference_gym.participant import failpoints
from reference_gym.participant.artifacts import MANIFEST, Durable
from reference_gym.participant.config import Limits
from reference_gym.participant.errors import ArgumentConflict, InsufficientStorage, NotFound
from spec.durable import rename_noreplace

logger = logging.getLogger(__name__)

_CHUNK = 1024 * 1024
_UNNAMED = ".upload-"
"""How the name of a file begins that has not been received whole."""
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class Room:
    """How much is uploaded, and how much may be; an upload that is under way counts as far as it has come.

    Args:
        most: files.
        most_bytes: their bytes together.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self.count = self.size = 0

    def take(self, count: int, size: int) -> None:
        """Count more; raises ``InsufficientStorage`` (CKPT-ART-015)."""
        if self.count + count > self._most or self.size + size > self._most_bytes:
            raise InsufficientStorage("as much is uploaded as is kept; a restore frees it")
        self.count += count
        self.size += size

    def give_back(self, count: int, size: int) -> None:
        """Count less."""
        self.count -= count
        self.size -= size


class Upload:
    """One file that is being received; ``finish`` makes it appear whole, ``abandon`` is called in any case.

    Args:
        directory: of its cut; made if it is missing, and removed if it stays empty.
        name: under which the file appears.
        room: where it is counted.
    """

    def __init__(self, directory: Path, name: str, room: Room) -> None:
        room.take(1, 0)
        self._room = room
        self._counted = 1
        self.size = 0
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            descriptor, path = tempfile.mkstemp(prefix=_UNNAMED, dir=directory)
        except OSError:
            room.give_back(1, 0)
            raise
        self._file = os.fdopen(descriptor, "wb")
        self._path = Path(path)
        self._target = directory / name
        self._kept = False

    def write(self, data: bytes) -> None:
        """Take the next piece; raises ``InsufficientStorage``."""
        self._room.take(0, len(data))
        self.size += len(data)
        self._file.write(data)

    def finish(self, durable: Durable) -> None:
        """Make the file appear under its name; runs on a thread.

        Raises:
            ArgumentConflict: other bytes are held under that name (CKPT-ART-008).
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        failpoints.reach("upload.unnamed")
        try:
            _appear(self._path, self._target)
            self._kept = True
        except FileExistsError:
            if not _same(self._path, self._target):
                raise ArgumentConflict(f"other bytes are held under {self._target.name}") from None
        durable.sync_dir(self._target.parent)

    def abandon(self) -> None:
        """Leave nothing but what has appeared."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)
        if not self._kept and self._counted:
            self._room.give_back(self._counted, self.size)
            self._counted = 0
            with contextlib.suppress(OSError):  # It holds other files, or is gone.
                self._target.parent.rmdir()


class Staging:
    """The private directory of the ``http`` scheme.

    Args:
        root: created if it is missing.
        limits: how much may be uploaded.
    """

    def __init__(self, root: Path, limits: Limits) -> None:
        self._cuts = root.resolve() / "cuts"
        self._uploads = root.resolve() / "uploads"
        self._trash = root.resolve() / "trash"
        for directory in (self._cuts, self._uploads, self._trash):
            directory.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._removed = count()
        self._limits = limits
        self._room = self._measured()

    def begin(self) -> None:
        """Begin empty, with a new incarnation: it holds nothing of an earlier one (CKPT-ART-002, CKPT-ART-009)."""
        _remove(self._trash.iterdir())
        self.forget_cuts()
        self.forget_uploads()

    def go_on(self) -> None:
        """Hold what an earlier process of this incarnation held, and remove what was unfinished when it ended."""
        _remove(self._trash.iterdir())
        for unfinished in self._uploads.glob(f"*/{_UNNAMED}*"):
            unfinished.unlink()
        self._room = self._measured()
        _remove(entry for entry in self._cuts.iterdir() if not (entry / MANIFEST).is_file())

    def new_cut(self, checkpoint_id: str) -> Path:
        """Return the directory that a commit of this id writes into."""
        directory = self._cuts / checkpoint_id
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def uploaded(self, checkpoint_id: str) -> Path:
        """Return the directory of an uploaded cut (CKPT-ART-011): one committed here goes when the restore opens."""
        return self._uploads / checkpoint_id

    def begin_upload(self, checkpoint_id: str, name: str) -> Upload:
        """Begin to receive a file of a cut; raises ``InsufficientStorage``."""
        return Upload(self._uploads / checkpoint_id, name, self._room)

    def find(self, checkpoint_id: str, name: str) -> Path:
        """Return the path of a committed or uploaded file.

        Raises:
            NotFound: there is none, or its cut is not committed (CKPT-ART-004).
        """
        committed = self._cuts / checkpoint_id
        if (committed / MANIFEST).is_file() and (committed / name).is_file():
            return committed / name
        if (self._uploads / checkpoint_id / name).is_file():
            return self._uploads / checkpoint_id / name
        raise NotFound(f"there is no artifact {name} of checkpoint {checkpoint_id}")

    def forget_cuts(self) -> None:
        """Remove the committed cuts, because another id has opened."""
        self._empty(self._cuts)

    def forget_uploads(self) -> None:
        """Remove the uploads, because a restore has ended."""
        self._empty(self._uploads)
        self._room = self._measured()  # What is under way still gives back to the one before.

    def _empty(self, directory: Path) -> None:
        """Move away what can be moved, and remove it on a thread: large files take long, and a gate waits for this.

        The rest goes the next time, for no phase and no gate may hang on it.
        """
        gone: list[Path] = []
        try:
            for entry in list(directory.iterdir()):
                entry.rename(aside := self._trash / f"{next(self._removed)}")
                gone.append(aside)
        except OSError as error:
            logger.warning("staged files remain for now: %s", error)
        if gone:
            threading.Thread(target=_remove, args=(gone,), name="staged files").start()

    def _measured(self) -> Room:
        room = Room(self._limits.max_artifacts, self._limits.max_artifacts_bytes)
        for path in self._uploads.rglob("*"):
            if path.is_file():
                room.give_back(-1, -path.stat().st_size)
        return room


def _appear(path: Path, target: Path) -> None:
    """Give a file its name, never replacing: by a link, or by a rename where the file system has no links.

    Raises:
        FileExistsError: something has that name.
        OSError: the file system can do neither.
    """
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        rename_noreplace(path, target)


def _remove(directories: Iterable[Path]) -> None:
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _same(first: Path, second: Path) -> bool:
    with first.open("rb") as one, second.open("rb") as other:
        while True:
            left, right = one.read(_CHUNK), other.read(_CHUNK)
            if left != right:
                return False
            if not left:
                return True
