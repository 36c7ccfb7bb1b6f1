# SPDX-License-Identifier: Apache-2.0
"""What the commands that only look say: snapshots as a table, one snapshot whole, the prospects of a restart."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from reference_rl.errors import SnapshotDamaged
from reference_rl.preview import Preview
from reference_rl.snapshots import Snapshot, SnapshotStore
from spec import wire


def snapshots(store: SnapshotStore) -> Iterator[str]:
    """Yield a line for each published snapshot, the newest first, below a heading."""
    rows = [["SNAPSHOT", "AGE", "STEP", "WEIGHTS", "GYMS", "TURNS HELD", "RESTARTS", "SIZE"]]
    damaged = {}
    for checkpoint_id in store.ids():
        try:
            rows.append(_row(store.read(checkpoint_id)))
        except SnapshotDamaged as error:
            rows.append([str(checkpoint_id), "", "", "", "damaged"])
            damaged[checkpoint_id] = str(error)
    if len(rows) == 1:
        yield "no snapshot is published"
        return
    yield from table(rows)
    for checkpoint_id, why in damaged.items():
        yield f"{checkpoint_id}: {why}"


def _row(snapshot: Snapshot) -> list[str]:
    manifest = snapshot.manifest
    turns = sum(
        record.turns_done
        for gym in manifest.gyms
        for participant in gym.participants
        if "rollouts" in participant.owns
        for record in snapshot.index(gym.alias, participant.name).values()
        if record.state == "turn"
    )
    return [
        str(snapshot.checkpoint_id),
        age(time.time() - snapshot.path.stat().st_mtime),
        str(manifest.trainer_step),
        str(manifest.weights_version),
        ", ".join(gym.alias for gym in manifest.gyms if gym.included) or "RL state only",
        str(turns),
        str(manifest.restart_count),
        size(sum(entry.bytes for entry in manifest.files)),
    ]


def snapshot(held: Snapshot) -> Iterator[str]:
    """Yield what one snapshot holds: where RL would go on, and what each index says about each rollout."""
    manifest = held.manifest
    yield f"snapshot {held.checkpoint_id} of run {manifest.run_id}, {held.path}"
    yield f"trainer step {manifest.trainer_step}, weights version {manifest.weights_version}"
    restarts = held.restarts()
    for gym in manifest.gyms:
        if not gym.included:
            yield f"\nGym {gym.alias}: left out"
        for participant in gym.participants:
            index = held.index(gym.alias, participant.name)
            states = Counter(record.state for record in index.values())
            said = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "nothing"
            yield f"\n{gym.alias}/{participant.name}, owner of {', '.join(participant.owns)}: {said}"
            yield from table(
                [
                    wire.rollout_key(record.rollout_id, record.attempt),
                    record.state,
                    f"{record.turns_done} turns",
                    record.reason or "",
                ]
                for record in index.values()
            )
    if restarts:
        yield "\nstart at turn 1, whatever an index says:"
        yield from table([f"{alias}/{name}", r.reason, r.detail or ""] for (alias, name), r in restarts.items())


def prospects(seen: Preview) -> Iterator[str]:
    """Yield what a restart would do: where RL goes on, each Gym, each rollout and why, and the sum of it."""
    yield f"RL goes on from: {seen.rl_from}"
    for alias, how in seen.gyms.items():
        yield f"Gym {alias}: {how}"
    for text in seen.refused:
        yield f"passed over: {text}"
    yield ""
    rows = [["ROLLOUT", "WOULD BE", "TURNS KEPT", "WHY"]]
    yield from table(rows + [[p.rollout_id, p.how, str(p.turns_kept), p.reason] for p in seen.rollouts])
    hows = Counter(p.how for p in seen.rollouts)
    kept = sum(p.turns_kept for p in seen.rollouts)
    yield "\n" + ", ".join(f"{count} {how}" for how, count in sorted(hows.items())) + f"; turns kept: {kept}"


def table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield rows with their columns aligned."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[n]) for row in rows if n < len(row)) for n in range(max(map(len, rows), default=0))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip()


def age(seconds: float) -> str:
    """Return a time span in its two largest words, e.g. ``2 h 5 min``."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86_400, whole // 3600 % 24, whole // 60 % 60
    parts = [f"{n} {unit}" for n, unit in ((days, "d"), (hours, "h"), (minutes, "min")) if n]
    return " ".join(parts[:2]) or f"{whole} s"


def size(count: int) -> str:
    """Return a number of bytes in the largest unit that keeps it above 1."""
    value, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" else f"{value:.1f} {units[0]}"
