"""Configuration files of SkyRL and verl, translated key by key."""

__all__ = []
