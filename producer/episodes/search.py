"""The tool `search`: full text search over documents on this host, in SQLite's FTS5."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

MOST_WORDS, MOST_RESULTS, SNIPPET_WORDS = 32, 10, 48
NOTHING = "nothing found"


class Search:
    """Finds documents by words, the best ones first.

    documents: (title, text) each. They are put into the index at `path`, by default in memory. Without documents an
    index that is there is opened. May be called from several threads.
    """

    SCHEMA: ClassVar[dict[str, Any]] = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches documents for words. Returns titles and excerpts, the best ones first.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "Words to look for"},
                    "count": {"type": "integer", "description": f"Results, 1 to {MOST_RESULTS}; default 3"},
                },
                "required": ["query"],
            },
        },
    }

    def __init__(self, documents: Iterable[tuple[str, str]] = (), path: str | Path = ":memory:") -> None:
        self._lock = threading.Lock()
        self._index = sqlite3.connect(path, check_same_thread=False)
        with self._lock, self._index:
            self._index.execute("CREATE VIRTUAL TABLE IF NOT EXISTS documents USING fts5(title, text)")
            self._index.executemany("INSERT INTO documents VALUES (?, ?)", documents)

    def __call__(self, query: str, count: int = 3) -> str:
        """The results as text. Raises ValueError."""
        if not isinstance(query, str):
            raise ValueError("query: a text")
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MOST_RESULTS:
            raise ValueError(f"count: 1 to {MOST_RESULTS}")
        # Only words, each in quotes: nothing of what a model writes is read as FTS5's query language.
        words = [f'"{word}"' for word in re.findall(r"\w+", query)[:MOST_WORDS]]
        if not words:
            return NOTHING
        with self._lock:
            found = self._index.execute(
                f"SELECT title, snippet(documents, 1, '', '', '…', {SNIPPET_WORDS}) FROM documents "
                "WHERE documents MATCH ? ORDER BY rank LIMIT ?",
                (" OR ".join(words), count),
            ).fetchall()
        results = [f"{place}. {title}\n{text}" for place, (title, text) in enumerate(found, 1)]
        return "\n\n".join(results) or NOTHING

    def close(self) -> None:
        """Close the index."""
        with self._lock:
            self._index.close()
