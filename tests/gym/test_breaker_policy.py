# SPDX-License-Identifier: Apache-2.0
"""Hostile addresses of a policy."""

from __future__ import annotations

import pytest

from reference_gym.participant.policy_http import PolicyHttp
from reference_gym.participant.state import Policy

ADDRESSES = (
    "http://a..b/v1",
    f"http://{'a' * 70}.example/v1",
    "http://127.0.0.1:99999/v1",
    "http://127.0.0.1:x/v1",
    "http://[::1/v1",
    "http://%00aaa/v1",
)


@pytest.mark.parametrize("base_url", ADDRESSES)
async def test_an_address_that_names_no_host_is_a_policy_that_is_not_there(base_url: str) -> None:
    """CKPT-ROLL-033: it may be replaced until the patience ends, so it is no refusal that ends the rollout for good."""
    way = PolicyHttp(None, 5.0)
    answer = await way.call(Policy(base_url, "m", "chat_completions"), {"messages": []}, None)
    await way.aclose()
    assert None is answer.status
