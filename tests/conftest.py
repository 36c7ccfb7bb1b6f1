# SPDX-License-Identifier: Apache-2.0
"""What every test shares: one Hypothesis profile."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A deadline per example would time the machine, not the code; the bound of a whole test is pytest's own.
settings.register_profile(
    "gym-checkpoint", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("gym-checkpoint")
