# SPDX-License-Identifier: Apache-2.0
"""What a controller does and sends, seen from the wire: who it is, what comes first, what never leaves it."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from reference_rl import deployment, epochs
from reference_rl.columns import SWITCHES
from reference_rl.deployment import Deployment
from reference_rl.errors import Incompatible, RecoveryFailed, SettingsError, Superseded
from reference_rl.events import Events
from reference_rl.ledger import Ledger
from reference_rl.metrics import collect
from reference_rl.settings import TokenSource, settings_of
from reference_rl.transitions import plan
from spec import wire
from tests.rl.harness import running, settings, until
from tests.rl.processes import TOKENS
from tests.rl.scripted import Fault, ScriptedParticipant, calls_of, one_gym, serving, three_servers
from tests.rl.test_deployment import discovered
from tests.rl.test_ledger import planned
from tests.rl.test_public import files_with

A, B, C = "r1_g0_s0", "r1_g0_s1", "r1_g0_s2"


async def a_whole_run(tmp_path: Path, servers: tuple[ScriptedParticipant, ...], **changes: Any) -> None:
    """Run, take a snapshot, lose every participant, restore, finish: every kind of call is sent."""
    agent = servers[0]
    async with running(settings(tmp_path / "run", agent, **changes)) as run:
        await until(lambda: len(agent.runs) == 3, "three rollouts started")
        await run.event("dispatched")
        for rollout_id, turns in ((A, 1), (B, 2)):
            agent.turn(rollout_id, turns)
        agent.runs[C].state = "restart"
        await until(lambda: C in agent.runs and agent.runs[C].attempt, "C was retired and started again")
        assert "published" == (await run.snapshot()).outcome
    for server in servers:
        server.new_life()
    async with running(settings(tmp_path / "run", agent, **changes)) as run:
        await run.event("restarted")
        await until(lambda: len(agent.runs) == 3, "all run again")
        await run.event("dispatched") if C not in agent.runs else None
        for rollout_id in list(agent.runs):
            agent.finish(rollout_id)
        assert 0 == await run.done()


async def test_the_first_call_that_changes_anything_is_an_abort(tmp_path: Path) -> None:
    """CKPT-CTRL-009, CKPT-CTRL-012: `<epoch>-0` is aborted first everywhere, its claim is on disk before it leaves."""
    servers = three_servers()
    claimed: list[bool] = []
    for server in servers:
        server.watch = lambda operation: (
            claimed.append((tmp_path / "run/epochs/1").exists()) if operation in "abort" else None
        )
    async with serving(*servers), running(settings(tmp_path / "run", servers[0])) as run:
        await run.event("in_office")
        await until(lambda: len(servers[0].runs) == 3, "three rollouts started")
    for server in servers:
        first = next(r for r in server.received if r.method == "POST")
        assert ("abort", "1-0") == (first.operation, json.loads(first.body)["checkpoint_id"])
    assert [True] * 3 == claimed[:3]


async def test_nothing_else_is_sent_before_everybody_knows_the_controller(tmp_path: Path) -> None:
    """CKPT-CTRL-013: one participant hangs on that abort: the others hear nothing more until it has answered."""
    servers = three_servers()
    servers[1].hold["abort"] = asyncio.Event()
    config: dict[str, Any] = {"client": {"grace_s": 20.0}}
    async with serving(*servers), running(settings(tmp_path / "run", servers[0], **config)) as run:
        await until(lambda: all("abort" in calls_of(s) for s in servers), "the abort is everywhere")
        done, _ = await asyncio.wait([run.task], timeout=0.4)
        assert not done
        assert {"abort"} == {r.operation for s in servers for r in s.received if r.method == "POST"}
        servers[1].hold["abort"].set()
        await until(lambda: len(servers[0].runs) == 3, "then rollouts start")


async def test_a_controller_picks_again_three_times_at_most(tmp_path: Path) -> None:
    """CKPT-CTRL-015: always refused: after the first claim and three further ones it stops for good."""
    gym = one_gym()
    gym.faults["abort"] = Fault("stale_controller")
    async with serving(gym), running(settings(tmp_path / "run", gym)) as run:
        with pytest.raises(Superseded):
            await run.done()
    assert 4 == epochs.highest(tmp_path / "run")


async def test_a_claim_is_above_what_any_participant_obeys(tmp_path: Path) -> None:
    """CKPT-CTRL-011: one of three obeys epoch 41: the claim is 42, and the next start's is 43."""
    servers = three_servers()
    servers[1].controller = wire.ControllerPair.of(41, "somebody")
    async with serving(*servers):
        for expected in (42, 43):
            async with running(settings(tmp_path / "run", servers[0])) as run:
                assert expected == (await run.event("in_office"))["epoch"]


async def test_each_start_is_another_controller(tmp_path: Path) -> None:
    """CKPT-CTRL-018: two starts of one run, and a run of another name, never share an id."""
    gym, ids = one_gym(), []
    async with serving(gym):
        for number in range(3):
            config = settings(tmp_path / str(number // 2) / "run", gym)
            async with running(config) as run:
                await run.event("in_office")
                ids.append(run.session.tenure.controller.id)
    assert 3 == len(set(ids))


async def test_what_a_snapshot_names_must_be_there(tmp_path: Path) -> None:
    """CKPT-DISC-024: the ledger is lost, a participant that the snapshot names answers 404: an error that names it."""
    servers = three_servers()
    agent, model, resources = servers
    async with serving(*servers):
        async with running(settings(tmp_path / "run", agent)) as run:
            await until(lambda: len(agent.runs) == 3, "three rollouts started")
            await run.event("dispatched")
            await run.snapshot()
        for path in (tmp_path / "run").glob("ledger.sqlite*"):
            path.unlink()
        resources.gone_404 = True
        agent.peers = [model]
        async with running(settings(tmp_path / "run", agent)) as run:
            with pytest.raises((Incompatible, RecoveryFailed), match="resources"):
                await run.done()


async def test_a_role_is_a_label(tmp_path: Path) -> None:
    """CKPT-DISC-027: with roles that say something else, or nothing, each participant gets the same calls."""
    seen = []
    for number, roles in enumerate((("agent", "model", "resources"), ("resources", "x", "agent"))):
        servers = three_servers()
        for server, role in zip(servers, roles, strict=True):
            server.role = role
        async with serving(*servers):
            await a_whole_run(tmp_path / str(number), servers)
        seen.append({s.name: {r.operation for r in s.received} for s in servers})
    assert seen[0] == seen[1]
    assert {"prepare", "commit", "resume", "restore", "abort", "retire"} <= seen[0]["resources"]


async def test_what_is_sent_is_plain_and_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-ID-005, CKPT-ROLL-034, CKPT-SEC-007, CKPT-ID-029…031: a whole run with a restore, byte by byte.

    No number has a fraction or an exponent, no body, address or file of the run holds a token, every call that changes
    something says who sends it and to which incarnation.
    """
    for name, value in TOKENS.items():
        monkeypatch.setenv(name, value)
    servers = three_servers()
    async with serving(*servers):
        await a_whole_run(tmp_path, servers)
    received = [r for server in servers for r in server.received]
    assert {"prepare", "commit", "resume", "restore", "abort", "retire", "start", "acks"} <= {
        r.operation for r in received
    }

    def refuse(text: str) -> Any:
        raise AssertionError(f"{text} is no integer")

    for request in received:
        if request.body:
            json.loads(request.body, parse_float=refuse, parse_constant=refuse)
        assert not any(token in request.target or token.encode() in request.body for token in TOKENS.values())
        assert f"Bearer {TOKENS['GYM_CHECKPOINT_TOKEN']}" == request.headers["Authorization"]
        if request.method == "POST":
            wanted = {"Gym-Controller-Id", "Gym-Controller-Epoch", "Gym-Expect-Incarnation"}
            assert wanted <= {name.title() for name in request.headers}
    for request in received:
        if request.operation in ("start", "restore"):
            policy = json.loads(request.body)["policy"]
            assert {"base_url", "model", "api"} == policy.keys()
            assert re.fullmatch(r"https?://[^@?#]+", policy["base_url"])
    assert [] == files_with(tmp_path, TOKENS.values())


def run_of(**changes: Any) -> dict[str, Any]:
    """Return the smallest run.yaml."""
    content: dict[str, Any] = {"run_id": "r", "run_dir": "x", "gyms": [{"alias": "g", "url": "http://h"}]}
    policy = {"base_url": "http://h", "model": "m", "api": "responses"}
    return {**content, "policy": policy, "tasks": {"environment": "e"}, **changes}


def test_tokens_come_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-SEC-004, CKPT-ROLL-034: a token in the settings is refused, and so is a policy address with a password."""
    monkeypatch.setenv("MY_TOKEN", "from the environment")
    (tmp_path / "token").write_text("from the file\n")
    assert "from the environment" == TokenSource(env="MY_TOKEN").read()
    assert "from the file" == TokenSource(file=tmp_path / "token").read()
    assert TokenSource(env="NOT_SET_ANYWHERE").read() is None
    for tokens in ({"control": "secret"}, {"control": {"value": "secret"}}):
        with pytest.raises(SettingsError, match=r"tokens\.control"):
            settings_of(run_of(tokens=tokens), tmp_path)
    with pytest.raises(SettingsError, match=r"policy\.base_url"):
        settings_of(run_of(policy={"base_url": "http://me:secret@h", "model": "m", "api": "responses"}), tmp_path)
    with pytest.raises(SettingsError, match="cannot be read"):
        TokenSource(file=tmp_path / "missing").read()


async def test_the_highest_common_version_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPT-VER-003, CKPT-VER-004: of what the controller and every participant speak; none in common is said."""
    servers = three_servers()
    monkeypatch.setattr(deployment, "SPOKEN_VERSIONS", ("1.0", "1.2", "1.10"))
    for versions, expected in (
        ((["1.0", "1.10", "1.2"], ["1.2", "1.0", "1.10"], ["1.10", "2.0"]), "1.10"),
        ((["1.0", "1.2"], ["1.2", "1.0", "1.10"], ["1.2"]), "1.2"),
        ((["1.0"], ["1.0"], ["1.2", "1.0"]), "1.0"),
        ((["1.0"], ["1.0"], ["1.2"]), None),
    ):
        for server, spoken in zip(servers, versions, strict=True):
            server.versions = spoken
        async with serving(*servers):
            gym = await discovered([servers[0].url])
        assert expected == gym.protocol_version
        if expected is None:
            with pytest.raises(Incompatible, match=r"no protocol version in common: agent 1\.0; .*resources 1\.2"):
                gym.check(SWITCHES[3], [])


async def test_unknown_features_and_profiles_are_ignored(tmp_path: Path) -> None:
    """CKPT-VER-009: names from a later version change nothing."""
    servers = three_servers()
    for server in servers:
        server.features = ["time_travel"]
        server.profiles = [*server.profiles, "immortality"]
    async with serving(*servers):
        await a_whole_run(tmp_path, servers)


async def test_no_field_of_a_feature_goes_to_a_server_without_it(tmp_path: Path) -> None:
    """CKPT-VER-007: no artifact call and no `http` scheme where neither is listed; who needs them there is refused."""
    servers = three_servers()
    async with serving(*servers):
        await a_whole_run(tmp_path, servers)
        targets = [body["target"]["scheme"] for s in servers for body in calls_of(s)["commit"]]
        sources = [body["source"]["scheme"] for s in servers for body in calls_of(s)["restore"]]
        assert {"file"} == {*targets, *sources}
        assert not [r for s in servers for r in s.received if "/artifacts/" in r.target]
        gyms = [{"alias": "gym", "url": servers[0].url, "shares_files": False}]
        async with running(settings(tmp_path / "other/run", servers[0], gyms=gyms)) as run:
            with pytest.raises(Incompatible, match="does not serve its cuts over HTTP"):
                await run.done()


async def test_two_owners_of_rollouts_are_refused() -> None:
    """CKPT-DISC-033: two participants that both own rollouts: refused, and both are named."""
    servers = three_servers()
    servers[1].owns = ("rollouts", "ledger")
    async with serving(*servers):
        gym: Deployment = await discovered([servers[0].url])
    with pytest.raises(Incompatible, match="Exactly one participant must own rollouts; here: agent, model"):
        gym.check(SWITCHES[2], [])


def test_names_of_metrics_do_not_grow_with_rollouts(tmp_path: Path) -> None:
    """C74, CKPT-SEC-027: a thousand rollouts with every outcome, and three: the same names, no rollout's id."""
    names = []
    for siblings in (3, 1000):
        ledger = Ledger(tmp_path / f"{siblings}.sqlite", "r1")
        ledger.call(plan, [planned(siblings=siblings)])
        events = Events()
        for number in range(siblings):
            for event in ("finished", "failed", "retried", "surplus", "refused"):
                # Three rollouts see every kind; whatever a Gym calls its own failures comes to one label.
                kind = ("session_lost", f"my_own_{number}", "policy_unavailable")[number % 3]
                events.emit(event, rollout_id=f"r_g0_s{number}", attempt=number, reason=kind)
        events.emit(
            "restarted",
            rollouts=[{"rollout_id": f"x{n}", "how": "continued", "turns_done": 2} for n in range(siblings)],
        )
        values = collect(SWITCHES[3], ledger, events, None)
        assert 2 * siblings == values["ckpt_turns_saved"]
        assert siblings == sum(v for k, v in values.items() if k.startswith('ckpt_outcomes{outcome="failed"'))
        names.append(set(values))
        ledger.close()
    assert names[0] == names[1]
    assert not [name for name in names[0] if "_g0_" in name or "my_own" in name]
