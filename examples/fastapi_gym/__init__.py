# SPDX-License-Identifier: Apache-2.0
"""A FastAPI Gym that became a participant of the protocol with the kit of `reference_gym.participant`."""
