# SPDX-License-Identifier: Apache-2.0
"""What a trainer's developers depend on: the names, the thin face without await, the commands."""

import asyncio
import inspect
import json
import signal
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import reference_rl
from reference_rl import BackgroundLoop, SyncCheckpointer, errors
from reference_rl.preview import preview
from tests.rl.harness import events_of, running, settings, until
from tests.rl.processes import TOKENS, event, rl_process, start
from tests.rl.scripted import ENVIRONMENT, Fault, calls_of, one_gym, serving

NAMES = [
    "BackgroundLoop",
    "BrokenReply",
    "Checkpointer",
    "ClientSettings",
    "Column",
    "Controller",
    "DataPlane",
    "Deployment",
    "Draft",
    "EmbeddedDataPlane",
    "EmbeddedRun",
    "EpochTaken",
    "Events",
    "GymClient",
    "GymError",
    "Incompatible",
    "Indefinite",
    "InvariantViolated",
    "Ledger",
    "LedgerError",
    "LedgerVersion",
    "NotAParticipant",
    "OpenSnapshot",
    "Participant",
    "Problem",
    "RecoveryFailed",
    "Recovery",
    "Refused",
    "Report",
    "RestartReport",
    "RestoreLimits",
    "RestoreWish",
    "Restorer",
    "RetryPolicy",
    "RlError",
    "RolloutManager",
    "Row",
    "RowKey",
    "RunSettings",
    "SWITCHES",
    "SettingsError",
    "Snapshot",
    "SnapshotDamaged",
    "SnapshotError",
    "SnapshotExists",
    "SnapshotFailed",
    "SnapshotStore",
    "Superseded",
    "Switches",
    "SyncCheckpointer",
    "Tenure",
    "Unreachable",
    "load_settings",
    "make_http",
    "open_run",
    "sibling_seed",
]


def test_the_public_names_are_pinned() -> None:
    """A name that appears or goes is a decision, not an accident."""
    assert sorted(NAMES) == sorted(reference_rl.__all__)
    assert all(hasattr(reference_rl, name) for name in NAMES)


def test_every_public_name_and_method_says_what_it_is() -> None:
    """A summary that is a sentence on each class, function and method; whatever has arguments of its own names them."""
    silent = []
    for name in NAMES:
        thing = getattr(reference_rl, name)
        if inspect.isclass(thing):
            own = [(f"{name}.{n}", m) for n, m in vars(thing).items() if inspect.isfunction(m) and n[0] != "_"]
            for said, method in [(name, thing), *own]:
                if not (method.__doc__ or "").strip().split("\n")[0].rstrip().endswith((".", ":", ",", ";")):
                    silent.append(said)
        elif inspect.isfunction(thing) and not (thing.__doc__ or "").strip():
            silent.append(name)
    assert [] == silent


def test_every_error_is_in_the_drawn_tree() -> None:
    """The module of errors opens with its tree, and the tree is whole."""
    classes = [n for n, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Exception)]
    assert errors.__doc__ is not None
    assert [] == [name for name in classes if f" {name} " not in errors.__doc__ and f"{name}\n" not in errors.__doc__]


def test_exit_codes_are_told_apart() -> None:
    """CKPT-CTRL-017: a superseded controller ends with a code that is used for nothing else."""
    codes = {name: c.exit_code for name, c in inspect.getmembers(errors, inspect.isclass) if hasattr(c, "exit_code")}
    assert {"Superseded", "EpochTaken"} == {name for name, code in codes.items() if code == 5}
    assert (2, 3, 4, 6) == tuple(
        codes[n] for n in ("SettingsError", "InvariantViolated", "RecoveryFailed", "Incompatible")
    )


def test_a_trainer_without_a_loop_takes_snapshots(tmp_path: Path) -> None:
    """The thin face: everything lives in one background loop, a call from a plain thread waits for its outcome."""
    gym = one_gym()
    with BackgroundLoop() as background:
        ready, leave = asyncio.Event(), asyncio.Event()
        found: dict[str, Any] = {}

        async def live() -> None:
            async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
                await run.event("dispatched")
                found["checkpointer"] = run.session.checkpointer
                ready.set()
                await leave.wait()

        async def begin() -> None:
            found["task"] = asyncio.create_task(live())
            await ready.wait()

        async def end() -> None:
            leave.set()
            await found["task"]

        background.call(begin(), 20)
        assert "published" == SyncCheckpointer(found["checkpointer"], background).take().outcome
        background.call(end(), 20)


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    """What would happen to each rollout, and why: only GETs are sent, and the ledger stays as it is."""
    gym = one_gym()
    async with serving(gym):
        config = settings(tmp_path / "run", gym)
        async with running(config) as run:
            await until(lambda: len(gym.runs) == 3, "three rollouts started")
            gym.turn("r1_g0_s1", 2)
            gym.finish("r1_g0_s0")
            await run.event("trained")
            await run.snapshot()
        gym.new_life()
        gym.calls.clear()
        before = (tmp_path / "run/ledger.sqlite").read_bytes()
        seen = await preview(config)
        assert ("snapshot 1-1", {"gym": "restored from 1-1"}) == (seen.rl_from, seen.gyms)
        assert [("reused", 0), ("continued", 2), ("continued", 0)] == [(p.how, p.turns_kept) for p in seen.rollouts]
        assert {"capabilities", "results"} >= calls_of(gym).keys()
        assert before == (tmp_path / "run/ledger.sqlite").read_bytes()


def run_yaml(url: str, **changes: Any) -> dict[str, Any]:
    """Return run.yaml for a scripted Gym."""
    return {
        "run_id": "r1",
        "run_dir": "run",
        "column": 3,
        "gyms": [{"alias": "gym", "url": url}],
        "policy": {"base_url": "http://127.0.0.1:9/v1", "model": "m", "api": "chat_completions"},
        "tasks": {"environment": ENVIRONMENT, "siblings": 3},
        "recovery": {"reach_s": 0.5, "health_s": 0.2},
        **changes,
    }


def files_with(directory: Path, texts: Iterable[str]) -> list[str]:
    """Return the files that hold one of the texts."""
    wanted = [text.encode() for text in texts]
    files = [p for p in directory.rglob("*") if p.is_file()]
    return [p.name for p in files if any(text in p.read_bytes() for text in wanted)]


async def test_the_command_takes_snapshots_on_signals_and_goes_on(tmp_path: Path) -> None:
    """SIGUSR1 takes a snapshot now, SIGTERM takes one and stops; the same command goes on and ends with 0."""
    gym = one_gym()
    async with serving(gym):
        async with rl_process(tmp_path, **run_yaml(gym.url)) as client:
            await until(lambda: len(gym.runs) == 3, "three rollouts started")
            await event(tmp_path, "dispatched", client)
            client.send(signal.SIGUSR1)
            await event(tmp_path, "snapshot_published", client)
            gym.turn("r1_g0_s0")
            client.send(signal.SIGTERM)
            assert 143 == await client.wait()
        stopped = events_of(tmp_path / "run")[-1]
        assert ("stopped", "published", "1-2") == (stopped["event"], stopped["snapshot"], stopped["checkpoint_id"])
        listing = await start(tmp_path, "reference_rl.cli", "snapshots", "verify", "--config", "run.yaml")
        assert 0 == await listing.wait()
        lines = len(events_of(tmp_path / "run"))
        async with rl_process(tmp_path, **run_yaml(gym.url)) as client:
            await event(tmp_path, "restarted", client, after=lines)
            for rollout_id in list(gym.runs):
                gym.finish(rollout_id)
            assert 0 == await client.wait()
    assert not files_with(tmp_path, TOKENS.values()), "C75: no token in any file of the run"


@pytest.mark.parametrize(
    ("break_it", "code", "says"),
    [
        ("away", 4, "cannot be reached"),
        ("workers", 6, "without a coordinator"),
        ("mismatch", 3, "holds another result"),
        ("settings", 2, "tasks"),
    ],
)
async def test_each_end_has_its_exit_code_and_its_sentence(tmp_path: Path, break_it: str, code: int, says: str) -> None:
    """CKPT-DUTY-023, -024: the documented exit codes; a violated invariant stops the run, with its evidence."""
    gym = one_gym()
    if break_it == "workers":
        gym.workers = {"count": 4, "coordinated": False}
    if break_it == "mismatch":
        gym.ack_outcome = "mismatch"
    async with serving(gym):
        url = "http://127.0.0.1:1" if break_it == "away" else gym.url
        changes = {"tasks": {"siblings": 1}} if break_it == "settings" else {}
        async with rl_process(tmp_path, **run_yaml(url, **changes)) as client:
            if break_it == "mismatch":
                await until(lambda: len(gym.runs) == 3, "three rollouts started")
                gym.finish("r1_g0_s0")
            assert code == await client.wait()
            assert says in client.output.read_text()
    if break_it == "mismatch":
        evidence = json.loads(next((tmp_path / "run").glob("evidence-*.json")).read_text())["evidence"]
        assert ("r1_g0_s0", "mismatch") == (evidence["receipt"]["rollout_id"], evidence["answer"])
        assert "r1_g0_s0" == evidence["ledger"]["rollout_id"]


async def test_a_superseded_command_ends_with_its_own_code(tmp_path: Path) -> None:
    """CKPT-CTRL-016, CKPT-CTRL-017: refused after it was in office, it stops for good with code 5."""
    gym = one_gym()
    async with serving(gym), rl_process(tmp_path, **run_yaml(gym.url)) as client:
        await until(lambda: len(gym.runs) == 3, "three rollouts started")
        await event(tmp_path, "dispatched", client)
        gym.faults["prepare"] = Fault("stale_controller")
        client.send(signal.SIGUSR1)
        assert 5 == await client.wait()
