# SPDX-License-Identifier: Apache-2.0
"""The model server: reaches the policy for the agent and keeps a ledger with one row per completed policy call."""
