# SPDX-License-Identifier: Apache-2.0
"""What a run shows: a picture on a terminal, JSON lines otherwise."""

import io
import json
from pathlib import Path

from rich.console import Console

from reference_rl import view
from tests.rl.harness import running, settings
from tests.rl.scripted import one_gym, serving


async def test_the_picture_shows_every_metric_and_the_last_events(tmp_path: Path) -> None:
    """Metrics of the column and what happened last, with its reason."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        await run.event("dispatched")
        recent = [{"event": "snapshot_failed", "t": 1.0, "reason": "gym/model is not ready"}]
        console = Console(file=io.StringIO(), width=120)
        console.print(view.table(run.session, recent))
        said = console.file.getvalue()  # type: ignore[attr-defined] # it is the StringIO of above
        for name in run.session.values():
            assert name.removeprefix("ckpt_").replace("_", " ") in said
        assert "snapshot_failed" in said
        assert "gym/model is not ready" in said


async def test_a_live_view_ends_with_its_run(tmp_path: Path) -> None:
    """While it is drawn it is told every event; afterwards nothing is."""
    gym = one_gym()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        async with view.live(run.session):
            assert run.session.events.mirror is not None
            await run.event("dispatched")
        assert run.session.events.mirror is None


async def test_without_a_terminal_every_event_is_a_json_line(tmp_path: Path) -> None:
    """The same events as in the log of the run."""
    gym = one_gym()
    out = io.StringIO()
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        run.session.events.mirror = view.json_lines(out)
        await run.event("dispatched")
    said = [json.loads(line) for line in out.getvalue().splitlines()]
    assert "dispatched" in [event["event"] for event in said]
    assert said == run.events()[-len(said) :]
