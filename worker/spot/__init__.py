"""Notices of the clouds that this machine will be taken away. aiohttp is loaded when the first one is waited for."""

from .notices import Cloud, Notices, notices_of, wait_for_notice

__all__ = ["Cloud", "Notices", "notices_of", "wait_for_notice"]
