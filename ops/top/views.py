"""What can be on the screen: the pool, the jobs of one worker or of the queue, one job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

from rich.text import Text

from ..sharing import COSTLY
from .history import History, curve, speed
from .lines import Cell, Column, cells, facts, fitting, lasting, nbytes, row, short
from .reader import Focus, Look
from .worker_facts import stale, state_of, worker_lines

QUEUE = ""
"""The first row of the pool: the queue, beside the workers' ids."""
LEAST_ROWS = 4
STYLES = {
    "serving": "green",
    "running": "green",
    "updating": "cyan",
    "syncing": "cyan",
    "starting": "cyan",
    "paused": "yellow",
    "draining": "yellow",
    "quarantined": "red",
    "silent": "red",
}


class View(ABC):
    """One screen. `draw` returns at most `height` lines of at most `width` cells."""

    keys = "esc back  q quit"

    @abstractmethod
    def draw(self, look: Look, history: History, width: int, height: int) -> list[Text]: ...

    def focus(self) -> Focus:
        """What the next look has to read for this view."""
        return Focus()

    def key(self, key: str) -> View | None:
        """Take a key; returns the view that it opens."""
        return None


class Table(View):
    """A view with rows of which one is chosen. The choice stays with its id, wherever that moves."""

    keys = "↑↓ choose  enter open  esc back  q quit"
    columns: Sequence[Column]

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._chosen: str | None = None
        self._at = self._first = 0
        self._rows = 1

    def key(self, key: str) -> View | None:
        last = len(self._ids) - 1
        steps = {"up": -1, "down": 1, "pageup": -self._rows, "pagedown": self._rows, "home": -last, "end": last}
        if key in steps:
            self._choose(self._at + steps[key])
            return None
        return self.open(self._ids[self._at]) if key == "enter" and self._ids else None

    @abstractmethod
    def open(self, row_id: str) -> View: ...

    @abstractmethod
    def head(self, look: Look, history: History, width: int) -> list[Text]:
        """Lines above the table, the most important ones first."""

    @abstractmethod
    def ids(self, look: Look) -> list[str] | None:
        """Of all rows. None if the look was made for another view."""

    @abstractmethod
    def cells(self, row_id: str, look: Look) -> Sequence[Cell]:
        """One row: a cell for each column."""

    def draw(self, look: Look, history: History, width: int, height: int) -> list[Text]:
        found = self.ids(look)
        self._ids = self._ids if found is None else found
        if self._chosen in self._ids:
            self._at = self._ids.index(self._chosen)
        self._choose(self._at)
        head = self.head(look, history, width)[: max(1, height - 1 - LEAST_ROWS)]
        if height - len(head) > LEAST_ROWS + 2:
            head.append(Text())
        self._rows = max(1, height - len(head) - 1)
        self._first = min(self._at, max(self._first, self._at - self._rows + 1, 0))
        self._first = max(0, min(self._first, len(self._ids) - self._rows))
        fit = fitting(self.columns, width)
        titles = row(self.columns, fit, [(it.title, "") for it in self.columns], "bold")
        rows = [
            row(self.columns, fit, self.cells(one, look), "reverse" if one == self._chosen else "")
            for one in self._ids[self._first : self._first + self._rows]
        ]
        return [*head, titles, *rows]

    def _choose(self, at: int) -> None:
        self._at = max(0, min(at, len(self._ids) - 1))
        self._chosen = self._ids[self._at] if self._ids else None


class PoolView(Table):
    """The pool: its queue and its workers."""

    keys = "↑↓ choose  enter open  q quit"
    columns = (
        Column("WORKER", 14, most=40),
        Column("STATE", 11),
        Column("RUNNING", 9, rank=2, right=True),
        Column("TOK/S", 7, rank=1, right=True),
        Column("VERSION", 8, rank=3, right=True),
        Column("BEHIND", 6, rank=4, right=True),
        Column("HOST", 12, rank=5, most=40),
    )

    def open(self, row_id: str) -> View:
        return JobsView(row_id)

    def head(self, look: Look, history: History, width: int) -> list[Text]:
        state = look.state
        queued = sum(state["queued"].values())
        running = max(0, state["open_jobs"] - queued - state["suspects"])
        serving = Counter(it["version"] for it in state["workers"] if it["alive"])
        served = ", ".join(f"{version}: {count}" for version, count in sorted(serving.items(), reverse=True))
        work = history.seconds_of_work(state)
        bars = max(0, width - 16)
        letters, unread = state["dead_letters_kept"], state["unread_bytes"]
        return [
            facts(
                width,
                (f"pool {state['pool']}", "bold"),
                (f"{serving.total()} worker{'s' * (serving.total() != 1)}", ""),
                (f"weights {state['committed_version']}", ""),
                (f"transfer {state['transfer_under_way']} under way" if state["transfer_under_way"] else "", "cyan"),
            ),
            facts(
                width,
                (f"{state['open_jobs']:,} jobs open", ""),
                (f"{running:,} running", ""),
                (f"{lasting(work)} of work" if work is not None else "", ""),
                ("queued " + ", ".join(f"{count:,} {name}" for name, count in state["queued"].items()), ""),
                (f"{state['suspects']} on their last chance" if state["suspects"] else "", "yellow"),
            ),
            *(facts(width, (it["told"], "yellow")) for it in state["reasons"][:1] if it["cause"] != "slow"),
            Text(f"{short(speed(state)):>6} tok/s   ").append(curve(history.tokens_per_s, bars), "green"),
            facts(
                width,
                (f"versions served {served}" if served else "nobody serves", "" if served else "yellow"),
                (
                    f"{len(state['waiting_for_weights'])} wait for weights" if state["waiting_for_weights"] else "",
                    "cyan",
                ),
                (f"imbalance {state['imbalance']:.2f}" if serving.total() > 1 else "", ""),
                (f"updates cost {state['update_share']:.0%}" if state["update_share"] >= COSTLY else "", "yellow"),
            ),
            facts(
                width,
                (f"{letters:,} dead letters", "red" if letters else ""),
                (f"unread {nbytes(unread)} of {look.unread_clients} clients" if unread else "nothing unread", ""),
                (f"{state['set_aside']} keys set aside" if state["set_aside"] else "", "red"),
            ),
            Text(f"{short(queued):>6} queued  ").append(curve(history.queued, bars), "blue"),
        ]

    def ids(self, look: Look) -> list[str]:
        return [QUEUE, *(it["worker_id"] for it in look.state["workers"])]

    def cells(self, row_id: str, look: Look) -> Sequence[Cell]:
        worker = look.worker(row_id)
        if worker is None:
            queued = sum(look.state["queued"].values()) + look.state["suspects"]
            return [("(queue)", ""), (f"{queued:,} jobs", ""), *[("", "")] * 5]
        state = state_of(worker)
        behind = stale(worker, look.state)
        return [
            (worker["worker_id"], ""),
            (state, STYLES.get(state, "")),
            (f"{worker['running']}/{worker['max_running']}", ""),
            (short(worker["tokens_per_s"]), ""),
            (str(worker["version"]), ""),
            (str(behind), "yellow" if behind else ""),
            (worker["host"], ""),
        ]


class JobsView(Table):
    """The jobs that one worker holds, or those in the queue."""

    columns = (
        Column("JOB", 18, most=32),
        Column("STATE", 9, rank=1),
        Column("AGE", 7, rank=2, right=True),
        Column("SAMPLES", 9, rank=3, right=True),
        Column("TRY", 3, rank=4, right=True),
        Column("CLIENT", 12, rank=5, most=40),
        Column("GROUP", 12, rank=6, most=40),
    )

    def __init__(self, worker: str) -> None:
        super().__init__()
        self.worker = worker

    def focus(self) -> Focus:
        return Focus(worker=self.worker, first=self._first, rows=self._rows)

    def open(self, row_id: str) -> View:
        return JobView(row_id)

    def head(self, look: Look, history: History, width: int) -> list[Text]:
        if self.worker == QUEUE:
            queued = ", ".join(f"{count:,} {name}" for name, count in look.state["queued"].items())
            return [facts(width, ("queue", "bold"), (queued, "")), facts(width, ("next first, class by class", "dim"))]
        return worker_lines(self.worker, look, history, width, STYLES)

    def ids(self, look: Look) -> list[str] | None:
        return look.job_ids if look.focus.worker == self.worker else None

    def cells(self, row_id: str, look: Look) -> Sequence[Cell]:
        job = look.jobs.get(row_id)
        if job is None:  # it came onto the screen since the last look
            return [(row_id, ""), *[("", "")] * 6]
        return [
            (row_id, ""),
            (job.state, STYLES.get(job.state, "")),
            (lasting(job.age_s), ""),
            (f"{job.done}/{job.samples}", ""),
            (str(job.attempt), "yellow" if job.lost else ""),
            (job.client, ""),
            (job.group, ""),
        ]


class JobView(View):
    """One job's record, as long as there is one."""

    def __init__(self, job_id: str) -> None:
        self._id = job_id

    def focus(self) -> Focus:
        return Focus(job=self._id)

    def draw(self, look: Look, history: History, width: int, height: int) -> list[Text]:
        if look.focus.job != self._id:  # it was opened since the last look
            return [facts(width, (f"job {self._id}", "bold"))]
        told = look.job.lines() if look.job is not None else [f"job {self._id}", "  It is not in Redis any more."]
        return [Text(cells(line, width), no_wrap=True) for line in told][:height]
