"""Progress bars: on a terminal alone, never on stdout, and what is in them."""

from __future__ import annotations

import gc
import os
import pty
import subprocess
import sys

import pytest
from support.bars import last_line, stderr_as_terminal

from rolloutmq.messages.errors import ConfigError
from rolloutmq.messages.progress import Bar

PROGRAM = """
from rolloutmq.messages.progress import Bar
bar = Bar(True, "samples", 20)
for number in range(20):
    bar.add()
    print(number)
"""


def test_done_total_rate_and_failures() -> None:
    with stderr_as_terminal() as screen, Bar("[red]my run[/red]", "samples", 2000) as bar:
        for number in range(1500):
            bar.add(failed=number < 3)
    shown = last_line(screen)
    assert shown.startswith("[red]my run[/red] "), "a text is no markup"
    assert "1500/2000" in shown
    assert "/s" in shown
    assert "3 failed" in shown
    assert not screen.cursor.hidden


def test_it_is_drawn_anew_after_its_end() -> None:
    with stderr_as_terminal() as screen, Bar(True, "jobs") as bar:
        bar.add()
        bar.close()
        bar.show(2, 4, "and a note")
    assert len([line for line in screen.display if "jobs" in line]) == 2
    assert "2/4" in last_line(screen)
    assert "and a note" in last_line(screen)


def test_a_bar_that_is_forgotten_gives_the_terminal_back() -> None:
    with stderr_as_terminal() as screen:
        Bar(True, "jobs").add()
        gc.collect()
    assert not screen.cursor.hidden


def test_a_program_that_ends_amid_its_bar(tmp_path: object) -> None:
    """Its stdout has what it printed and nothing else; the terminal gets its cursor back."""
    master, slave = pty.openpty()
    ended = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=slave, check=True)
    os.close(slave)
    assert ended.stdout.decode().split() == [str(number) for number in range(20)]
    drawn = os.read(master, 1 << 16)
    os.close(master)
    assert b"20/20" in drawn
    assert drawn.rstrip().endswith(b"\x1b[?25h")


def test_a_process_without_stderr() -> None:
    run = subprocess.run(["sh", "-c", f"exec {sys.executable} -c '{PROGRAM}' 2>&-"], stdout=subprocess.PIPE, check=True)
    assert len(run.stdout.split()) == 20


@pytest.mark.parametrize("forced", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_a_file_gets_nothing(forced: str) -> None:
    """Whatever variables make rich take it for a terminal."""
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {forced: "1"}, capture_output=True, check=True
    )
    assert run.stderr == b""
    assert len(run.stdout.split()) == 20


def test_without_rich_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    with pytest.raises(ConfigError, match=r"needs rich: pip install 'rolloutmq\[cli\]'"):
        Bar(True, "jobs")
    assert not Bar(False, "jobs"), "who wants none needs none"
