# SPDX-License-Identifier: Apache-2.0
"""Cuts of a boundary log share its segments, all but each so many: damage to one segment never damages all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reference_gym.participant import Participant, ParticipantConfig, Sessions
from reference_gym.participant.journal import LogJournal
from reference_gym.participant.log import LogFile
from reference_gym.participant.recovery import open_log
from tests.gym.participant.kit import ENVIRONMENTS, Counter, Gym, World

EVERY = 3


async def test_each_so_many_cuts_one_shares_nothing_with_the_log(tmp_path: Path) -> None:
    """C41's other half: every third one is written out; every one of them is read back whole."""
    gym, journal = Gym(tmp_path, rollouts=False), LogJournal()
    config = ParticipantConfig(
        "gym", "resources", 30, environments=ENVIRONMENTS, storage_roots=[tmp_path], full_copy_every=EVERY
    )
    participant = gym.participant = Participant(config, journal=journal)
    gym.sessions = Sessions(participant, gym._load)
    log = LogFile.claim(tmp_path / "log")
    assert log is not None
    await open_log(participant, journal, log)
    await gym.sessions.open("a", 0, "counter", "task", Counter(World(), 7))
    digests: dict[str, Any] = {}
    for number in range(1, 2 * EVERY + 1):
        digests[f"1-{number}"] = (await gym.snapshot(f"1-{number}"))["manifest"]["digest"]
    shares = [any((tmp_path / checkpoint_id).glob("*.log")) for checkpoint_id in digests]
    assert 2 * [True, True, False] == shares
    await participant.close()
    for number, (checkpoint_id, digest) in enumerate(digests.items(), 1):
        other = Gym(tmp_path, rollouts=False)
        await other.restore(f"2-{number}", checkpoint_id, digest, [("a", 0, 1, 0)])
        assert [7] == [counter.value for counter in other.counters], checkpoint_id
        await other.participant.close()
