"""What can go wrong with an engine before it runs."""

from __future__ import annotations


class ModelError(Exception):
    """The model cannot be prepared, loaded or served here; the message is one sentence for the operator."""
