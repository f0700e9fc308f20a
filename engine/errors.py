"""What can go wrong with an engine before it runs: one tree, one sentence each."""

from __future__ import annotations


class EngineError(Exception):
    """The engine cannot be used."""


class ModelError(EngineError):
    """The model cannot be prepared, loaded or served here; the message is one sentence for the operator."""
