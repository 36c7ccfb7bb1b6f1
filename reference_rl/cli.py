# SPDX-License-Identifier: Apache-2.0
"""The command `reference-rl`.

Exit codes: 0 done · 1 unexpected · 2 usage or settings · 3 a violated invariant, evidence saved · 4 a Gym cannot be
reached or recovered · 5 superseded by a higher controller · 6 refused as incompatible · 143 stopped by SIGTERM after
a snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from reference_rl import listing, view
from reference_rl.errors import InvariantViolated, RlError, SettingsError, SnapshotDamaged
from reference_rl.managed import ManagedSession
from reference_rl.older import OlderSession
from reference_rl.preview import preview
from reference_rl.session import EXIT_DONE, Session
from reference_rl.settings import RunSettings, load_settings
from reference_rl.snapshots import SnapshotStore
from spec import wire

app = typer.Typer(
    help="The reference RL client of the Gym Checkpoint Protocol.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # their tracebacks may show values, and a token is one
)
snapshots = typer.Typer(help="Look at the published snapshots of a run.", no_args_is_help=True)
app.add_typer(snapshots, name="snapshots")

Config = Annotated[Path, typer.Option("--config", "-c", help="run.yaml of the run.")]


@app.command()
def run(config: Config) -> None:
    """Run, or go on after a crash: the same command. SIGUSR1 takes a snapshot, SIGTERM takes one and stops."""
    raise typer.Exit(run_to_end(load_settings(config)))


def run_to_end(settings: RunSettings) -> int:
    """Run one process of a run; return its exit code."""
    return asyncio.run(_run(settings))


async def _run(settings: RunSettings) -> int:
    session: Session = ManagedSession(settings) if settings.switches.tracks_rollouts else OlderSession(settings)
    try:
        if session.is_done():
            session.events.emit("done", already=True)
            return EXIT_DONE
        code = await _shown(session)
    except InvariantViolated as error:
        session.events.emit("invariant_violated", reason=str(error), evidence=str(session.save_evidence(error)))
        raise
    except RlError as error:
        session.events.emit("failed_run", reason=str(error), kind=type(error).__name__)
        raise
    else:
        if sys.stdout.isatty():
            typer.echo(summary(session))
        else:
            view.json_lines(sys.stdout)({"event": "summary", "t": time.time(), "text": summary(session)})
        return code
    finally:
        session.close()


async def _shown(session: Session) -> int:
    """Run a session under a live view, or with every event as a JSON line where nobody looks at a terminal."""
    if not sys.stdout.isatty():
        session.events.mirror = view.json_lines(sys.stdout)
        return await session.run()
    async with view.live(session):
        return await session.run()


@app.command()
def recover(
    config: Config,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what `run` would do; required.")] = False,
) -> None:
    """Say what a restart would do with each rollout, and why; `run` does it."""
    if not dry_run:
        raise SettingsError("`run` recovers by itself; `recover` only shows what it would do: add --dry-run")
    for line in listing.prospects(asyncio.run(preview(load_settings(config)))):
        typer.echo(line)


def summary(session: Session) -> str:
    """Return one line about a run that has ended, whether it goes on in column 2 included.

    Requirements: CKPT-DUTY-030.
    """
    values = session.write_metrics()
    text = f"{session.settings.run_id}: {values['samples_trained']:.0f} samples trained, "
    text += f"{values['rollouts_failed']:.0f} failed, {values['rollouts_unfinished']:.0f} unfinished"
    if "ckpt_snapshots_published" in values:
        text += f"; snapshots: {values['ckpt_snapshots_published']:.0f} published, "
        text += f"{values['ckpt_snapshots_failed']:.0f} failed"
    if values.get("ckpt_fallen_back_to_column_2"):
        text += "; FALLEN BACK TO COLUMN 2: a restart of its Gyms would begin at older snapshots"
    return text


@snapshots.command("list")
def list_snapshots(config: Config) -> None:
    """List the published snapshots, the newest first."""
    for line in listing.snapshots(_store(config)):
        typer.echo(line)


@snapshots.command("verify")
def verify_snapshots(config: Config) -> None:
    """Verify every byte of every snapshot; exit code 1 when one is damaged."""
    store, damaged = _store(config), 0
    for checkpoint_id in store.ids():
        try:
            store.verify(checkpoint_id)
            typer.echo(f"{checkpoint_id}  ok")
        except SnapshotDamaged as error:
            damaged += 1
            typer.echo(f"{checkpoint_id}  damaged: {error}")
    raise typer.Exit(1 if damaged else 0)


@snapshots.command("show")
def show_snapshot(
    config: Config,
    checkpoint_id: Annotated[str, typer.Argument(help="<epoch>-<sequence>, or `newest`.")] = "newest",
    as_json: Annotated[bool, typer.Option("--json", help="Its manifest as JSON instead.")] = False,
) -> None:
    """Show one snapshot: where a restart would go on, and what every index says about each rollout."""
    store = _store(config)
    held = store.read(_named(store, checkpoint_id))
    for line in [held.manifest.to_json()] if as_json else listing.snapshot(held):
        typer.echo(line)


def _named(store: SnapshotStore, text: str) -> wire.CheckpointId:
    ids = store.ids()
    if text == "newest" and ids:
        return ids[0]
    found = [checkpoint_id for checkpoint_id in ids if str(checkpoint_id) == text]
    if not found:
        there = ", ".join(str(checkpoint_id) for checkpoint_id in ids) or "none"
        raise SettingsError(f"no snapshot {text} is published; published: {there}")
    return found[0]


def _store(config: Path) -> SnapshotStore:
    settings = load_settings(config)
    return SnapshotStore.reading(settings.run_dir / "snapshots", settings.run_id)


def main() -> None:
    """Run the command; an error of this package becomes one line and its exit code."""
    # Every repeat of a call would be a line without its reason; what matters is in the event log.
    logging.getLogger("stamina").setLevel(logging.ERROR)
    try:
        app()
    except RlError as error:
        sys.stderr.write(f"reference-rl: {error}\n")
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
