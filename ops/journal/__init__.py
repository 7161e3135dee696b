"""What a journal, and a pool as it runs, tell people: entries as lines, a job's life on one screen; a recorder."""

from .life import SHOWN_SAMPLES, Life, life_of
from .lines import as_data, as_line, clock, plain
from .live import Live, live_of
from .recorder import Recorded, record_pool
from .table import TABLES, Table, as_reader, export
from .tokens import LEGEND, TextOf, coloured, texts_of

__all__ = [
    "LEGEND",
    "SHOWN_SAMPLES",
    "TABLES",
    "Life",
    "Live",
    "Recorded",
    "Table",
    "TextOf",
    "as_data",
    "as_line",
    "as_reader",
    "clock",
    "coloured",
    "export",
    "life_of",
    "live_of",
    "plain",
    "record_pool",
    "texts_of",
]
