# SPDX-License-Identifier: Apache-2.0
"""When a process with large state looks through all of its objects for garbage.

Nearly everything here is freed as soon as nobody refers to it; the garbage collector finds what refers to itself. Its
young collections cost next to nothing, as long as they come often. A full one looks at every object that lives: with
ten thousand rollouts some hundred milliseconds, at a time of its own choosing, while nobody is served.
``FullCollections`` takes over the choice: one when little is held, and else one per hour, which is then the longest
stall of that hour. What the process has loaded before its first call is never looked at again.

It shortens the time, too, for which a busy thread keeps the interpreter's lock while the event loop waits for it: five
milliseconds by default, and the loop gives the lock away several times within one call.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

LITTLE = 500
"""With at most this many rollouts a full collection takes a few milliseconds."""
LOOK_S = 10.0
YOUNG_S = 0.1
"""How often what is young is looked at. By itself that waits while much is freed, and then takes long at once."""
SWITCH_S = 0.0005
"""For how long a thread may keep the interpreter's lock when another one waits for it."""
EVERY_S = 3600.0
_NEVER = 2**31 - 1


class FullCollections:
    """Orders the full collections of this process for as long as ``follow`` runs.

    Only for a process that is a server of this kit and nothing else: the setting is that of the whole process.

    Args:
        held: how many rollouts are held now.
        busy: whether state that nobody holds is being built or freed now, as in a restore; little is held by a Gym
            that builds much.
        clock: monotonic seconds.
    """

    def __init__(
        self, held: Callable[[], int], busy: Callable[[], bool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._held = held
        self._busy = busy
        self._clock = clock
        self._last = clock()
        self._much = False
        self._waning = False

    async def follow(self) -> None:
        """Order them until cancelled; to be begun before the first call is served."""
        before, switch = gc.get_threshold(), sys.getswitchinterval()
        gc.set_threshold(before[0], before[1], _NEVER)
        sys.setswitchinterval(min(switch, SWITCH_S))
        gc.collect()
        gc.freeze()
        try:
            while True:
                for _ in range(round(LOOK_S / YOUNG_S)):
                    await asyncio.sleep(YOUNG_S)
                    gc.collect(1)
                self.look()
        finally:
            gc.unfreeze()
            gc.set_threshold(*before)
            sys.setswitchinterval(switch)

    def look(self) -> bool:
        """Collect if it is time; return whether it was."""
        little, now = self._held() <= LITTLE and not self._busy(), self._clock()
        # Not at the first look at which little is held: what was dropped just before may not be freed yet.
        due = now - self._last >= EVERY_S or (little and self._waning)
        self._waning, self._much = little and self._much, not little
        if due:
            found = gc.collect()
            self._last = self._clock()
            logger.info("a full collection took %.0f ms and found %d objects", (self._last - now) * 1000, found)
        return due
