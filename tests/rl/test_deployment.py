# SPDX-License-Identifier: Apache-2.0
"""Discovery: who takes part, what is refused and why, and the order of stages."""

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from reference_rl.client import ClientSettings, Controller, make_http
from reference_rl.columns import SWITCHES
from reference_rl.deployment import Deployment, differences, everywhere, raise_first
from reference_rl.errors import Incompatible, Superseded, Unreachable
from reference_rl.retry import RetryPolicy
from spec.messages import SnapshotManifest
from tests.rl.scripted import ENVIRONMENT, ScriptedParticipant, one_gym, serving, three_servers

FAST = ClientSettings(RetryPolicy(2, 0.01, 0.02), call_ms=500, grace_s=0.5)


async def discovered(urls: Sequence[str], required: Sequence[str] = ()) -> Deployment:
    """Discover a Gym and close the pool again."""
    async with make_http(FAST) as http:
        gym = Deployment("gym", lambda: urls, http, Controller("c"), settings=FAST)
        await gym.discover(required)
        return gym


async def test_one_address_is_enough() -> None:
    """CKPT-DISC-021: the participants that capabilities list are found, in order of their stages."""
    servers = three_servers()
    async with serving(*servers):
        gym = await discovered([servers[0].url])
    assert ["agent", "model", "resources"] == [p.name for p in gym.participants]
    assert [["agent"], ["model"], ["resources"]] == [[p.name for p in stage] for stage in gym.stages()]
    assert [["resources"], ["model"], ["agent"]] == [[p.name for p in s] for s in gym.stages(descending=True)]


async def test_a_server_that_owns_nothing_is_no_participant() -> None:
    """CKPT-DISC-022: a proxy among the configured servers answers 404 and is left alone."""
    gym, proxy = one_gym(), one_gym()
    proxy.gone_404 = True
    async with serving(gym, proxy):
        found = await discovered([gym.url, proxy.url])
    assert ["gym"] == [p.name for p in found.participants]


async def test_a_former_participant_that_answers_404_is_an_error() -> None:
    """N11, CKPT-DISC-023, -025: named by a server or the settings, or known before: the error says which.

    With several addresses in the settings one that answers 404 is no participant, unless it was one.
    """
    agent, model, resources = three_servers()
    resources.gone_404 = True
    loose = one_gym()
    async with serving(loose, resources):
        assert ["gym"] == [p.name for p in (await discovered([loose.url, resources.url])).participants]
        with pytest.raises(Incompatible, match="resources: participant before, and no server answers by that name"):
            await discovered([loose.url, resources.url], ["gym", "resources"])
    async with serving(agent, model, resources):
        with pytest.raises(Incompatible, match="resources was named as a participant and answers 404"):
            await discovered([agent.url])
        with pytest.raises(Incompatible, match="answers 404"):
            await discovered([resources.url])
        with pytest.raises(Incompatible, match="judge: participant before"):
            await discovered([model.url], ["model", "judge"])


async def test_one_name_with_two_states_is_refused() -> None:
    """CKPT-DISC-026: two participants of one name and different incarnations cannot be told apart."""
    first, second = one_gym(), one_gym()
    async with serving(first, second):
        with pytest.raises(Incompatible, match="both call themselves 'gym'"):
            await discovered([first.url, second.url])
        second.incarnation = first.incarnation
        assert ["gym"] == [p.name for p in (await discovered([first.url, second.url])).participants]


def _no_coordinator(gym: ScriptedParticipant) -> None:
    gym.workers = {"count": 4, "coordinated": False}


def _no_profile(gym: ScriptedParticipant) -> None:
    gym.profiles = ["results"]


def _no_owner(gym: ScriptedParticipant) -> None:
    gym.owns = ("sessions",)


def _other_version(gym: ScriptedParticipant) -> None:
    gym.versions = ["1.7", "2.0"]


REFUSALS = {
    _no_coordinator: "gym runs 4 workers without a coordinator: each would hold a part of the state",
    _no_profile: "gym lacks the profile checkpoint",
    _no_owner: "Exactly one participant must own rollouts; here: none",
    _other_version: "gym speaks protocol 1.7, 2.0, this controller 1.0",
}


@pytest.mark.parametrize("change", REFUSALS)
async def test_what_cannot_be_used_is_refused_with_a_sentence(change: Any) -> None:
    """C73, CKPT-ENV-024, -030, CKPT-VER-004: the controller refuses with a sentence that names and tells why."""
    gym = one_gym()
    change(gym)
    async with serving(gym):
        found = await discovered([gym.url])
    with pytest.raises(Incompatible) as caught:
        found.check(SWITCHES[3], [ENVIRONMENT])
    assert REFUSALS[change] in str(caught.value)


async def test_a_missing_environment_is_named() -> None:
    """What the run needs and the Gym does not offer is said before anything is started."""
    gym = one_gym()
    async with serving(gym):
        found = await discovered([gym.url])
    with pytest.raises(Incompatible, match="does not offer chess; it offers scripted"):
        found.check(SWITCHES[2], ["chess"])


async def test_calls_to_all_never_stop_at_a_failure() -> None:
    """CKPT-STAGE-009, CKPT-STAGE-010: all at the same time, every outcome kept, a supersession first."""
    servers = three_servers()
    async with serving(*servers):
        gym = await discovered([servers[0].url])
    meeting = asyncio.Barrier(3)

    async def call(participant: Any) -> str:
        await meeting.wait()
        if participant.name == "agent":
            raise OSError("down")
        if participant.name == "model":
            raise Superseded("taken over")
        return "done"

    outcomes = await everywhere(gym.participants, call)
    assert [None, None, "done"] == [o.value for o in outcomes]
    with pytest.raises(Superseded):
        raise_first(outcomes)


def manifest_of(gym: Deployment, **changes: Any) -> SnapshotManifest:
    """Return the manifest of a snapshot of this Gym, with changes to each participant's entry."""
    cuts = []
    for participant in gym.participants:
        digest = "sha256:" + "0" * 64
        entry = {
            "name": participant.name,
            "incarnation": "i-old",
            "owns": list(participant.capabilities.owns),
            "stage": participant.stage,
            "state_schema": {"id": "scripted", "version": 1},
            "environments": [{"name": ENVIRONMENT, "state_version": "1"}],
            "manifest": {"name": "manifest.json", "digest": digest, "bytes": 1},
            "index": {"name": "rollouts.jsonl", "digest": digest, "records": 0},
        }
        cuts.append(entry | changes)
    content = {"protocol_version": "1.0", "schema_version": 1, "run_id": "r1", "checkpoint_id": "1-1"}
    content |= {"trainer_step": 0, "weights_version": 0, "restart_count": 0, "files": []}
    return SnapshotManifest.of({**content, "gyms": [{"alias": "gym", "included": True, "participants": cuts}]})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, []),
        ({"stage": 77, "incarnation": "i-2"}, []),
        (
            {"name": "other"},
            ["other is in the snapshot and not in the Gym.", "gym is in the Gym and not in the snapshot."],
        ),
        ({"state_schema": {"id": "scripted", "version": 2}}, ["scripted version 2; it reads scripted version 1"]),
        ({"state_schema": {"id": "foreign", "version": 1}}, ["foreign version 1; it reads scripted version 1"]),
        ({"environments": [{"name": "chess", "state_version": "1"}]}, ["no longer offers chess"]),
        ({"environments": [{"name": ENVIRONMENT, "state_version": "0"}]}, ["was saved in version 0, now it is 1"]),
    ],
)
async def test_compatibility_names_what_differs(changes: dict[str, Any], says: list[str]) -> None:
    """CKPT-RESTART-021…023: facts that matter are judged and named; others never matter."""
    gym = one_gym()
    async with serving(gym):
        found = await discovered([gym.url])
    reasons = differences(manifest_of(found, **changes), "gym", found)
    assert len(says) == len(reasons)
    assert all(text in reason for text, reason in zip(says, reasons, strict=True))


async def test_an_unreachable_server_is_named() -> None:
    """CKPT-DUTY-021: the report of a failed call names the participant."""
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
        await discovered(["http://127.0.0.1:1"])


async def test_another_transport_can_be_plugged_in() -> None:
    """The way to the participants is one argument: nothing but the transport knows the network."""

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404)

    async with make_http(FAST, httpx.MockTransport(answer)) as http:
        with pytest.raises(Incompatible):
            await Deployment("gym", lambda: ["http://nowhere"], http, Controller("c")).discover()
