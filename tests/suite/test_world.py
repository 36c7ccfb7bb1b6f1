# SPDX-License-Identifier: Apache-2.0
"""The world: when effects begin and end, how they fail, what is counted."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from conformance.errors import SuiteFault
from conformance.loopback import Loopback
from conformance.patience import Patience
from conformance.world import World


def effect(http: httpx.Client, world: World, tag: str = "t", request_id: str = "r1/1/1", rollout: str = "r1") -> Any:
    """Send one effect."""
    body = {"tag": tag, "rollout_id": rollout, "attempt": 0, "turn": 1, "request_id": request_id}
    return http.post(world.url + "/effects", json=body)


def test_it_answers_the_value_of_a_tag(http: httpx.Client, world: World) -> None:
    """A tag without a value is answered 1."""
    world.value("t", 11)
    assert effect(http, world).json() == {"value": 11}
    assert effect(http, world, tag="u", request_id="r1/1/2").json() == {"value": 1}


def test_a_repeated_request_id_happens_once(http: httpx.Client, world: World) -> None:
    """The second call is answered and counted as a call, not as something that happened."""
    effect(http, world)
    effect(http, world)
    effect(http, world, request_id="r1/1/2")
    assert world.happened("t") == 2
    assert [call.repeated for call in world.calls("t")] == [False, True, False]


def test_a_held_effect_ends_on_release(http: httpx.Client, world: World) -> None:
    """Hold → begun and open; release → ended."""
    with ThreadPoolExecutor(1) as pool, world.hold("t") as hold:
        sent = pool.submit(effect, http, world)
        assert hold.wait_begun().state == "begun"
        assert world.happened("t") == 0
        hold.release()
        assert sent.result(5).status_code == 200
    assert world.wait_ended("t").state == "ended"


def test_a_failing_effect_did_not_happen(http: httpx.Client, world: World) -> None:
    """Fails as often as ordered, by a status or by a cut connection."""
    world.fail("t", status=503)
    world.fail("t", status=None)
    assert effect(http, world).status_code == 503
    with pytest.raises(httpx.TransportError):
        effect(http, world)
    assert effect(http, world).status_code == 200
    assert [call.state for call in world.calls("t")] == ["failed", "failed", "ended"]
    assert world.happened() == 1


def test_verification_is_its_own_kind(http: httpx.Client, world: World) -> None:
    """It is answered with an object, held and failed apart from effects."""
    world.fail(kind="verify", rollout_id="r1")
    answers = [http.post(world.url + "/verify", json={"rollout_id": "r1", "attempt": 0}) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [500, 200]
    assert answers[1].json() == {"verified": True}
    assert world.calls() == []
    assert len(world.calls(kind="verify")) == 2


def test_a_port_that_is_taken_is_a_fault_of_the_suite(loopback: Loopback, patience: Patience, world: World) -> None:
    """A fixed world URL whose port somebody else holds is said at once."""
    with pytest.raises(SuiteFault, match="cannot listen"):
        World(loopback, patience, int(world.url.rpartition(":")[2]))
