"""The two exceptions with which a test fails."""

from __future__ import annotations


class ParityError(AssertionError):
    """Compiled code did not do what eager code does."""


class LimitError(AssertionError):
    """A test broke one of its limits, or nothing was compiled in it."""
