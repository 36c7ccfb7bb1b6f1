# SPDX-License-Identifier: Apache-2.0
"""Snapshots on disk: published whole or not at all, verified to the byte, ordered as numbers."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reference_rl import snapshots
from reference_rl.errors import SettingsError, SnapshotDamaged, SnapshotExists
from reference_rl.sealed import SealBroken, seal, unseal
from reference_rl.snapshots import MARKER, SnapshotStore
from spec import durable, wire


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """An empty store of run r1."""
    return SnapshotStore(tmp_path / "snapshots", "r1")


def publish(store: SnapshotStore, checkpoint_id: str, *aliases: str) -> Path:
    """Publish a snapshot with the given Gyms, two participants each."""
    draft = store.begin(wire.parse_checkpoint_id(checkpoint_id))
    for name in (snapshots.LEDGER_FILE, snapshots.REPLAY_FILE, snapshots.TRAINER_FILE, snapshots.ROWS_FILE):
        draft.write(name, name.encode() + b"\n")
    restart = {"gym": "gym", "rollout_id": "p1", "attempt": 0, "reason": "uncertain", "turns_done": 1}
    draft.write(snapshots.RESTARTS_FILE, json.dumps(restart).encode() + b"\n")
    gyms = []
    for alias in aliases:
        cuts = [_cut(store.run_id, draft, checkpoint_id, alias, name) for name in ("agent", "resources")]
        gyms.append({"alias": alias, "included": True, "participants": cuts})
    manifest = {"trainer_step": 3, "weights_version": 2, "gyms": gyms, "restart_count": 1}
    return store.publish(draft, manifest).path


def _cut(run_id: str, draft: Any, checkpoint_id: str, alias: str, name: str) -> dict[str, Any]:
    rows = [
        {"rollout_id": f"p{n}", "attempt": 0, "state": "turn", "turns_done": n, "task_digest": "d"}
        | {"environment": "taxi", "effects": {"taxi": n}, "data_refs": []}
        for n in range(3)
    ]
    index = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    payload = f"payload of {name}".encode()
    index_ref = {"name": "rollouts.jsonl", "digest": wire.bytes_digest(index), "records": 3}
    files = [
        {"name": "rollouts.jsonl", "bytes": len(index), "digest": wire.bytes_digest(index), "records": 3},
        {"name": "state-000001.log", "bytes": len(payload), "digest": wire.bytes_digest(payload), "records": 0},
    ]
    shared = {"owns": ["rollouts"] if name == "agent" else ["sessions"], "state_schema": {"id": "x", "version": 1}}
    shared["environments"] = [{"name": "taxi", "state_version": "1"}]
    content = {"protocol_version": "1.0", "run_id": run_id, "checkpoint_id": checkpoint_id, "participant": name}
    content |= {**shared, "index": index_ref, "counts": {"turn": 3, "finished": 0, "restart": 0}, "files": files}
    manifest = json.dumps(content).encode()
    for file, data in (("rollouts.jsonl", index), ("state-000001.log", payload), ("manifest.json", manifest)):
        draft.write(f"gym/{alias}/{name}/{file}", data)
    reference = {"name": "manifest.json", "digest": wire.bytes_digest(manifest), "bytes": len(manifest)}
    stage = 10 if name == "agent" else 30
    return {"name": name, "incarnation": "i-1", "stage": stage, **shared, "manifest": reference, "index": index_ref}


def flip(data: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "one byte flipped": flip,
    "one byte cut": lambda data: data[:-1],
    "a newline appended": lambda data: data + b"\n",
    "the first line twice": lambda data: data.split(b"\n")[0] + b"\n" + data,
    "emptied": lambda data: b"",
    "a byte order mark": lambda data: b"\xef\xbb\xbf" + data,
}


def files_of(path: Path) -> list[str]:
    """Return every file of a snapshot, by its path inside it."""
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_to_any_file_is_named(store: SnapshotStore, damage: str) -> None:
    """C41: each file of a snapshot × each kind of damage: refused, and the file is named."""
    path = publish(store, "1-1", "gym")
    names = files_of(path)
    assert 12 == len(names)
    for name in names:
        original = (path / name).read_bytes()
        (path / name).write_bytes(DAMAGES[damage](original))
        with pytest.raises(SnapshotDamaged) as caught:
            store.verify(wire.CheckpointId(1, 1))
        assert name == caught.value.file
        (path / name).write_bytes(original)
    assert "1-1" == str(store.verify(wire.CheckpointId(1, 1)).checkpoint_id)


def test_a_missing_file_and_a_link_are_damage(store: SnapshotStore, tmp_path: Path) -> None:
    """CKPT-DIR-021: only plain, named files are opened: a link to the right content is refused, a pipe ignored."""
    path = publish(store, "1-1", "gym")
    os.mkfifo(path / "gym/gym/agent/not-named")
    assert "1-1" == str(store.verify(wire.CheckpointId(1, 1)).checkpoint_id)
    victim = path / "gym/gym/agent/state-000001.log"
    shutil.copy(victim, tmp_path / "elsewhere")
    victim.unlink()
    with pytest.raises(SnapshotDamaged, match="state-000001"):
        store.verify(wire.CheckpointId(1, 1))
    victim.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SnapshotDamaged, match="state-000001"):
        store.verify(wire.CheckpointId(1, 1))


def test_two_participants_whose_files_were_swapped_are_refused(store: SnapshotStore) -> None:
    """C41: swapping two participants' directories is found although every file is sound in itself."""
    path = publish(store, "1-1", "gym")
    agent, resources = path / "gym/gym/agent", path / "gym/gym/resources"
    agent.rename(path / "aside")
    resources.rename(agent)
    (path / "aside").rename(resources)
    with pytest.raises(SnapshotDamaged, match="gym/gym/agent"):
        store.verify(wire.CheckpointId(1, 1))


def test_a_newer_schema_version_is_refused(store: SnapshotStore) -> None:
    """C41: a manifest of a newer schema, sealed correctly, is not read."""
    path = publish(store, "1-1")
    content = unseal((path / "manifest.json").read_bytes())
    (path / "manifest.json").write_bytes(seal({**content, "schema_version": 99}))
    with pytest.raises(SnapshotDamaged, match="schema version 99"):
        store.verify(wire.CheckpointId(1, 1))


def test_the_manifest_of_another_run_or_id_is_refused(store: SnapshotStore, tmp_path: Path) -> None:
    """C43, CKPT-RESTART-020: the manifest of run A in run B is refused by its run id, one of another id by that."""
    other = SnapshotStore(tmp_path / "other", "r2")
    shutil.copytree(publish(other, "1-1"), store.root / "1-1")
    with pytest.raises(SnapshotDamaged, match="run 'r2'"):
        store.read(wire.CheckpointId(1, 1))
    shutil.copytree(publish(store, "1-2"), store.root / "1-3")
    with pytest.raises(SnapshotDamaged, match="manifest of 1-2"):
        store.read(wire.CheckpointId(1, 3))


def test_snapshots_are_ordered_as_numbers(store: SnapshotStore) -> None:
    """C42, CKPT-SNAP-029: 9, 10 and 100 with shuffled times, beside drafts and trash: 100 is the newest."""
    for number, name in ((300, "9-1"), (100, "10-2"), (200, "100-1"), (400, "10-10")):
        os.utime(publish(store, name), (number, number))
    store.begin(wire.CheckpointId(200, 1))
    (store.root / "101-1.old").mkdir()
    (store.root / "notes.txt").write_text("x")
    assert ["100-1", "10-10", "10-2", "9-1"] == [str(i) for i in store.ids()]


def test_publication_never_replaces(store: SnapshotStore) -> None:
    """CKPT-SNAP-021: what is at the final name stays, and the draft stays a draft."""
    draft = store.begin(wire.CheckpointId(1, 1))
    (store.root / "1-1").mkdir()
    (store.root / "1-1/precious").write_text("x")
    with pytest.raises(SnapshotExists):
        store.publish(draft, {"trainer_step": 0, "weights_version": 0, "gyms": [], "restart_count": 0})
    assert ["precious"] == [p.name for p in (store.root / "1-1").iterdir()]


def test_an_older_controllers_late_rename_fails(store: SnapshotStore) -> None:
    """CKPT-SNAP-028: a starting controller renames foreign drafts away; the older one cannot publish any more."""
    draft = store.begin(wire.CheckpointId(1, 1))
    assert ["1-1.tmp"] == SnapshotStore(store.root, "r1").sweep()
    with pytest.raises(OSError, match="No such file"):
        store.publish(draft, {"trainer_step": 0, "weights_version": 0, "gyms": [], "restart_count": 0})
    assert [] == store.ids()


def test_retention_keeps_the_last_and_what_still_holds_a_gym(store: SnapshotStore) -> None:
    """CKPT-SNAP-030: the last K stay; an RL-only snapshot does not push out the newest one with a Gym's cuts."""
    publish(store, "1-1", "gym")
    publish(store, "1-2", "gym")
    for number in (3, 4, 5):
        publish(store, f"1-{number}")
    assert ["1-3", "1-1"] == [str(i) for i in store.retain(2, ["gym"])]
    assert ["1-5", "1-4", "1-2"] == [str(i) for i in store.ids()]
    assert [] == list((store.root / ".trash").iterdir())


def test_a_snapshot_is_private(store: SnapshotStore) -> None:
    """CKPT-SEC-015, CKPT-SEC-016: directories 0700, files 0600."""
    path = publish(store, "1-1", "gym")
    modes = {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_dir()} | {path.stat().st_mode & 0o777}
    assert {0o700} == modes
    assert {0o600} == {p.stat().st_mode & 0o777 for p in path.rglob("*") if p.is_file()}


def test_everything_is_synced_before_the_rename(store: SnapshotStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-SNAP-023, -024, -035, -045: files, directories, manifest, rename, parent, in this order."""
    steps: list[str] = []
    write, sync, rename = durable.write_file, durable.sync_dir, durable.rename_noreplace

    def noting(kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(path: Path, *rest: Any) -> Any:
            steps.append(f"{kind} {path.name}")
            return call(path, *rest)

        return noted

    draft = store.begin(wire.CheckpointId(1, 1))
    draft.write("rl/one", b"1")
    monkeypatch.setattr(durable, "write_file", noting("write", write))
    monkeypatch.setattr(durable, "sync_dir", noting("sync", sync))
    monkeypatch.setattr(durable, "rename_noreplace", noting("rename", rename))
    store.publish(draft, {"trainer_step": 0, "weights_version": 0, "gyms": [], "restart_count": 0})
    expected = ["sync rl", "sync 1-1.tmp", "write manifest.json", "sync 1-1.tmp", "rename 1-1.tmp", "sync snapshots"]
    assert expected == steps


def test_a_file_system_without_rename_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C47, CKPT-SNAP-046: told apart when the store is opened, in a sentence, and nothing is left behind."""

    def cannot(source: Path, destination: Path) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(durable, "rename_noreplace", cannot)
    with pytest.raises(SettingsError, match="cannot be renamed in one step"):
        SnapshotStore(tmp_path / "snapshots", "r1")
    assert [".trash"] == [p.name for p in (tmp_path / "snapshots").iterdir()]
    assert [] == list((tmp_path / "snapshots/.trash").iterdir())


def test_a_trash_on_another_file_system_is_refused_at_the_start(tmp_path: Path) -> None:
    """CKPT-SNAP-022, CKPT-SNAP-046: a snapshot could not leave the listing in one step."""
    elsewhere = Path("/dev/shm")  # the one other file system that every Linux has
    if elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("everything here is one file system")
    with tempfile.TemporaryDirectory(dir=elsewhere) as trash:
        (tmp_path / "snapshots").mkdir(0o700)
        (tmp_path / "snapshots/.trash").symlink_to(trash)
        with pytest.raises(SettingsError, match="cannot be renamed in one step"):
            SnapshotStore(tmp_path / "snapshots", "r1")


def test_a_snapshot_leaves_the_listing_before_any_of_its_files(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CKPT-SNAP-031: killed before the first file goes: it is whole in the trash, and the next start empties that."""
    for number in (1, 2):
        publish(store, f"1-{number}", "gym")
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        store.retain(1, ["gym"])
    assert ["1-2"] == [p.name for p in store.root.glob("*-*")]
    (away,) = (store.root / ".trash").glob("1-1.*")
    assert 12 == len(files_of(away))
    store.empty_trash()
    assert [] == list((store.root / ".trash").iterdir())


def test_a_kill_in_the_middle_of_the_start_is_not_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N9: the probe of the file system leaves its directories where a SIGKILL ends it: the store opens all the same."""
    with monkeypatch.context() as killed:
        killed.setattr(shutil, "rmtree", lambda *arguments, **options: None)
        SnapshotStore(tmp_path / "snapshots", "r1")
    left = list((tmp_path / "snapshots" / ".trash").iterdir())
    assert left != []
    assert [] == list(SnapshotStore(tmp_path / "snapshots", "r1").ids())


def test_the_marker_is_replaced_whole_and_notices_damage(store: SnapshotStore) -> None:
    """CKPT-SNAP-033, -043, -044: the marker names its trainer checkpoint and the unfinished rollouts, and is sealed."""
    assert store.marker() is None
    rollout = {"gym": "gym", "rollout_id": "p1", "attempt": 2, "task_digest": "d"}
    for step in (1, 2):
        store.write_marker(
            {"trainer_checkpoint": f"step-{step}", "trainer_step": step, "weights_version": 0, "rollouts": [rollout]}
        )
    marker = store.marker()
    assert marker is not None
    assert ("step-2", "start_at_turn_1") == (marker.trainer_checkpoint, marker.action)
    path = store.root.parent / MARKER
    path.write_bytes(flip(path.read_bytes()))
    with pytest.raises(SnapshotDamaged, match=MARKER):
        store.marker()


@pytest.mark.parametrize("content", [{"a": 1}, {"a": {"b": {}}}, {"x": [{}], "y": "…\n"}])
def test_a_seal_survives_a_round_and_nothing_else(content: dict[str, Any]) -> None:
    """CKPT-SNAP-041: every single altered byte of a sealed file is noticed."""
    data = seal(content)
    assert content == unseal(data)
    for position in range(len(data)):
        with pytest.raises(SealBroken):
            unseal(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
