"""Measurements; each prints what it does and ends with one line of JSON."""

__all__ = []
