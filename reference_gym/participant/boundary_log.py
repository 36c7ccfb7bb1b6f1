# SPDX-License-Identifier: Apache-2.0
"""The boundary log for an author: with it a participant comes back from SIGKILL as the one that it was.

Three lines in the author's start::

    log = BoundaryLog(data_dir / "log")
    participant = Participant(config, agent=agent, journal=log.journal)
    sessions = Sessions(participant, load=..., contained=...)          # and every other part
    await log.open(participant)                                        # before the first call is served
    server = await serve_aiohttp.start(app)
    participant.go_on()                                                # rollouts of the earlier life go on

What it costs and what it does not cover stands in the chapter of the documentation about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from reference_gym.participant.core import Core
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile
from reference_gym.participant.log_writer import SEGMENT_BYTES
from reference_gym.participant.recovery import open_log


class BoundaryLog:
    """The log of one participant.

    Args:
        directory: of this log alone; made if it is missing, and never shared or copied into place.
        sync: ``commit``: it survives the process; ``group``: also the machine, for one sync per group of boundaries.
        segment_bytes: when a segment has this size, the next one begins.
    """

    def __init__(
        self, directory: Path, *, sync: Literal["commit", "group"] = "commit", segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.journal = LogJournal()
        self._directory = directory
        self._sync = sync
        self._segment_bytes = segment_bytes

    async def open(self, participant: Core) -> bool:
        """Recover what an earlier process left, and begin to write; return whether the incarnation is kept.

        Args:
            participant: was made with ``journal``, has all its parts, and serves nothing yet.

        Raises:
            ValueError: the participant was made with another journal, so that nothing of it would be written here.
            BlockingIOError: another process writes this log.
            OSError: the directory cannot be used.
        """
        if participant.journal is not self.journal:
            raise ValueError("the participant writes no log: make it with Participant(…, journal=log.journal)")
        log = LogFile.claim(self._directory, sync=self._sync, segment_bytes=self._segment_bytes)
        if log is None:
            raise BlockingIOError(f"another process writes the boundary log in {self._directory}")
        return await open_log(participant, self.journal, log)
