# SPDX-License-Identifier: Apache-2.0
"""The names of the environments: what the settings may ask for, known without importing any of them."""

from __future__ import annotations

from typing import Final

TOY_TEXT: Final = ("taxi", "frozen_lake")
"""Names of `gymnasium`'s environments with small discrete states, and of their factories here."""

ENVIRONMENTS: Final = TOY_TEXT
"""Every environment that the settings may name."""
