"""What a journal, and a pool as it runs, tell: entries as lines, a job's life on one screen, samples, tables."""

from .life import SHOWN_SAMPLES, Life, life_of
from .lines import as_data, as_line, clock, plain
from .live import Live, live_of, waiting_of
from .recorded import Recorded, Span, Where, recorded
from .run import FATES, Failed, Run, WorkerLife
from .table import TABLES, Table, as_reader, export
from .tokens import LEGEND, TextOf, coloured, texts_of

__all__ = [
    "FATES",
    "LEGEND",
    "SHOWN_SAMPLES",
    "TABLES",
    "Failed",
    "Life",
    "Live",
    "Recorded",
    "Run",
    "Span",
    "Table",
    "TextOf",
    "Where",
    "WorkerLife",
    "as_data",
    "as_line",
    "as_reader",
    "clock",
    "coloured",
    "export",
    "life_of",
    "live_of",
    "plain",
    "recorded",
    "texts_of",
    "waiting_of",
]
