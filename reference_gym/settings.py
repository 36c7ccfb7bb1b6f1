# SPDX-License-Identifier: Apache-2.0
"""The settings of the reference Gym: `gym.yaml`, and tokens from the environment or from files.

Implements CKPT-SEC-003, -008, -009, -010 and CKPT-RESULT-015.
"""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from reference_gym.catalogue import ENVIRONMENTS
from reference_gym.errors import SettingsError

WORLD_URL_VARIABLE = "GYM_CONFORMANCE_WORLD_URL"
ROLES = ("agent", "model", "resources")

Role = Literal["all", "agent", "model", "resources"]
Port = Annotated[int, Field(ge=0, le=65535)]
Milliseconds = Annotated[int, Field(ge=0, le=2**53)]
Count = Annotated[int, Field(ge=1, le=2**53)]


def _http_url(value: str) -> str:
    try:
        parts = urlsplit(value)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.query or parts.fragment or parts.username is not None:
        raise ValueError("not of the form http://host:port")
    return value


Url = Annotated[str, AfterValidator(_http_url)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TokenSource(_Section):
    """Where one token comes from: the name of an environment variable, or a file that holds nothing else."""

    env: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _one(self) -> TokenSource:
        if (self.env is None) == (self.file is None):
            raise ValueError("give exactly one of env and file")
        return self

    def read(self, directory: Path) -> str | None:
        """The token; None when the variable is not set or empty.

        Raises:
            SettingsError: the file cannot be read, is empty, or the token is no printable ASCII.
        """
        if self.env is not None:
            token = os.environ.get(self.env, "").strip()
        else:
            assert self.file is not None
            try:
                token = (directory / self.file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"the token file {self.file} cannot be read: {type(error).__name__}") from error
            if not token:
                raise SettingsError(f"the token file {self.file} is empty")
        if not all("!" <= letter <= "~" for letter in token):
            raise SettingsError(f"the token from {self.env or self.file} is not printable ASCII without spaces")
        return token or None


class Tokens(_Section):
    """One token per plane, and the one for the policy."""

    control: TokenSource = TokenSource(env="GYM_CHECKPOINT_TOKEN")
    data: TokenSource = TokenSource(env="GYM_CHECKPOINT_DATA_TOKEN")
    policy: TokenSource = TokenSource(env="GYM_POLICY_TOKEN")


class Ports(_Section):
    """TCP ports; 0 lets the system choose. One process uses that of the agent."""

    agent: Port = 0
    model: Port = 0
    resources: Port = 0


class Peers(_Section):
    """The other participants, for a process that has one role."""

    model: Url | None = None
    resources: Url | None = None


class Conformance(_Section):
    """Present when the Gym is started for conformance."""

    world_url: Url | None = None


class Limits(_Section):
    """The limits that capabilities declare."""

    max_body_bytes: Count = 64 * 1024 * 1024
    max_batch: Count = 1_000
    max_page_items: Count = 1_000
    max_page_bytes: Count = 16 * 1024 * 1024
    max_wait_ms: Milliseconds = 30_000
    min_lease_ms: Milliseconds = 1_000
    max_lease_ms: Milliseconds = 600_000
    max_write_ms: Milliseconds = 600_000
    max_result_bytes: Count = 4 * 1024 * 1024
    max_record_bytes: Count = 256 * 1024 * 1024
    max_artifact_bytes: Count = 4 * 1024 * 1024 * 1024
    max_live_rollouts: Count = 100_000
    shutdown_grace_ms: Milliseconds = 10_000
    policy_retry_ms: Milliseconds = 300_000
    max_connections: Count = 10_000
    max_silence_ms: Count = 60_000
    max_artifacts: Count = 10_000
    max_artifacts_bytes: Count = 64 * 1024 * 1024 * 1024


class Timeouts(_Section):
    """Limits that are nobody's business but the Gym's, in milliseconds."""

    policy_call_ms: Count = 600_000
    peer_retry_ms: Milliseconds = 30_000
    session_idle_ms: Count = 3_600_000


class Log(_Section):
    """The boundary log, which there is where `data_dir` is set.

    `sync: group` syncs every group of boundaries before anybody is told of it; `commit` leaves that to commits: the log
    then survives the process, and not the machine.
    """

    sync: Literal["commit", "group"] = "commit"
    segment_bytes: Annotated[int, Field(ge=4096, le=2**31)] = 64 * 1024 * 1024


class Settings(_Section):
    """All of gym.yaml; paths are relative to the file, and what is named by a relative one is made if it is missing.

    Without `data_dir` nothing survives the process: each start is a new incarnation. With `processes: three` each
    participant that ends is started again, also one that was told to stop; only the command itself is stopped.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")] = "gym"
    processes: Literal["one", "three"] = "one"
    host: str = "127.0.0.1"
    ports: Ports = Ports()
    peers: Peers = Peers()
    data_dir: str | None = None
    """Where the boundary log lives; None: there is none."""
    log: Log = Log()
    storage_roots: Annotated[list[str], Field(min_length=1)] = ["snapshots"]
    environments: list[str] = ["taxi", "frozen_lake"]
    conformance: Conformance | None = None
    limits: Limits = Limits()
    timeouts: Timeouts = Timeouts()
    tokens: Tokens = Tokens()

    @model_validator(mode="after")
    def _known_environments(self) -> Settings:
        unknown = [name for name in self.environments if name not in ENVIRONMENTS]
        if unknown:
            raise ValueError(f"no such environment: {', '.join(unknown)} (there are {', '.join(sorted(ENVIRONMENTS))})")
        if len(set(self.environments)) != len(self.environments):
            raise ValueError("an environment is named twice")
        return self

    @model_validator(mode="after")
    def _ordered_leases(self) -> Settings:
        if self.limits.min_lease_ms > self.limits.max_lease_ms:
            raise ValueError("limits.min_lease_ms is above limits.max_lease_ms")
        return self

    @property
    def own_dir(self) -> str:
        """Where the Gym keeps files of its own: those of the `http` scheme need a place without `data_dir` too."""
        return self.data_dir or "gym-data"


class _Loader(yaml.SafeLoader):
    """The safe loader, which refuses a key that is there twice instead of choosing one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for number, (key, _) in enumerate(node.value):
            if keys[number] in keys[:number]:
                raise yaml.constructor.ConstructorError(None, None, f"{keys[number]} is there twice", key.start_mark)
        return super().construct_mapping(node, deep)


class LoadedSettings(BaseModel):
    """Settings with what stands outside the file: its directory and the secrets, which never show in a repr."""

    model_config = ConfigDict(frozen=True, arbitrary_types_allowed=True)

    settings: Settings
    directory: Path
    control_token: str | None = Field(repr=False)
    data_token: str | None = Field(repr=False)
    policy_token: str | None = Field(repr=False)

    @property
    def shares_token(self) -> bool:
        """Whether the token of the control plane is that of the data plane too (CKPT-SEC-008)."""
        return self.control_token is not None and self.control_token == self.data_token

    @property
    def world_url(self) -> str | None:
        """The only world that tasks may name; the environment variable counts where the file names none."""
        conformance = self.settings.conformance
        return None if conformance is None else conformance.world_url or os.environ.get(WORLD_URL_VARIABLE) or None

    def path(self, text: str) -> Path:
        """A path of the file, made absolute."""
        return (self.directory / text).absolute()


def load(path: Path, *, insecure_no_auth: bool) -> LoadedSettings:
    """Read the settings and the tokens.

    Args:
        path: the file; what it names is relative to its directory.
        insecure_no_auth: serve without tokens, on loopback only.

    Raises:
        SettingsError: with a text for the operator.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506 - a SafeLoader
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SettingsError(f"{path} cannot be read: {error}") from error
    _require_world(os.environ.get(WORLD_URL_VARIABLE))
    try:
        settings = Settings.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise SettingsError(f"{path} cannot be used:\n{explain(error)}") from error
    directory = path.absolute().parent
    tokens = settings.tokens
    policy = tokens.policy.read(directory)
    if insecure_no_auth:
        return LoadedSettings(
            settings=settings.model_copy(update={"host": "127.0.0.1"}),
            directory=directory,
            control_token=None,
            data_token=None,
            policy_token=policy,
        )
    control = tokens.control.read(directory)
    if control is None:
        raise SettingsError(
            f"no token: set {tokens.control.env}, name a file in tokens.control, or serve loopback alone with "
            "--insecure-no-auth"
        )
    return LoadedSettings(
        settings=settings,
        directory=directory,
        control_token=control,
        data_token=tokens.data.read(directory) or control,
        policy_token=policy,
    )


def _require_world(url: str | None) -> None:
    try:
        _http_url(url or "http://none")
    except ValueError as error:
        raise SettingsError(f"{WORLD_URL_VARIABLE} is {error}") from error


def require_directories(loaded: LoadedSettings) -> None:
    """Make the directories that the file names by a relative path; one elsewhere has to be there.

    A share that is not mounted must not be taken for an empty one.

    Raises:
        SettingsError: one is missing, no directory, or cannot be made.
    """
    named = [("storage_roots", root) for root in loaded.settings.storage_roots]
    for key, text in [*named, ("data_dir", loaded.settings.own_dir)]:
        path = loaded.path(text)
        try:
            if key == "data_dir" or not Path(text).is_absolute():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not path.is_dir():
                raise SettingsError(f"{key}: {path} is no directory")
        except OSError as error:
            raise SettingsError(f"{key}: {path} cannot be used: {error.strerror}") from error


def explain(error: ValidationError) -> str:
    """One line per mistake, each with the place in the file; values are left out, they may be secret."""
    lines = []
    for problem in error.errors(include_url=False, include_input=False, include_context=False):
        place = ".".join(str(part) for part in problem["loc"]) or "(whole file)"
        text = "unknown key" if problem["type"] == "extra_forbidden" else problem["msg"].removeprefix("Value error, ")
        lines.append(f"  {place}: {text}")
    return "\n".join(lines)
