"""The engine protocol on SGLang: the half that runs in the worker's process."""

__all__ = []
