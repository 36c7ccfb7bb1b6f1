# SPDX-License-Identifier: Apache-2.0
"""The command line, the processes behind it, the older route, and what outsiders may see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

import aiohttp
import pytest

from spec import wire
from tests.gym.controller import CONTROL_TOKEN, DATA_TOKEN, Refused
from tests.gym.running import (
    FORMS,
    POLICY_TOKEN,
    RunningGym,
    alive,
    environment,
    gym_at,
    task_of,
)
from tests.gym.stubs import BOUND_S, PolicyStub, WorldStub, until, until_async

SECRETS = (CONTROL_TOKEN, DATA_TOKEN, POLICY_TOKEN)
TOLERANCE_S = 1.0
"""What a loaded machine may add; a wait that was forgotten adds far more."""
PROBE = {"rollout_id": "r", "attempt": 0, "turn": 1, "request_id": "r/1/1", "effects_done": None}


async def test_an_announcement_names_who_listens(tmp_path: Path) -> None:
    """The file is there as soon as the line is, and both say the same."""
    async with gym_at(tmp_path, "three") as gym:
        assert gym.announced == json.loads(gym.announce_file.read_text())
        assert ["agent", "model", "resources"] == [each["name"] for each in gym.announced["participants"]]
        assert 4 == len(gym.pids)
        capabilities = await gym.raw("agent", "GET", "/capabilities")
        assert {"model", "resources"} == {each["name"] for each in capabilities["participants"]}
        assert ["rollouts"] == capabilities["owns"]
        stages = [(await gym.raw(role, "GET", "/capabilities"))["stage"] for role in gym.roles]
        assert [10, 20, 30] == stages


async def test_the_first_announcement_names_all_three(tmp_path: Path) -> None:
    """Whoever waits for the file, and not for the line, finds everybody in it."""
    file = tmp_path / "announce.json"
    seen: list[str] = []

    def appeared() -> bool:
        if file.exists():
            seen.append(file.read_text())
        return bool(seen)

    waiting = asyncio.create_task(until(appeared, "the file is there"))
    async with gym_at(tmp_path, "three") as gym:
        await waiting
        assert gym.announced == json.loads(seen[0])


async def test_nothing_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    """SIGKILL of the command alone takes its three children along."""
    async with gym_at(tmp_path, "three") as gym:
        os.kill(gym.announced["pid"], signal.SIGKILL)
        await until(lambda: not any(alive(pid) for pid in gym.pids), "the children are gone")


def descriptors_of(pid: int) -> int:
    """How many files, pipes and sockets a process holds open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=lambda number: number.name)
async def test_a_child_that_ended_comes_back_at_its_address(tmp_path: Path, number: signal.Signals) -> None:
    """Killed, or told to stop by itself: it is started again at its port, announced anew, and nothing is kept open."""
    async with gym_at(tmp_path, "three") as gym:
        command = gym.announced["pid"]
        before = descriptors_of(command)
        (victim,) = [each for each in gym.announced["participants"] if each["role"] == "model"]
        os.kill(victim["pid"], number)

        async def back() -> bool:
            try:
                await gym.raw("model", "GET", "/capabilities")
            except (aiohttp.ClientError, Refused):
                return False
            return str(victim["pid"]) not in gym.announce_file.read_text()

        await until_async(back, "the model server is back")
        await until(lambda: before == descriptors_of(command), "the command holds what it held before")


@pytest.mark.parametrize("processes", FORMS)
async def test_sigterm_with_an_open_long_poll_ends_with_0(processes: str, tmp_path: Path) -> None:
    """C70: with a long-poll under way every process gets SIGTERM, some twice; the exit code is 0 within the grace."""
    async with gym_at(tmp_path, processes) as gym:
        poll = asyncio.create_task(gym.results(wait_ms=30_000))
        await until_async(lambda: serves(gym), "it serves")
        for pid in gym.pids:
            os.kill(pid, signal.SIGTERM)
        assert 0 == await gym.term()
        assert not any(alive(pid) for pid in gym.pids)
        await asyncio.gather(poll, return_exceptions=True)


@pytest.mark.parametrize("processes", FORMS)
async def test_a_busy_gym_ends_within_its_grace(processes: str, tmp_path: Path) -> None:
    """C70: prepared, with a live rollout and connections of each kind; the command itself ends in time, with 0."""
    grace_s = 2.0
    limits = {"shutdown_grace_ms": int(grace_s * 1000)}
    async with gym_at(tmp_path, processes, limits=limits) as gym, PolicyStub([]) as policy:
        policy.hold("r", 1)
        await gym.begin_rollout("r", task_of(), policy.address)
        await until(lambda: policy.asked, "the policy was asked")
        await gym.prepare(gym.next_id())
        port = int(gym.url("agent").rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        held[1][1].write(b"GET /half")
        held[2][1].write(f"POST {wire.PREFIX}/acks HTTP/1.1\r\nHost: gym\r\nContent-Length: 9\r\n\r\n{{".encode())
        poll = asyncio.create_task(gym.results(wait_ms=30_000))
        await until_async(lambda: prepared(gym), "it serves")
        told = asyncio.get_running_loop().time()
        assert 0 == await gym.term()
        took = asyncio.get_running_loop().time() - told
        assert grace_s * 0.7 < took < grace_s + TOLERANCE_S
        assert {} == await poll, "the long poll was answered"
        for _, writer in held:
            writer.close()
        policy.release("r", 1)


async def prepared(gym: RunningGym) -> bool:
    """Whether the agent is prepared, and answers."""
    return bool((await gym.raw("agent", "GET", "/checkpoint"))["phase"] == "prepared")


@pytest.mark.parametrize("processes", FORMS)
async def test_few_descriptors_fill_no_log_and_keep_nobody_out(processes: str, tmp_path: Path) -> None:
    """CKPT-SEC-028: a stranger holds more connections than there are descriptors; a controller is still served."""
    gym = RunningGym(tmp_path, processes)
    command = gym.command
    limited = 'ulimit -n 56 && exec "$0" "$@"'
    gym.command = lambda: ["sh", "-c", limited, *command()]  # type: ignore[method-assign]  # one command for one test
    try:
        await gym.start()
        await gym.adopt()
        port = int(gym.url("agent").rpartition(":")[2])
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(80)]
        for _ in range(3):
            assert await serves(gym)
        for _, writer in held:
            writer.close()
        assert await serves(gym)
        assert 0 == await gym.term()
    finally:
        await gym.close()
    lines = [json.loads(line) for line in gym.log_file.read_text().splitlines()]
    assert [] == [line for line in lines if "exception" in line]
    assert len([line for line in lines if line["level"] != "info"]) <= len(gym.roles)


@pytest.mark.parametrize("processes", FORMS)
async def test_one_token_for_both_planes_is_warned_of_once(processes: str, tmp_path: Path) -> None:
    """CKPT-SEC-008: it serves, says so at its start, and does not say the token."""
    gym = RunningGym(tmp_path, processes)
    command = gym.command
    gym.command = lambda: ["env", "-u", "GYM_CHECKPOINT_DATA_TOKEN", *command()]  # type: ignore[method-assign]  # likewise
    try:
        await gym.start()
        assert await serves(gym)
        await gym.term()
    finally:
        await gym.close()
    text = gym.log_file.read_text()
    assert 1 == text.count("WARNING: one token for both planes")
    assert CONTROL_TOKEN not in text


@pytest.mark.parametrize("processes", FORMS)
async def test_sigterm_of_an_idle_gym_waits_for_nothing(processes: str, tmp_path: Path) -> None:
    """CKPT-SEC-020: right after the announcement, with minutes of grace, every process ends and the exit code is 0."""
    gym = RunningGym(tmp_path, processes, limits={"shutdown_grace_ms": 600_000})
    try:
        await gym.start()
        assert 0 == await gym.term()
        assert not any(alive(pid) for pid in gym.pids)
    finally:
        await gym.close()


async def test_a_terminated_gym_of_three_takes_one_more_snapshot(tmp_path: Path) -> None:
    """CKPT-SEC-020: while a rollout lives the idle model server stays as well; when all are durable the Gym ends."""
    async with gym_at(tmp_path, "three", limits={"shutdown_grace_ms": 600_000}) as gym, PolicyStub([]) as policy:
        policy.hold("r", 1)
        await gym.begin_rollout("r", task_of(), policy.address)
        await until(lambda: policy.asked, "the policy was asked")
        assert gym.process is not None
        gym.process.terminate()

        async def drains() -> bool:
            return all([(await gym.raw(role, "GET", "/checkpoint"))["draining"] for role in gym.roles])

        await until_async(drains, "all of them drain")
        checkpoint_id = gym.next_id()
        assert all(reply["ready"] for reply in (await gym.prepare(checkpoint_id)).values())
        await gym.commit(checkpoint_id)
        policy.release("r", 1)
        async with asyncio.timeout(BOUND_S):
            assert 0 == await gym.process.wait()


async def serves(gym: RunningGym) -> bool:
    """Whether the Gym answers."""
    return bool((await gym.raw("agent", "GET", "/checkpoint"))["phase"] == "idle")


async def test_the_older_route_says_nothing_about_the_protocol(gym: RunningGym) -> None:
    """N14: an unmanaged rollout is counted and no more; its policy calls carry no header of the protocol."""
    async with PolicyStub([[("add", {"n": 5}), ("add", {"n": -3})], "done"]) as policy:
        run = {"environment": "conformance", "task": task_of(), "seed": 9, "policy": policy.address}
        content = await gym.data("agent", "/run", run)
        status = await gym.raw("agent", "GET", "/checkpoint")
    assert 2 == content["body"]["turns"]
    assert 75516 == content["body"]["final"]["counter"]
    assert 0 == status["counts"]["admitted"]
    assert [] == [name for asked in policy.asked for name in asked.headers if name.lower().startswith("gym-")]
    assert {9} == {asked.body["seed"] for asked in policy.asked}


async def test_the_gate_does_not_hold_an_unmanaged_rollout(gym_of_one: RunningGym) -> None:
    """CKPT-GATE-022, CKPT-PREP-015: it runs to its end while the gate is closed, and keeps nothing from being ready."""
    async with PolicyStub([[("add", {"n": 5})], "done"]) as policy:
        checkpoint_id = gym_of_one.next_id()
        assert (await gym_of_one.prepare(checkpoint_id))["agent"]["ready"]
        run = {"environment": "conformance", "task": task_of(), "policy": policy.address}
        content = await gym_of_one.data("agent", "/run", run)
        await gym_of_one.commit(checkpoint_id)
        await gym_of_one.resume(checkpoint_id)
    assert "completed" == content["body"]["outcome"]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"environment": "chess"}, "invalid_request"),
        ({"task": {}}, "invalid_request"),
        ({"seed": "1"}, "invalid_request"),
        ({"more": 1}, "invalid_request"),
    ],
)
async def test_the_older_route_refuses_what_it_cannot_run(
    change: dict[str, object], code: str, gym_of_one: RunningGym
) -> None:
    """Mistakes are answered with a problem document."""
    policy = {"base_url": "http://127.0.0.1:9", "model": "m", "api": "responses"}
    run: dict[str, object] = {"environment": "conformance", "task": task_of(), "policy": policy}
    with pytest.raises(Refused) as raised:
        await gym_of_one.data("agent", "/run", run | change)
    assert code == raised.value.code


@pytest.mark.parametrize("path", ["/run", wire.PROBE_PATH])
@pytest.mark.parametrize("token", [None, "wrong", CONTROL_TOKEN])
async def test_the_data_plane_takes_its_own_token_only(path: str, token: str | None, gym_of_one: RunningGym) -> None:
    """CKPT-CONF-033: no token, a wrong one and that of the control plane are unauthorized."""
    with pytest.raises(Refused) as raised:
        await gym_of_one.data(
            "agent", path, {}, {"Authorization": f"Bearer {token}"} if token else {"Authorization": ""}
        )
    assert (401, "unauthorized") == (raised.value.status, raised.value.code)


async def test_a_probe_is_an_effect_on_the_live_session(gym: RunningGym, world: WorldStub, rollout: str) -> None:
    """CKPT-CONF-032 … 040: executed, repeated, refused like any effect, and unseen by the agent's own count."""
    world.status = 500
    async with PolicyStub([[("add", {"n": 0})], "done"]) as policy:
        policy.hold(rollout, 1)
        await gym.begin_rollout(rollout, task_of(world.url), policy.address)
        await until(lambda: ["1"] == policy.turns_of(rollout), "turn 1 is asked")
        add = PROBE | {"rollout_id": rollout, "request_id": f"{rollout}/1/1", "tool": "add", "args": {"n": 5}}
        first = await gym.data("resources", wire.PROBE_PATH, add)
        assert {"observation": '{"counter":15653,"draw":15648,"effects":1}'} == first
        assert first == await gym.data("resources", wire.PROBE_PATH, add)
        assert 0 == (await gym.rollouts())[rollout]["turns_done"]
        for change, code in (
            ({"request_id": f"{rollout}/1/2", "effects_done": 7}, "session_lost"),
            ({"rollout_id": "nobody", "request_id": "nobody/1/1"}, "session_lost"),
            ({"request_id": f"{rollout}/2/1"}, "invalid_request"),
            ({"request_id": f"{rollout}/1/3", "tool": "world", "args": {"tag": "x"}}, "internal"),
        ):
            with pytest.raises(Refused) as raised:
                await gym.data("resources", wire.PROBE_PATH, add | change)
            assert code == raised.value.code
        policy.release(rollout, 1)


async def test_a_rollout_whose_session_went_on_without_it_is_not_verified(gym: RunningGym, rollout: str) -> None:
    """CKPT-ENV-032: a probe has changed the session; the reply without calls ends the rollout as session_lost."""
    async with PolicyStub(["done"]) as policy:
        policy.hold(rollout, 1)
        await gym.begin_rollout(rollout, task_of(), policy.address)
        await until(lambda: ["1"] == policy.turns_of(rollout), "turn 1 is asked")
        named = {"rollout_id": rollout, "request_id": f"{rollout}/1/1"}
        await gym.data("resources", wire.PROBE_PATH, PROBE | named | {"tool": "add", "args": {"n": 5}})
        policy.release(rollout, 1)
        failure = (await gym.result_of(rollout))["failure"]
    assert ("session_lost", False) == (failure["kind"], failure["terminal"])


async def test_a_gym_without_conformance_has_no_probe(tmp_path: Path) -> None:
    """CKPT-CONF-002, CKPT-CONF-003, CKPT-CONF-041: neither feature nor environment nor probe."""
    gym = RunningGym(tmp_path, "one")
    config = gym.write_config()
    text = config.read_text().replace("conformance:\n  world_url: null\n", "")
    gym.write_config = lambda: config.write_text(text) and config  # type: ignore[method-assign] # one file for one test
    try:
        await gym.start()
        await gym.adopt()
        assert "conformance" not in (await gym.raw("agent", "GET", "/capabilities"))["features"]
        policy = {"base_url": "http://127.0.0.1:9", "model": "m", "api": "responses"}
        await gym.begin_rollout("r", task_of(), policy, outcome="unknown_environment")
        with pytest.raises(Refused):
            await gym.data("agent", wire.PROBE_PATH, PROBE | {"tool": "refuse", "args": {}})
    finally:
        await gym.close()


async def test_no_secret_leaves_the_process(tmp_path: Path) -> None:
    """C75: a whole run with a failing handler, a refused call and a snapshot; no file and no reply holds a token."""
    async with PolicyStub([[("add", {"n": 1})], [("world", {"tag": "x"})]]) as policy, WorldStub() as world:
        world.status = 500
        async with gym_at(tmp_path, "three", world_url=world.url) as gym:
            await gym.begin_rollout("r", task_of(world.url), policy.address)
            await until(lambda: world.count["x"] == 1, "the effect has failed")
            await gym.snapshot()
            with pytest.raises(Refused) as raised:
                await gym.raw("agent", "GET", "/checkpoint", headers={"Authorization": f"Bearer {DATA_TOKEN}x"})
            await gym.term()
    assert [] == leaks(tmp_path)
    assert not any(secret in str(raised.value) for secret in SECRETS)
    assert {0o600} == modes(tmp_path / "snapshots")


def leaks(directory: Path) -> list[Path]:
    """The files that hold a token."""
    written = [path for path in directory.rglob("*") if path.is_file()]
    return [path for path in written if any(secret.encode() in path.read_bytes() for secret in SECRETS)]


def modes(directory: Path) -> set[int]:
    """The modes of the files below a directory."""
    return {stat.S_IMODE(path.stat().st_mode) for path in directory.rglob("*") if path.is_file()}


async def test_without_tokens_it_does_not_serve(tmp_path: Path) -> None:
    """No token: exit code 2 and a sentence for the operator."""
    config = RunningGym(tmp_path, "one").write_config()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "reference_gym.cli",
        "serve",
        "--config",
        str(config),
        stderr=asyncio.subprocess.PIPE,
        env={key: value for key, value in os.environ.items() if not key.startswith("GYM_")},
    )
    async with asyncio.timeout(BOUND_S):
        _, err = await process.communicate()
    assert 2 == process.returncode
    assert b"--insecure-no-auth" in err


@pytest.mark.parametrize(
    ("form", "more", "expected"),
    [
        ("one", ["--role", "agent"], b"peers.resources is missing"),
        ("three", [], b"the process of the role"),
        ("one", [], b"cannot listen"),
    ],
)
async def test_what_cannot_be_served_is_said_and_leaves_nothing(
    form: str, more: list[str], expected: bytes, tmp_path: Path
) -> None:
    """A missing peer and a port that is taken: exit code 2, a sentence, and no process of it left."""
    gym = RunningGym(tmp_path, form)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = f"ports: {{agent: {taken.getsockname()[1]}}}\n"
        config = gym.write_config()
        config.write_text(config.read_text() + ports)
        gym.write_config = lambda: config  # type: ignore[method-assign] # one file for one test
        process = await asyncio.create_subprocess_exec(
            *gym.command(), *more, stderr=asyncio.subprocess.PIPE, env=environment()
        )
        async with asyncio.timeout(BOUND_S):
            _, err = await process.communicate()
    assert 2 == process.returncode, err
    assert expected in err
    await until(lambda: not processes_of(config), "nothing of it is left")


def processes_of(config: Path) -> list[str]:
    """The processes whose command line names a settings file."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(config).encode() in path.read_bytes():
                found.append(path.parent.name)
    return found
