"""Errors that end a command in one sentence."""

from __future__ import annotations


class UsageError(RuntimeError):
    """Options that make no sense; the message says which and what would do."""
