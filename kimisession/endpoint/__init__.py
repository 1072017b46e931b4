"""Talking to the served model."""
