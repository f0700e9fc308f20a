"""Tests of faults run real workers."""

from tests.site import site

__all__ = ["site"]
