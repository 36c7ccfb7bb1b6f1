# SPDX-License-Identifier: Apache-2.0
"""The log's directory is copied while a busy Gym writes it: no copy is ever taken for the life that it was made of."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from reference_gym.participant.log import LogDamaged, Recovered, read_log
from reference_gym.participant.log_format import segments
from tests.gym.crash.known import Known
from tests.gym.crash.lives import MortalGym
from tests.gym.crash.soak import LOG, SCRIPT, busy
from tests.gym.running import FORMS
from tests.gym.stubs import PolicyStub, until

COPIES = 20
STARTED = 2


@dataclass(frozen=True)
class Copy:
    """One copy, and what was acknowledged before it was begun and not given up before it was made."""

    data: Path
    turns: dict[str, int]
    results: frozenset[str]


@pytest.mark.parametrize("form", FORMS)
async def test_a_copy_is_whole_or_named_and_never_the_same_life(form: str, tmp_path: Path) -> None:
    """CKPT-ID-021: `cp -r` at any instant, torn tails included; another Gym on it, or the same one, begins anew."""
    async with PolicyStub(SCRIPT) as policy:
        gym = MortalGym(_directory(tmp_path, "gym"), form, log=LOG)
        known = Known(policy)
        try:
            await gym.start()
            await gym.adopt()
            known.incarnations = dict(gym.incarnations)
            work = asyncio.create_task(busy(gym, known, 0))
            await until(lambda: len(known.results) > 3 or work.done(), "results were seen")
            copies = [await _copy(gym, known, tmp_path / f"copy-{number}") for number in range(COPIES)]
            await gym.kill()
            await asyncio.wait([work])
            found = [_read(copy) for copy in copies]
            assert any(found), "no copy could be read at all"
            for copy in copies[-STARTED:]:
                await _start_elsewhere(tmp_path, copy, gym)
            await _start_in_place(copies[-1], gym, known)
        finally:
            await gym.close()


def _directory(tmp_path: Path, name: str) -> Path:
    (tmp_path / name).mkdir()
    return tmp_path / name


async def _copy(gym: MortalGym, known: Known, data: Path) -> Copy:
    """Copy as an operator would; what goes or comes meanwhile is there or not."""
    turns, results = known.turns(), frozenset(known.results)
    copying = await asyncio.create_subprocess_exec(
        "cp", "-r", str(gym.directory / "data"), str(data), stderr=subprocess.DEVNULL
    )
    await copying.wait()
    going_on = known.started - known.doubtful
    return Copy(data, {key: turns.get(key, 0) for key in turns.keys() & going_on}, results - known.doubtful)


def _read(copy: Copy) -> bool:
    """Whether a copy can be read; then everything is in it that was acknowledged before it was begun."""
    readable = True
    for log in sorted(copy.data.glob("*/log")):
        try:
            found = read_log(log)
        except LogDamaged:
            readable = False
            continue
        if found is not None and "rollouts" in found.state.life.owns:
            _require_whole(copy, found)
    return readable


def _require_whole(copy: Copy, found: Recovered) -> None:
    assert copy.results <= found.results.keys()
    for rollout, turns in copy.turns.items():
        if rollout not in found.results:
            assert turns <= found.records[rollout].header["turns_done"], rollout


async def _start_elsewhere(tmp_path: Path, copy: Copy, gym: MortalGym) -> None:
    """Another Gym on a copy shares no incarnation with the one that it was made of."""
    other = MortalGym(_directory(tmp_path, f"other-{copy.data.name}"), gym.processes, log=LOG)
    shutil.copytree(copy.data, other.directory / "data", ignore_dangling_symlinks=True)
    try:
        await other.start()
        await _require_new(other, gym.incarnations)
    finally:
        await other.close()


async def _start_in_place(copy: Copy, gym: MortalGym, known: Known) -> None:
    """An older copy over the files of the same Gym, each of which keeps its inode."""
    for log in (gym.directory / "data").glob("*/log"):
        older = copy.data / log.parent.name / "log"
        for path in log.iterdir():
            if path.is_file() and not (older / path.name).exists():
                path.unlink()
        for path in older.iterdir():
            (log / path.name).write_bytes(path.read_bytes())
    await gym.start()
    await _require_new(gym, known.incarnations)


async def _require_new(gym: MortalGym, incarnations: dict[str, str]) -> None:
    for role in gym.roles:
        status = await gym.raw(role, "GET", "/checkpoint")
        assert gym.incarnations[role] not in incarnations.values()
        assert (0, None, None) == (status["counts"]["live"], status["last"], status["controller"])


async def test_a_copy_of_hard_links_is_refused_once_the_original_went_on(tmp_path: Path) -> None:
    """`cp -al`: the same inodes; when the Gym has begun another segment the copy says itself that it is not all."""
    async with PolicyStub(SCRIPT) as policy:
        gym = MortalGym(_directory(tmp_path, "gym"), "one", log=LOG | {"segment_bytes": 4096})
        known = Known(policy)
        try:
            await gym.start()
            await gym.adopt()
            known.incarnations = dict(gym.incarnations)
            work = asyncio.create_task(busy(gym, known, 0))
            await until(lambda: len(known.results) > 3 or work.done(), "results were seen")
            log, linked = gym.directory / "data" / "gym" / "log", tmp_path / "linked"
            linked.mkdir()
            newest = max(segments(log))
            for path in log.iterdir():
                if path.is_file():
                    os.link(path, linked / path.name)
            await until(lambda: max(segments(log)) > newest + 1, "the log has gone on")
            await gym.kill()
            await asyncio.wait([work])
            # The second, where the copy was made between the beginning of a segment and its name.
            with pytest.raises(LogDamaged, match=r"is missing|was acknowledged"):
                read_log(linked)
        finally:
            await gym.close()
