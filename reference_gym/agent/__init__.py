# SPDX-License-Identifier: Apache-2.0
"""The agent: calls the policy once per turn, runs the effects of its reply in order, and has the rollout judged."""
