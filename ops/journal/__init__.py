"""What a journal tells people: its entries as lines, and a job's life on one screen.

Few files: two views of one thing so far.
"""

from .life import Life, life_of
from .lines import as_data, as_line

__all__ = ["Life", "as_data", "as_line", "life_of"]
