"""Ephemeral GPU sessions with trillion-parameter open-weight models."""

__version__ = "0.1.0"
