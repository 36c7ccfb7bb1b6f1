# SPDX-License-Identifier: Apache-2.0
"""The conformance environment itself: tasks, tools, observations, verification, and the vector."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from conformance.case import DEFAULT_SCRIPT, Case, Rollout
from conformance.controller import Json
from conformance.gym import CONFORMANCE, RESTART_ONLY
from conformance.registry import check
from conformance.script import (
    VECTOR,
    VECTOR_SEED,
    VECTOR_WORLD_TAG,
    VECTOR_WORLD_VALUE,
    ToolCall,
    add,
    grow,
    script,
    world,
)

COMMON = ("conformance",)
TOOLS = ["add", "world", "grow", "refuse"]
BLOB_SHA256 = "4e4c294b331f7a2099a379bec34b9f9fc03dc46ab465d998f4d683da53487e6d"
OBSERVATIONS = [
    '{"counter":15653,"draw":15648,"effects":1}',
    '{"counter":75516,"draw":59866,"effects":2}',
    '{"error":"refused"}',
    '{"counter":75527,"effects":3,"value":11}',
    '{"blob_sha256":"' + BLOB_SHA256 + '","counter":75527,"effects":4}',
    '{"counter":115667,"draw":40140,"effects":5}',
]
FINAL = {"blob_bytes": 1000, "blob_sha256": BLOB_SHA256, "counter": 115667, "effects": 5, "rng": 2630631676}
REWARD = 0.9560546875
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def observations(body: Json) -> list[str]:
    """Return the texts that answered the tool calls of a body, in either form of conversation."""
    found = []
    for message in body["messages"]:
        if message.get("role") == "tool":
            found.append(message["content"])
        elif message.get("type") == "function_call_output":
            found.append(message["output"])
    return found


@check(
    "CKPT-CONF-017",
    "CKPT-CONF-008",
    "CKPT-CONF-009",
    "CKPT-CONF-010",
    "CKPT-CONF-011",
    "CKPT-CONF-012",
    "CKPT-CONF-014",
    "CKPT-CONF-015",
    "CKPT-CONF-016",
    "CKPT-CONF-018",
    "CKPT-CONF-019",
    "CKPT-CONF-021",
    "CKPT-CONF-023",
    "CKPT-CONF-024",
    "CKPT-CONF-025",
    "CKPT-CONF-030",
    "CKPT-CONF-031",
    "CKPT-CONF-043",
    "CKPT-CONF-044",
    "CKPT-CONF-045",
    "CKPT-CONF-046",
    "CKPT-CONF-047",
    features=COMMON,
    world=True,
    budget=("quick", "demo"),
)
def the_vector(case: Case) -> None:
    """The vector of the specification, to the last digit: observations, final state and reward."""
    case.world.value(VECTOR_WORLD_TAG, VECTOR_WORLD_VALUE)
    rollout = case.start(VECTOR, seed=VECTOR_SEED)
    body = case.body(rollout, "CKPT-CONF-014")
    seen = observations(body)
    case.equal(len(OBSERVATIONS), len(seen), "one tool message per call", "CKPT-CONF-011", "CKPT-CONF-010")
    wanted: dict[str, tuple[str, ...]] = {
        "add": ("CKPT-CONF-017", "CKPT-CONF-043", "CKPT-CONF-044", "CKPT-CONF-045", "CKPT-CONF-016"),
        "refuse": ("CKPT-CONF-025",),
        "world": ("CKPT-CONF-021", "CKPT-CONF-046"),
        "grow": ("CKPT-CONF-023", "CKPT-CONF-024", "CKPT-CONF-047"),
    }
    calls = [turn[0] for turn in VECTOR.turns if not isinstance(turn, str)]
    for call, expected, got in zip(calls, OBSERVATIONS, seen, strict=True):
        case.equal(expected, got, f"the observation of {call}", *wanted[call.name])
    case.equal("completed", body["outcome"], "the outcome", "CKPT-CONF-012")
    case.equal(FINAL, body.get("final"), "the final state", "CKPT-CONF-031", "CKPT-CONF-015")
    case.equal(REWARD, body["reward"], "the reward", "CKPT-CONF-030")
    first = case.witness.generations(rollout.rollout_id, 1)[0].body
    said = [(message["role"], message["content"]) for message in first["messages"]]
    case.equal([("user", f"conformance seed={VECTOR_SEED}")], said, "the first call", "CKPT-CONF-008")
    tools = [tool["function"]["name"] for tool in first.get("tools", [])]
    case.equal(TOOLS, tools, "the tools in their order", "CKPT-CONF-009")
    posts = len(case.world.calls(rollout_id=rollout.rollout_id))
    case.equal(1, posts, "POSTs to the outside", "CKPT-CONF-018", "CKPT-CONF-019")


@check("CKPT-CONF-023", "CKPT-CONF-024", features=COMMON)
def a_blob_grows_at_its_end(case: Case) -> None:
    """Grown twice, by lengths that end within the pattern: the second piece goes on where the first one ended."""
    sizes, blob = (300, 1, 450), bytes(i % 251 for i in range(751))
    body = case.body(case.start(script(*map(grow, sizes), "done")))
    for n, text in enumerate(observations(body), 1):
        grown = sum(sizes[:n])
        wanted = hashlib.sha256(blob[:grown]).hexdigest()
        shown = json.loads(text)["blob_sha256"]
        case.equal(wanted, shown, f"the digest of {grown} bytes", "CKPT-CONF-023", "CKPT-CONF-024")
    case.equal(sum(sizes), body["final"]["blob_bytes"], "its length", "CKPT-CONF-023")


@check("CKPT-ROLL-032", "CKPT-ROLL-062", "CKPT-ROLL-063", features=COMMON, budget="quick")
def both_forms_of_the_policy_lead_to_one_end(case: Case) -> None:
    """A rollout through `responses` ends as one through `chat_completions`; each calls the path of its form."""
    ends = {}
    for api in ("chat_completions", "responses"):
        rollout = case.start(policy=case.witness.policy(api=api))
        body = case.body(rollout, "CKPT-ROLL-032")
        ends[api] = (body["final"], body["reward"], body["turns"], observations(body))
        calls = case.witness.generations(rollout.rollout_id)
        case.equal({api}, {call.api for call in calls}, "the form", "CKPT-ROLL-062", "CKPT-ROLL-032")
        case.equal({"witness"}, {call.body["model"] for call in calls}, "the model", "CKPT-ROLL-063")
    case.equal(ends["chat_completions"], ends["responses"], "the same end", "CKPT-ROLL-032")


@check("CKPT-CONF-004", "CKPT-CONF-001", "CKPT-CONF-042", features=COMMON, budget="quick")
def the_restart_only_twin_behaves_alike(case: Case) -> None:
    """Both environments are listed with their continuation, and one script ends alike in both."""
    rows = {row["name"]: row for row in case.agent.capabilities["environments"]}
    continues = "export_restore" if "turn-recovery" in case.gym.profiles else rows[CONFORMANCE]["continuation"]
    for name, continuation, key in (
        (CONFORMANCE, continues, "CKPT-CONF-001"),
        (RESTART_ONLY, "restart_only", "CKPT-CONF-042"),
    ):
        row = rows.get(name, {})
        got = (row.get("continuation"), row.get("verify"))
        case.equal((continuation, "wait"), got, f"{name} is listed", key)
    expected = case.baseline()
    case.equal(expected, case.baseline(environment=RESTART_ONLY), "the same body", "CKPT-CONF-004")


@check("CKPT-CONF-005", "CKPT-CONF-006", "CKPT-ROLL-006", features=COMMON, budget="quick")
def tasks_have_exactly_three_fields(case: Case) -> None:
    """A task that lacks a field, has another one, or a foreign world is `invalid`; a null world is fine."""
    good = {"seed": 1, "world_url": None, "verify_in_world": False}
    wrong: list[Any] = [{k: v for k, v in good.items() if k != name} for name in good]
    wrong += [{**good, "more": 1}, {**good, "seed": -1}, {**good, "seed": 2**32}, {**good, "seed": "1"}]
    wrong += [{**good, "verify_in_world": 0}, {**good, "world_url": 7}, {**good, "seed": True}]
    for task in wrong:
        outcome = case.outcome({**case.item(case.new_id()), "task": task})
        case.equal("invalid", outcome["outcome"], f"the task {json.dumps(task)}", "CKPT-CONF-005", "CKPT-ROLL-006")
    foreign = {**good, "world_url": "http://127.0.0.1:9/elsewhere"}
    outcome = case.outcome({**case.item(case.new_id()), "task": foreign})
    case.equal("invalid", outcome["outcome"], "a foreign world", "CKPT-CONF-006")
    for task in (good, {**good, "seed": 2**32 - 1}):
        outcome = case.outcome({**case.item(case.new_id()), "task": task})
        case.equal("started", outcome["outcome"], f"the task {json.dumps(task)}", "CKPT-CONF-005")


@check("CKPT-CONF-007", features=COMMON)
def the_seed_of_the_start_is_ignored(case: Case) -> None:
    """The environment goes by the task's seed, whatever the start call says."""
    expected = case.baseline(seed=7)
    rollout_id = case.new_id()
    item = {**case.item(rollout_id, seed=7), "seed": 99}
    case.witness.script(rollout_id, DEFAULT_SCRIPT)
    case.equal("started", case.outcome(item)["outcome"], "it starts")
    body = case.body(Rollout(rollout_id, 0, item, DEFAULT_SCRIPT))
    case.equal(expected["final"], body["final"], "the same end", "CKPT-CONF-007")


@check("CKPT-CONF-013", "CKPT-ROLL-036", "CKPT-RESULT-008", features=COMMON, budget=("quick", "demo"))
def max_turns_truncates(case: Case) -> None:
    """After `max_turns` turns the rollout ends as `truncated`, verified, without another policy call."""
    rollout = case.start(script(add(1), add(2), add(3), "done"), max_turns=2)
    body = case.body(rollout)
    got = (body["outcome"], body["turns"], body["final"]["effects"])
    case.equal(("truncated", 2, 2), got, "the body", "CKPT-CONF-013", "CKPT-ROLL-036", "CKPT-RESULT-008")
    case.equal(2, case.witness.asked(rollout.rollout_id), "policy calls", "CKPT-CONF-013")


@check("CKPT-CONF-026", "CKPT-CONF-027", "CKPT-CONF-048", features=COMMON, world=True, budget="quick")
def what_does_not_fit_is_invalid(case: Case) -> None:
    """An unknown tool and arguments that do not fit show `invalid`, change nothing, and count as effects."""
    wrong = [
        ToolCall("nothing", {}),
        ToolCall("add", {}),
        ToolCall("add", {"n": 10**6 + 1}),
        ToolCall("add", {"n": "1"}),
        ToolCall("add", {"n": 1, "more": 2}),
        ToolCall("grow", {"bytes": -1}),
        ToolCall("world", {"tag": "x" * 65}),
        ToolCall("refuse", {"more": 1}),
    ]
    rollout = case.start(script([*wrong, world("after")], "done"))
    body = case.body(rollout)
    case.equal(['{"error":"invalid"}'] * len(wrong), observations(body)[:-1], "the observations", "CKPT-CONF-026")
    case.equal(1, body["final"]["effects"], "only the world effect changed the state", "CKPT-CONF-048")
    request = case.world.calls("after", rollout_id=rollout.rollout_id)[0].request_id
    case.equal(f"{rollout.rollout_id}/1/{len(wrong) + 1}", request, "they count for request ids", "CKPT-CONF-027")


@check("CKPT-CONF-028", "CKPT-CONF-029", "CKPT-CONF-052", features=COMMON, world=True, budget="quick")
def verification_may_ask_the_world(case: Case) -> None:
    """With `verify_in_world` one POST verifies; an answer that is not 200 is the failure `verification_failed`."""
    fine = case.start(script("done"), verify_in_world=True)
    case.body(fine, "CKPT-CONF-028")
    calls = case.world.calls(rollout_id=fine.rollout_id, kind="verify")
    case.equal([0], [call.attempt for call in calls], "one POST with the attempt", "CKPT-CONF-028")
    rollout_id = case.new_id()
    case.world.fail(rollout_id=rollout_id, kind="verify", times=9)
    failure = case.failure(case.start(script("done"), rollout_id=rollout_id, verify_in_world=True), "CKPT-CONF-029")
    case.equal("verification_failed", failure["kind"], "the kind", "CKPT-CONF-029")
    case.equal(False, failure["terminal"], "not terminal", "CKPT-CONF-052")
    calls = case.world.calls(rollout_id=rollout_id, kind="verify")
    case.equal(1, len(calls), "one POST, also where it is not answered 200", "CKPT-CONF-028")


@check("CKPT-CONF-003", "CKPT-ROLL-008", budget="quick")
def an_unlisted_environment_is_unknown(case: Case) -> None:
    """An item for an environment that is not listed is `unknown_environment`."""
    listed = case.gym.environments()
    name = next(n for n in (CONFORMANCE, RESTART_ONLY, "no-such-environment") if n not in listed)
    outcome = case.outcome(case.item(case.new_id(), environment=name))
    case.equal("unknown_environment", outcome["outcome"], f"{name} is not listed", "CKPT-ROLL-008", "CKPT-CONF-003")
