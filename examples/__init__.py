# SPDX-License-Identifier: Apache-2.0
"""Gyms that embed the participant kit."""
