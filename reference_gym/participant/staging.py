# SPDX-License-Identifier: Apache-2.0
"""Files of the ``http`` scheme: committed cuts that can be fetched, and uploads that a restore reads.

``cuts/<id>/`` holds committed cuts until another id opens; ``uploads/<id>/`` holds uploaded files until a restore
ended. The ids here name cuts; no order judges them (CKPT-ART-003). Everything in here is private to the
participant.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from reference_gym.participant.artifacts import MANIFEST, Durable
from reference_gym.participant.errors import ArgumentConflict, NotFound

logger = logging.getLogger(__name__)

_CHUNK = 1024 * 1024


class Upload:
    """One file that is being received; ``finish`` makes it appear whole."""

    def __init__(self, directory: Path, name: str) -> None:
        descriptor, path = tempfile.mkstemp(prefix=".upload-", dir=directory)
        self._file = os.fdopen(descriptor, "wb")
        self._path = Path(path)
        self._target = directory / name
        self.size = 0

    def write(self, data: bytes) -> None:
        """Take the next piece."""
        self.size += len(data)
        self._file.write(data)

    def finish(self, durable: Durable) -> None:
        """Make the file appear under its name.

        Raises:
            ArgumentConflict: other bytes are held under that name (CKPT-ART-008).
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        try:
            os.link(self._path, self._target)
        except FileExistsError:
            if not _same(self._path, self._target):
                raise ArgumentConflict(f"other bytes are held under {self._target.name}") from None
        finally:
            self.abandon()
        durable.sync_dir(self._target.parent)

    def abandon(self) -> None:
        """Leave nothing."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._path.unlink(missing_ok=True)


class Staging:
    """The private directory of the ``http`` scheme.

    Args:
        root: created if it is missing.
    """

    def __init__(self, root: Path) -> None:
        self._cuts = root.resolve() / "cuts"
        self._uploads = root.resolve() / "uploads"
        for directory in (self._cuts, self._uploads):
            directory.mkdir(parents=True, mode=0o700, exist_ok=True)

    def begin(self, kept: str | None = None) -> None:
        """Remove what an earlier process left, but for the cut that it had committed last.

        Args:
            kept: the id of that cut, where the incarnation is kept; None removes everything.
        """
        if kept is None:
            _empty(self._uploads)
        for entry in self._cuts.iterdir():
            if entry.name != kept:
                shutil.rmtree(entry, ignore_errors=True)

    def new_cut(self, checkpoint_id: str) -> Path:
        """Return the directory that a commit of this id writes into."""
        directory = self._cuts / checkpoint_id
        directory.mkdir(mode=0o700, exist_ok=True)
        return directory

    def uploaded(self, checkpoint_id: str) -> Path:
        """Return the directory of a cut that a restore reads: uploaded, or else committed here."""
        uploads = self._uploads / checkpoint_id
        return uploads if uploads.is_dir() else self._cuts / checkpoint_id

    def begin_upload(self, checkpoint_id: str, name: str) -> Upload:
        """Begin to receive a file of a cut."""
        directory = self._uploads / checkpoint_id
        directory.mkdir(mode=0o700, exist_ok=True)
        return Upload(directory, name)

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
        _empty(self._cuts)

    def forget_uploads(self) -> None:
        """Remove the uploads, because a restore has ended."""
        _empty(self._uploads)


def _empty(directory: Path) -> None:
    """Remove what can be removed; the rest goes the next time, for no phase and no gate may hang on it."""
    try:
        entries = list(directory.iterdir())
    except OSError as error:
        logger.warning("staged files remain for now: %s", error)
        return
    for entry in entries:
        shutil.rmtree(entry, ignore_errors=True)


def _same(first: Path, second: Path) -> bool:
    with first.open("rb") as one, second.open("rb") as other:
        while True:
            left, right = one.read(_CHUNK), other.read(_CHUNK)
            if left != right:
                return False
            if not left:
                return True
