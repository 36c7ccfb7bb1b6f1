# SPDX-License-Identifier: Apache-2.0
"""Time that runs only while the gate is open."""

from __future__ import annotations

import asyncio

from reference_gym.participant.clock import LoopClock
from reference_gym.participant.gate import Gate, Position
from reference_gym.participant.opentime import OpenTime


async def test_time_stands_still_while_the_gate_is_closed() -> None:
    """CKPT-GATE-016: neither closing nor sealed counts, and moves between two looks are not lost."""
    now = [100.0]
    gate = Gate(LoopClock())
    clock = OpenTime(gate, lambda: now[0])
    following = asyncio.create_task(clock.follow())
    await asyncio.sleep(0)
    start = clock.now()
    for position, seconds in (
        (Position.CLOSING, 5),
        (Position.SEALED, 7),
        (Position.OPEN, 2),
        (Position.SEALED, 11),
        (Position.OPEN, 1),
    ):
        gate.move(position)
        await asyncio.sleep(0)
        now[0] += seconds
    assert 3 == clock.now() - start
    following.cancel()
