# SPDX-License-Identifier: Apache-2.0
"""The reference Gym: agent, model and resources servers that survive crashes through the Gym Checkpoint Protocol."""
