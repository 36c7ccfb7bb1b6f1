# SPDX-License-Identifier: Apache-2.0
"""Crashes of a Gym that has a boundary log: at every fail point, and at random instants."""
