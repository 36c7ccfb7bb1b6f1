# SPDX-License-Identifier: Apache-2.0
"""One commit: the capture that it holds, and the writing of it, which can fail and be repeated."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from reference_gym.participant.artifacts import Durable, Target, WriteStopped, Written, write_cut
from reference_gym.participant.clock import Clock
from reference_gym.participant.config import ParticipantConfig
from reference_gym.participant.errors import (
    DeadlineExceeded,
    InsufficientStorage,
    Internal,
    ProtocolError,
    StaleCheckpoint,
)
from reference_gym.participant.records import Cut, IndexState

logger = logging.getLogger(__name__)

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def shared_future() -> asyncio.Future[Any]:
    """Return a future that several calls wait for; nobody has to."""
    future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.exception())
    return future


@dataclass(slots=True)
class Commit:
    """What the open checkpoint's commit holds from its capture on.

    ``outcome`` is the future of the present try to write: it gets ``Written``, or the error of the failure.
    """

    checkpoint_id: str
    run_id: str
    cut: Cut
    target: Target
    stop: threading.Event = field(default_factory=threading.Event)
    outcome: asyncio.Future[Written] = field(default_factory=shared_future)
    written: Written | None = None
    counts: Mapping[IndexState, int] = field(init=False)

    def __post_init__(self) -> None:
        self.counts = self.cut.counts  # They are told for longer than the cut is held.

    def renew(self) -> None:
        """Begin another try to write, with an outcome of its own."""
        self.stop = threading.Event()
        self.outcome = shared_future()

    def abandon(self) -> None:
        """Stop writing, and answer at once whoever waits for it (CKPT-PHASE-005)."""
        self.stop.set()
        if not self.outcome.done():
            self.outcome.set_exception(StaleCheckpoint(f"checkpoint {self.checkpoint_id} has ended"))


class Writer:
    """Writes cuts on one thread, one at a time.

    Args:
        config: the participant's.
        owns: what it owns.
        durable: the durable file steps.
        clock: for ``max_write_ms``.
    """

    def __init__(
        self, config: ParticipantConfig, owns: Callable[[], Iterable[str]], durable: Durable, clock: Clock
    ) -> None:
        self._config = config
        self._owns = owns
        self._durable = durable
        self._clock = clock
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="cut-writer")

    async def write(self, commit: Commit) -> Written:
        """Write the cut of a commit; returns or raises only after the thread has stopped touching the target.

        Raises:
            InsufficientStorage: there is no room (CKPT-ERR-031).
            DeadlineExceeded: it took longer than ``max_write_ms`` (CKPT-COMMIT-030).
            WriteStopped: it was told to stop.
            ForbiddenTarget: the target was replaced meanwhile.
            Internal: the system refused it for another reason.
        """
        late = False

        def too_long() -> None:
            nonlocal late
            late = True
            commit.stop.set()

        timer = self._clock.call_at(self._clock.now() + self._config.limits.max_write_ms / 1000, too_long)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread,
                write_cut,
                commit.cut,
                commit.target,
                self._config,
                tuple(self._owns()),
                commit.run_id,
                commit.checkpoint_id,
                self._durable,
                commit.stop,
            )
        except WriteStopped:
            if late:
                limit = self._config.limits.max_write_ms
                raise DeadlineExceeded(f"writing took longer than max_write_ms {limit}") from None
            raise
        except ProtocolError:
            raise
        except OSError as error:
            raise write_error(error) from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """Let the thread end when its work is done."""
        self._thread.shutdown(wait=False)


def write_error(error: OSError) -> ProtocolError:
    """Return what a failed write means to the controller."""
    if error.errno in _NO_SPACE:
        return InsufficientStorage("there is no room to write the cut; it is kept and can be written again")
    logger.error("writing failed: %s", error)
    name = errno.errorcode.get(error.errno or 0, "an unknown error")
    return Internal(f"writing failed with {name}")
