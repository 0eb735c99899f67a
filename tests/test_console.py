"""What people see: sentences break between words on a terminal and stay whole in a pipe; nobody's bar leaves nothing behind."""

from __future__ import annotations

import io

import pytest
from rich.text import Text

from gradscope import console as module
from gradscope.console import Console, bar, progress

SENTENCE = "The share of measured batches of the last epoch that are under 1e-3 is printed here, by epoch, and then some more words."
PATH = "/a/very/long/path/" + "x" * 120


def printed(width: int, terminal: bool, *objects: object, **looks: object) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=terminal, color_system=None, highlight=False, markup=False)
    console.print(*objects, soft_wrap=True, **looks)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_a_terminal_breaks_between_words(width: int) -> None:
    lines = printed(width, True, SENTENCE)
    assert max(map(len, lines)) <= width
    assert " ".join(line.strip() for line in lines) == SENTENCE
    assert [line.strip() for line in printed(width, True, Text(SENTENCE), style="bold")] == [line.strip() for line in lines]
    indented = printed(width, True, f"first\n  {SENTENCE}")
    assert all(line.startswith("  ") for line in indented[1:])
    assert " ".join(line.strip() for line in indented[1:]) == SENTENCE


@pytest.mark.parametrize("width", [40, 80])
def test_a_pipe_gets_one_line(width: int) -> None:
    assert printed(width, False, SENTENCE) == [SENTENCE]
    assert printed(width, False, f"{SENTENCE}\n{SENTENCE}") == [SENTENCE, SENTENCE]


def test_a_long_path_stays_whole() -> None:
    lines = [line.strip() for line in printed(80, True, f"wrote {PATH} just now")]
    assert lines == ["wrote", PATH, "just now"]


def test_a_bar_that_nobody_sees_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(module, "console", Console(file=file, force_terminal=False))
    with progress("waiting") as advance:
        for done in range(4):
            advance(done, 3)
    with bar() as shown:
        shown.update(shown.add_task("waiting", total=2), completed=1)
    assert file.getvalue() == ""


def test_a_bar_on_a_terminal_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(module, "console", Console(file=file, width=80, force_terminal=True, force_interactive=True))
    with progress("waiting") as advance:
        advance(1, 3)
    assert "waiting" in file.getvalue()


def test_without_a_terminal_long_work_says_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    file, now = io.StringIO(), [0.0]
    monkeypatch.setattr(module, "console", Console(file=file, force_terminal=False))
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("pairs") as advance:
        for done in range(1, 31):
            now[0] = 10.0 * done
            advance(done, 30)
    lines = file.getvalue().splitlines()
    assert lines[0] == "pairs: 6 of 30, 0:04:00 left"
    assert [int(line.split()[1]) for line in lines] == [6, 12, 18, 24, 30]


def test_names_are_printed_as_they_are(capfd: pytest.CaptureFixture[str]) -> None:
    name = "runs/[red]/a:key:b"
    module.out.print(name, soft_wrap=True)
    module.console.print(name, soft_wrap=True)
    assert [text.strip() for text in capfd.readouterr()] == [name, name]
