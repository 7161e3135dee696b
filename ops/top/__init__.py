"""`rolloutmq top`: a pool on a terminal, live, with one worker or one job at a closer look."""

from .live import figures, watch

__all__ = ["figures", "watch"]
