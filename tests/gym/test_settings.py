# SPDX-License-Identifier: Apache-2.0
"""gym.yaml, tokens and logs."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from reference_gym import settings
from reference_gym.errors import SettingsError
from reference_gym.logs import JsonFormatter

CONTROL = "control-token-1"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A settings file that may be overwritten, with the control token in the environment."""
    monkeypatch.setenv("GYM_CHECKPOINT_TOKEN", CONTROL)
    for name in ("GYM_CHECKPOINT_DATA_TOKEN", "GYM_POLICY_TOKEN", settings.WORLD_URL_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "gym.yaml"
    path.write_text("name: gym\n")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("prots: {agent: 1}", "prots: unknown key"),
        ("limits: {max_batches: 1}", "limits.max_batches: unknown key"),
        ("processes: two", "processes:"),
        ("ports: {agent: '1'}", "ports.agent:"),
        ("environments: [chess]", "no such environment: chess"),
        ("environments: [taxi, taxi]", "named twice"),
        ("tokens: {control: {env: A, file: b}}", "exactly one of env and file"),
        ("storage_roots: []", "storage_roots:"),
        ("name: ../x", "name:"),
        ("limits: {min_lease_ms: 5, max_lease_ms: 4}", "above"),
        ("[1, 2", "cannot be read"),
        ("- 1", "(whole file)"),
    ],
)
def test_mistakes_are_refused_with_their_place(config: Path, text: str, expected: str) -> None:
    """An unknown key or an impossible value names itself; nothing is guessed."""
    config.write_text(text)
    with pytest.raises(SettingsError, match=r".*") as raised:
        settings.load(config, insecure_no_auth=False)
    assert expected in str(raised.value)


def test_an_empty_file_gives_the_defaults(config: Path) -> None:
    """Everything has a default; limits.max_result_bytes is 4 MiB (CKPT-RESULT-015)."""
    config.write_text("")
    loaded = settings.load(config, insecure_no_auth=False)
    assert ("one", "127.0.0.1", 4194304) == (
        loaded.settings.processes,
        loaded.settings.host,
        loaded.settings.limits.max_result_bytes,
    )
    assert loaded.settings.conformance is None
    assert loaded.world_url is None


def test_without_a_token_nothing_is_served(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No token: refused, unless it is told to serve loopback alone."""
    monkeypatch.setenv("GYM_CHECKPOINT_TOKEN", " ")
    config.write_text("host: 0.0.0.0\n")
    with pytest.raises(SettingsError, match="--insecure-no-auth"):
        settings.load(config, insecure_no_auth=False)
    loaded = settings.load(config, insecure_no_auth=True)
    assert ("127.0.0.1", None, None) == (loaded.settings.host, loaded.control_token, loaded.data_token)


def test_tokens_come_from_files_and_from_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token has its own source; paths are relative to the file."""
    (config.parent / "data.token").write_text("data-token-2\n")
    monkeypatch.setenv("OTHER", "policy-token-3")
    config.write_text("tokens: {data: {file: data.token}, policy: {env: OTHER}}\n")
    loaded = settings.load(config, insecure_no_auth=False)
    assert (CONTROL, "data-token-2", "policy-token-3") == (
        loaded.control_token,
        loaded.data_token,
        loaded.policy_token,
    )
    assert CONTROL not in repr(loaded)


@pytest.mark.parametrize("content", ["", "two words", "ümlaut"])
def test_a_token_that_no_header_can_carry_is_refused(config: Path, content: str) -> None:
    """Empty files, spaces and non-ASCII are found at the start, not at the first call."""
    (config.parent / "bad.token").write_text(content)
    config.write_text("tokens: {control: {file: bad.token}}\n")
    with pytest.raises(SettingsError):
        settings.load(config, insecure_no_auth=False)


def test_the_world_of_a_conformance_run_can_come_from_the_environment(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable counts only in a Gym that is started for conformance."""
    monkeypatch.setenv(settings.WORLD_URL_VARIABLE, "http://127.0.0.1:9")
    assert settings.load(config, insecure_no_auth=False).world_url is None
    config.write_text("conformance: {world_url: null}\n")
    assert "http://127.0.0.1:9" == settings.load(config, insecure_no_auth=False).world_url
    config.write_text("conformance: {world_url: 'http://127.0.0.1:8'}\n")
    assert "http://127.0.0.1:8" == settings.load(config, insecure_no_auth=False).world_url


def test_a_log_line_is_json_without_secrets() -> None:
    """C75: a secret is struck out wherever it appears, in a traceback too."""
    formatter = JsonFormatter([CONTROL])
    try:
        int(f"Bearer {CONTROL}")
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, "call with %s", (CONTROL,), sys.exc_info())
    record.role = {"token": CONTROL}
    line = formatter.format(record)
    assert CONTROL not in line
    assert "call with [secret]" == json.loads(line)["event"]
    assert "ValueError" in json.loads(line)["exception"]
