"""Tests of workers run real ones."""

from tests.site import site

__all__ = ["site"]
