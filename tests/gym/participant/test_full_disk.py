# SPDX-License-Identifier: Apache-2.0
"""Commits onto a file system that is really full, in a mount namespace of its own; and onto ones that can do less."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from reference_gym.participant import Limits, ProtocolError, staging
from reference_gym.participant.staging import Staging
from spec import durable
from tests.gym.participant.kit import Gym, until

ROOT = Path(__file__).resolve().parents[3]
MOUNTED = "mount -t tmpfs -o size=256k,mode=700 none {0} && exec {1} -m tests.gym.participant.test_full_disk {0}"


async def story(root: Path) -> dict[str, Any]:
    """Fill the file system, commit, free it, and commit again; return what was seen."""
    gym, seen = Gym(root), dict[str, Any]()
    await gym.start("a", "b", task={"text": "x" * 20_000})
    (receipt,) = await gym.finish("b")
    (root / "1-1").mkdir()
    filler = root / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError as error:
            seen["filled"] = errno.errorcode[error.errno or 0]
    await gym.prepare("1-1")
    codes = []
    for _ in range(3):
        try:
            await gym.commit("1-1")
        except ProtocolError as refusal:
            codes.append([refusal.code, refusal.status, gym.status["phase"], gym.status["captured"]])
    seen |= {"codes": codes, "left": [path.name for path in (root / "1-1").iterdir()]}
    seen["acks"] = await gym.acks(receipt)
    await gym.retire(("a", 0))
    filler.unlink()
    reply = await gym.commit("1-1")
    rows = [json.loads(line) for line in (root / "1-1" / "rollouts.jsonl").read_text().splitlines()]
    seen |= {"durable": reply["durable"], "rows": [(row["rollout_id"], row["state"]) for row in rows]}
    await gym.resume("1-1")
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 512)
        except OSError:
            pass
    await gym.start("c")
    await gym.waiting("c")
    await gym.prepare("1-2")
    try:
        (root / "1-2").mkdir(exist_ok=True)
        await gym.commit("1-2")
    except (ProtocolError, OSError) as refusal:
        seen["second"] = getattr(refusal, "code", str(refusal))
    seen["aborted"] = (await gym.abort("1-2"))["ended_as"]
    gym.loop.reply("c", [("add", 1)])
    await until(lambda: ("c", 0, 2) in gym.loop.asked)
    seen["status"] = [gym.status["phase"], gym.status["gate"]]
    other = Gym(root)
    kept = await other.restore("2-1", "1-1", reply["manifest"]["digest"], [("a", 0, 1, 0)], [receipt])
    seen["restored"] = [kept["restored_count"], kept["results_count"]]
    await other.participant.close()
    await gym.participant.close()
    return seen


def test_a_full_file_system_keeps_the_capture_for_the_same_commit(tmp_path: Path) -> None:
    """C44, N20: insufficient_storage and prepared, again and again; with room the same cut; full again: abort."""
    mount = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTED.format(tmp_path, sys.executable)]
    try:
        done = subprocess.run(
            mount, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False, env={**os.environ}
        )
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()[:200]}")
    seen = json.loads(done.stdout)
    assert "ENOSPC" == seen["filled"]
    assert [["insufficient_storage", 507, "prepared", True]] * 3 == seen["codes"]
    assert [] == seen["left"], "nothing half is left"
    assert (["released"], True) == (seen["acks"], seen["durable"])
    assert [["a", "turn"], ["b", "finished"]] == seen["rows"], "neither ACK nor retire altered the cut"
    assert ("insufficient_storage", "aborted", ["idle", "open"]) == (seen["second"], seen["aborted"], seen["status"])
    assert [1, 1] == seen["restored"], "the snapshot before is fine"


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP, errno.EMLINK])
def test_an_upload_appears_also_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """C47: renamed instead, never replacing; other bytes under that name are a conflict as ever."""

    def link(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging.os, "link", link)
    held = Staging(tmp_path, Limits())
    for data, refused in ((b"one", False), (b"one", False), (b"two", True)):
        upload = held.begin_upload("1-1", "state.jsonl")
        upload.write(data)
        if refused:
            with pytest.raises(ProtocolError) as refusal:
                upload.finish(durable)
            assert "argument_conflict" == refusal.value.code
        else:
            upload.finish(durable)
        upload.abandon()
    assert ["state.jsonl"] == [path.name for path in (tmp_path / "uploads" / "1-1").iterdir()]
    assert b"one" == held.find("1-1", "state.jsonl").read_bytes()


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(story(Path(sys.argv[1])))))
