# SPDX-License-Identifier: Apache-2.0
"""The rollouts of the scripted Gym: an agent that calls the policy, and the conformance environment."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp

from conformance.model_rollouts import Rollout, Rollouts, Stand, Start, ended, index_state
from conformance.model_values import State
from spec import wire as names

if TYPE_CHECKING:
    from tests.suite.scripted_gym import ScriptedGym

Json = dict[str, Any]
ENVIRONMENTS = {"conformance": "export_restore", "conformance-restart": "restart_only"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("add", "world", "grow", "refuse")]
MOD = 2**31


class HandlerDied(Exception):
    """An effect failed: its session is uncertain."""


class Runs:
    """What runs in the scripted Gym: one task per live attempt while it may, and what each has done so far.

    Args:
        gym: whose rollouts they are.
        world_url: the outside.
    """

    def __init__(self, gym: ScriptedGym, world_url: str) -> None:
        self.gym = gym
        self.world_url = world_url
        self.items: dict[str, Json] = {}
        self.records: dict[str, Json] = {}
        self.results: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.open_turns: dict[str, int] = {}
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._changed: asyncio.Event | None = None

    # --- what the Gym asks ---

    def item(self, row: Json, policy: Json | None) -> Start:
        """Return one item of a start as the model's value; remember what it says."""
        chosen = row.get("policy") or policy
        name, task = row["rollout_id"], row["task"]
        unfit: Any = None
        if chosen is None or set(task) != {"seed", "world_url", "verify_in_world"}:
            unfit = "invalid"
        elif row["environment"] not in ENVIRONMENTS:
            unfit = "unknown_environment"
        else:
            self.items.setdefault(name, row)
        only = ENVIRONMENTS.get(row["environment"]) == "restart_only"
        return Start(name, row["attempt"], row["task_digest"], json.dumps(chosen), only, unfit)

    def reconcile(self) -> None:
        """Stop what is over, and run what may."""
        live = dict(self.gym.state.rollouts.in_state("live"))
        wanted = {(name, one.attempt) for name, one in live.items() if not one.uncertain}
        for key in set(self._tasks) - wanted:
            self._tasks.pop(key).cancel()
        if self.gym.state.gate == "open":
            for name, attempt in wanted - set(self._tasks):
                if live[name].stand.turns == 0:
                    self.records.pop(name, None)
                self._tasks[name, attempt] = asyncio.get_running_loop().create_task(self._run(name, attempt))
        self.changed()

    def stop(self) -> None:
        """Cancel everything."""
        for task in self._tasks.values():
            task.get_loop().call_soon_threadsafe(task.cancel)

    def changed(self) -> None:
        """Wake whoever waits for the gate or for quiet."""
        if self._changed is not None:
            self._changed.set()
        self._changed = asyncio.Event()

    async def quiet(self, within_s: float) -> None:
        """Wait until nothing blocks, as long as that."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self.gym.state.blocked and (left := deadline - asyncio.get_running_loop().time()) > 0:
            await self._wait(left)

    async def _wait(self, within_s: float | None = None) -> None:
        if self._changed is None:
            self._changed = asyncio.Event()
        try:
            await asyncio.wait_for(self._changed.wait(), within_s)
        except TimeoutError:
            return

    def shown(self, name: str, one: Rollout) -> Json:
        """Return what a listing shows of a rollout."""
        words = {"finished": "finished", "failed": "failed"}
        state = words.get(one.state) or ("restart" if one.uncertain else "")
        if not state:
            state = "waiting_policy" if name in self.waiting else "running" if one.stand.busy != "no" else "parked"
        item = self.items[name]
        return {
            "state": state, "turns_done": one.stand.turns, "environment": item["environment"], "task_digest": one.task,
            "open_turn": self.open_turns.get(name) if state == "running" else None, "since_ms": 1,
        }  # fmt: skip

    def row(self, name: str, one: Rollout) -> Json:
        """Return the line of a rollout in an index."""
        row: Json = {
            "rollout_id": name, "attempt": one.attempt, "state": index_state(one), "turns_done": one.stand.turns,
            "task_digest": one.task, "environment": self.items[name]["environment"],
            "effects": {self.items[name]["environment"]: self._record(name)["calls"]}, "data_refs": [],
        }  # fmt: skip
        if row["state"] == "finished":
            row["receipt"] = {"rollout_id": name, "attempt": one.attempt, "digest": one.digest}
        elif row["state"] == "restart":
            row["reason"] = "blocked" if one.left_out else "uncertain" if one.uncertain else "restart_only"
        return row

    def saved(self, cut: Rollouts) -> Json:
        """Return what a cut saves."""
        return {
            name: {"record": self._record(name), "item": self.items[name], "result": self.results.get(name)}
            for name in cut.known
            if name in self.items
        }

    def load(self, saved: Json, after: State) -> None:
        """Take over what a restore has read."""
        for name, _ in after.rollouts.in_state("live", "finished", "failed"):
            entry = json.loads(json.dumps(saved[name]))
            self.records[name], self.items[name] = entry["record"], entry["item"]
            if entry["result"] is not None:
                self.results[name] = entry["result"]

    def _record(self, name: str) -> Json:
        fresh = {
            "messages": [{"role": "user", "content": f"conformance seed={self.items[name]['task']['seed']}"}],
            "counter": 0, "rng": self.items[name]["task"]["seed"], "effects": 0, "blob_bytes": 0, "calls": 0,
            "over": False,
        }  # fmt: skip
        return self.records.setdefault(name, fresh)

    # --- one attempt ---

    async def _run(self, name: str, attempt: int) -> None:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as http:
                while not self._record(name)["over"]:
                    await self._turn(http, name, attempt)
                await self._gate()
                await self._verify(http, name, attempt)
        except HandlerDied:
            self._stand(name, attempt, lambda one: ended(one, "uncertain"))
        finally:
            self.waiting.discard(name)

    async def _turn(self, http: aiohttp.ClientSession, name: str, attempt: int) -> None:
        record = json.loads(json.dumps(self._record(name)))
        turn = self.gym.state.rollouts.known[name].stand.turns + 1
        reply = await self._ask(http, name, attempt, turn, record["messages"])
        await self._gate()
        record["messages"].append(reply)
        calls = reply.get("tool_calls") or []
        record["over"] = not calls
        self.open_turns[name] = turn
        if calls:
            # An open turn blocks, whether or not the outside holds one of its effects.
            self._stand(name, attempt, lambda one: replace(one, stand=Stand(turn - 1, "effect")))
        for number, call in enumerate(calls, start=1):
            arguments = json.loads(call["function"]["arguments"])
            request = (name, attempt, turn, names.request_id(name, turn, number))
            text = await self._effect(http, record, call["function"]["name"], arguments, request)
            record["messages"].append({"role": "tool", "tool_call_id": call["id"], "content": text})
        self.records[name] = record
        self._stand(name, attempt, lambda one: replace(one, stand=Stand(turn)))

    async def _ask(
        self, http: aiohttp.ClientSession, name: str, attempt: int, turn: int, conversation: list[Json]
    ) -> Json:
        policy = json.loads(self.gym.state.rollouts.known[name].policy)
        headers = {
            names.HEADER_ROLLOUT_ID: name, names.HEADER_ATTEMPT: str(attempt), names.HEADER_TURN: str(turn),
        }  # fmt: skip
        body = {"model": policy["model"], "messages": conversation, "tools": TOOLS}
        self.waiting.add(name)
        async with http.post(policy["base_url"] + "/chat/completions", json=body, headers=headers) as response:
            reply = await response.json()
        self.waiting.discard(name)
        return dict(reply["choices"][0]["message"])

    async def _gate(self) -> None:
        while self.gym.state.gate == "closed":
            await self._wait()

    async def _effect(
        self, http: aiohttp.ClientSession, record: Json, tool: str, args: Json, request: tuple[str, int, int, str]
    ) -> str:
        record["calls"] += 1
        if tool == "refuse":
            return '{"error":"refused"}'
        shown: Json = {}
        if tool == "add":
            record["rng"] = (1664525 * record["rng"] + 1013904223) % 2**32
            shown["draw"] = record["rng"] >> 16
            record["counter"] = (record["counter"] + args["n"] + shown["draw"]) % MOD
        elif tool == "world":
            shown["value"] = await self._world(http, args["tag"], request)
            record["counter"] = (record["counter"] + shown["value"]) % MOD
        else:
            record["blob_bytes"] += args["bytes"]
            shown["blob_sha256"] = _blob(record["blob_bytes"])
        record["effects"] += 1
        shown |= {"counter": record["counter"], "effects": record["effects"]}
        return json.dumps(shown, sort_keys=True, separators=(",", ":"))

    async def _world(self, http: aiohttp.ClientSession, tag: str, request: tuple[str, int, int, str]) -> int:
        name, attempt, turn, request_id = request
        body = {"tag": tag, "rollout_id": name, "attempt": attempt, "turn": turn, "request_id": request_id}
        async with http.post(self.world_url + "/effects", json=body) as response:
            if response.status != 200:
                raise HandlerDied
            return int((await response.json())["value"])

    async def _verify(self, http: aiohttp.ClientSession, name: str, attempt: int) -> None:
        item, record = self.items[name], self._record(name)
        verified = True
        if item["task"]["verify_in_world"]:
            turns = self.gym.state.rollouts.known[name].stand.turns
            self._stand(name, attempt, lambda one: replace(one, stand=Stand(turns, "verification")))
            body = {"rollout_id": name, "attempt": attempt}
            async with http.post(self.world_url + "/verify", json=body) as response:
                verified = response.status == 200
        turns = self.gym.state.rollouts.known[name].stand.turns
        content: Json = {"rollout_id": name, "environment": item["environment"], "task_digest": item["task_digest"]}
        content["info"] = {"attempt": attempt, "policy_versions": [], "data_refs": []}
        if verified:
            final = {key: record[key] for key in ("blob_bytes", "counter", "effects", "rng")}
            final["blob_sha256"] = _blob(record["blob_bytes"])
            reward = (record["counter"] % 1024) / 1024
            content["body"] = {
                "outcome": "completed", "reward": reward, "turns": turns, "messages": record["messages"],
                "final": final,
            }  # fmt: skip
        else:
            kind = "verification_failed"
            content["failure"] = {"kind": kind, "reason": kind, "terminal": False, "turns": turns}
        text = json.dumps(content)
        digest = names.result_digest(text)

        def finish(one: Rollout) -> Rollout:
            self.results[name] = text
            return replace(ended(one, "success" if verified else "failure"), digest=digest)

        self._stand(name, attempt, finish)

    def _stand(self, name: str, attempt: int, change: Any) -> None:
        """Change a live attempt, unless it is over by now."""
        gym = self.gym
        one = gym.state.rollouts.get(name)
        if one is None or one.attempt != attempt or one.state != "live":
            return
        gym.state = replace(gym.state, rollouts=gym.state.rollouts.put(name, change(one)))
        gym.progress += 1
        if gym.state.phase == "preparing" and not gym.state.blocked:
            gym.state = replace(gym.state, phase="prepared")
        self.changed()


def _blob(size: int) -> str:
    return hashlib.sha256(bytes(i % 251 for i in range(size))).hexdigest()


__all__ = ["ENVIRONMENTS", "Runs"]
