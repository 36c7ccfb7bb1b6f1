# SPDX-License-Identifier: Apache-2.0
"""target.yaml: how a Gym is started for the suite. See TARGET.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from conformance.errors import UsageError
from conformance.failpoints import read_declaration


@dataclass(frozen=True)
class TargetFile:
    """target.yaml: how a Gym is started for the suite.

    Args:
        start: argv; `{dir}`, `{announce}`, `{world_url}`, `{shared_dir}` and `{python}` are filled in.
        files: text files that are written into `{dir}` before the first start, with the same placeholders.
        env: extra environment variables, with the same placeholders.
        control_env: variable that the Gym reads the control token from.
        data_env: variable that it reads the data token from.
        policy_env: variable that it reads the policy's token from.
        shared_dir: an existing directory; None: the suite makes one.
        failpoints: level 2: `env`, the variable that names the file which directs the fail points, and `points`, the
            Gym's own words for the suite's moments; None: it has none.
        insecure: words that, added to `start`, let it serve without a token; empty: there is no such way.
        unmanaged: the Gym's own older route that runs one rollout and answers when it has ended: `path` and `body`,
            whose string `{policy}` becomes the policy object; it must ask the policy at least twice.
        alone: whether two of them cannot run at once; always so with a `shared_dir`, of which there is one.
    """

    start: tuple[str, ...]
    files: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    control_env: str = "GYM_CHECKPOINT_TOKEN"
    data_env: str = "GYM_CHECKPOINT_DATA_TOKEN"
    policy_env: str = "GYM_POLICY_TOKEN"
    shared_dir: str | None = None
    failpoints: Mapping[str, Any] | None = None
    insecure: tuple[str, ...] = ()
    unmanaged: Mapping[str, Any] | None = None
    alone: bool = False

    @classmethod
    def read(cls, path: Path) -> TargetFile:
        """Read target.yaml.

        Raises:
            UsageError: it cannot be read or does not have the documented form.
        """
        try:
            data = yaml.safe_load(path.read_text())
            tokens = data.pop("tokens", {})
            known = {key: tokens.pop(key) for key in ("control_env", "data_env", "policy_env") if key in tokens}
            if tokens:
                raise UsageError(f"{path}: unknown tokens {sorted(tokens)}")
            start, insecure = (tuple(str(word) for word in data.pop(key, ())) for key in ("start", "insecure"))
            if not start:
                raise UsageError(f"{path}: start is missing")
            alone = bool(data.pop("alone", False)) or data.get("shared_dir") is not None
            made = cls(start=start, insecure=insecure, alone=alone, **known, **data)
            if made.failpoints is not None:
                read_declaration(made.failpoints)
        except (OSError, yaml.YAMLError, TypeError, AttributeError, KeyError) as error:
            raise UsageError(f"{path}: {error}") from error
        return made


def fill(text: str, values: Mapping[str, str]) -> str:
    """Return a text with its placeholders filled in."""
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
