"""Settings from one file, the environment and flags."""

__all__ = []
