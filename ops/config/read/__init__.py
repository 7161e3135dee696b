"""A configuration file, the environment and flags as plain data."""

__all__ = []
