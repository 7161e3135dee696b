"""The page as one file: its modules, styles and a run's data in it. It needs no network, and trusts no text in it."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .history import History
from .hub import as_json
from .rollouts import Rollouts, row_of, rows_of

PAGE = Path(__file__).with_name("page")
FRAMES, WORKERS = 200, 100_000
"""So many moments at most, and in all of them together so many workers."""
SAMPLES = 200
_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([A-Za-z0-9_-]+\.js)";$', re.MULTILINE)


def page_of(history: History, rollouts: Rollouts) -> dict[str, Any]:
    """What the exported page of a run has."""
    count = max(2, min(FRAMES, WORKERS // max(1, len(history.tracks))))
    times = np.linspace(history.began, history.ended, count).tolist()
    rows = _chosen(history)
    shown = [row_of(history, row) for row in rows]
    frames = [history.state(at, brief=True) for at in times]
    for frame in frames:
        del frame["publishes"]  # all moments of a run have them in common
    return {
        "frames": frames,
        "state": history.state(),
        "rows": [*shown, *rows_of(history, SAMPLES, outcome="waiting")["rows"]],
        "left_out": int(history.have.sum()) - len(shown),
        "rollouts": rollouts.many([(one["job_id"], one["sample"]) for one in shown]),
    }


def _chosen(history: History) -> list[int]:
    """All samples if there are few; else the newest, those of the lowest reward and the most stale. Newest first."""
    of = history.samples
    rows = np.flatnonzero(history.have)
    newest = rows[np.argsort(-of["at"][rows], kind="stable")]
    worst = rows[np.argsort(of["reward"][rows], kind="stable")]
    stale = rows[np.argsort(-np.nan_to_num(history.behind[rows], nan=-1.0), kind="stable")]
    wanted = np.concatenate([newest[: SAMPLES // 2], worst[: SAMPLES // 4], stale[: SAMPLES // 4], newest])
    return sorted([*dict.fromkeys(wanted.tolist())][:SAMPLES], key=lambda row: -float(of["at"][row]))


def as_page(run: Mapping[str, Any]) -> str:
    """The HTML of a run, as `page_of` gives it, or of a replay's report."""
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    style, script = (PAGE / "page.css").read_text(encoding="utf-8"), _script("main.js", set())
    data = as_json(run).decode().replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    html = _replaced(html, '<link rel="icon" href="page/icon.svg">', "")
    html = _replaced(html, "<head>", f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">')
    html = _replaced(html, '<link rel="stylesheet" href="page/page.css">', f"<style>{style}</style>")
    element = f'<script type="application/json" id="run">{data}</script>'
    return _replaced(
        html, '<script type="module" src="page/main.js"></script>', f'{element}<script type="module">{script}</script>'
    )


def _replaced(html: str, old: str, new: str) -> str:
    before, found, after = html.partition(old)
    if not found:
        raise AssertionError(f"index.html has no {old}")
    return before + new + after


def _script(name: str, done: set[str]) -> str:
    """A module behind those that it imports, each once. Modules have one import a line, and names of their own."""
    done.add(name)
    text = (PAGE / name).read_text(encoding="utf-8")
    before = [_script(other, done) for other in _IMPORT.findall(text) if other not in done]
    return "".join(before) + re.sub(r"^export ", "", _IMPORT.sub("", text), flags=re.MULTILINE)
