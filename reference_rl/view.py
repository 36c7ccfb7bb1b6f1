# SPDX-License-Identifier: Apache-2.0
"""What `reference-rl run` shows while it runs: a live view on a terminal, JSON lines otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from rich.table import Table

    from reference_rl.session import Session

REFRESH_S: Final = 0.5
"""How often the live view is drawn anew, in seconds."""

LAST: Final = 6
"""How many of the last events the live view shows."""

SHOWN: Final = ("checkpoint_id", "gym", "rollout_id", "reason", "pause_ms", "snapshot", "mode")
"""Fields of an event that the live view has room for."""


def json_lines(out: TextIO) -> Any:
    """Return what writes every event as one JSON line: what a log collector reads."""

    def mirror(event: Mapping[str, Any]) -> None:
        out.write(json.dumps(event, default=str) + "\n")
        out.flush()

    return mirror


@contextlib.asynccontextmanager
async def live(session: Session) -> AsyncIterator[None]:
    """Draw progress, snapshots and the last events of a session on the terminal until the block ends."""
    # Imported late: whoever pipes the output needs nothing of it.
    from rich.live import Live

    recent: list[Mapping[str, Any]] = []

    def remember(event: Mapping[str, Any]) -> None:
        recent.append(event)
        del recent[:-LAST]

    session.events.mirror = remember
    with Live(table(session, recent), refresh_per_second=4, transient=True) as display:

        async def redraw() -> None:
            while True:
                await asyncio.sleep(REFRESH_S)
                display.update(table(session, recent))

        drawing = asyncio.create_task(redraw())
        try:
            yield
        finally:
            session.events.mirror = None
            drawing.cancel()
            await asyncio.gather(drawing, return_exceptions=True)


def table(session: Session, recent: list[Mapping[str, Any]]) -> Table:
    """Return the picture: every metric of the run, and its last events."""
    from rich.table import Table

    title = f"{session.settings.run_id}, column {session.settings.column}"
    picture = Table(title=title, show_header=False, min_width=60)
    for name, value in session.values().items():
        picture.add_row(name.removeprefix("ckpt_").replace("_", " "), f"{value:g}")
    picture.add_section()
    for event in recent:
        picture.add_row(event["event"], ", ".join(f"{name} {event[name]}" for name in SHOWN if event.get(name)))
    return picture
