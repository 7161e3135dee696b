"""What a journal, and a pool as it runs, tell people: entries as lines, and a job's life on one screen."""

from .life import SHOWN_SAMPLES, Life, life_of
from .lines import as_data, as_line, clock, plain
from .live import Live, live_of
from .tokens import LEGEND, TextOf, coloured, texts_of

__all__ = [
    "LEGEND",
    "SHOWN_SAMPLES",
    "Life",
    "Live",
    "TextOf",
    "as_data",
    "as_line",
    "clock",
    "coloured",
    "life_of",
    "live_of",
    "plain",
    "texts_of",
]
