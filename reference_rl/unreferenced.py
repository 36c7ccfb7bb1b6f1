# SPDX-License-Identifier: Apache-2.0
"""Deletes the token rows to which nothing refers any more; part of every restart."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from reference_rl.dataplane import DataPlane, RowKey
from reference_rl.errors import SnapshotDamaged
from reference_rl.ledger import Ledger
from reference_rl.rows import rows_of_cut, rows_of_live, rows_of_results
from reference_rl.snapshots import SnapshotStore


async def delete_unreferenced(ledger: Ledger, store: SnapshotStore, plane: DataPlane | None) -> int:
    """Delete the token rows that no saved turn, no result and no live attempt refers to; return how many went.

    Requirements: CKPT-RESTART-034, CKPT-RESTART-035.
    """
    listed = await plane.list() if plane is not None else ()
    if not listed or plane is None:
        return 0
    wanted = await asyncio.to_thread(_referenced, ledger, store, listed)
    return await plane.delete([key for key in listed if key not in wanted])


def _referenced(ledger: Ledger, store: SnapshotStore, listed: Sequence[RowKey]) -> set[RowKey]:
    wanted = ledger.read(rows_of_results, listed) | ledger.read(rows_of_live, listed)
    for checkpoint_id in store.ids():
        try:
            snapshot = store.read(checkpoint_id)
            for gym in snapshot.manifest.gyms:
                for participant in gym.participants:
                    if "rollouts" in participant.owns:
                        index = snapshot.index(gym.alias, participant.name)
                        wanted |= ledger.read(rows_of_cut, index.values(), listed)
        except SnapshotDamaged:
            return set(listed)  # what a damaged snapshot refers to is not known: keep everything
    return wanted
