"""Progress and messages, on a terminal and in a log file."""

import io

import pytest
from rich.console import Console

from skilltrain import terminal
from skilltrain.terminal import progress, say
from skilltrain.training.log import note_of


def test_note_of_training_step():
    figures = {"loss": 0.12344, "learning_rate": 1.9e-5, "grad_norm": 2.314, "padding_share": 0.03}
    speeds = {"queries_per_second": 12.33, "tokens_per_second": 5600}

    note = note_of(figures | speeds)

    line = "loss 0.1234  lr 1.9e-05  |g| 2.31  12.3 queries/s  5,600 tokens/s  padding 3%"
    assert note == line


def test_note_has_peak_of_memory():
    figures = {"loss": 0.12344, "learning_rate": 1.9e-5, "grad_norm": 2.314, "padding_share": 0.03}
    speeds = {"queries_per_second": 3000, "tokens_per_second": 2_500_000}

    note = note_of(figures | speeds | {"peak_gib": 7.96})

    assert note.endswith("3,000.0 queries/s  2,500,000 tokens/s  padding 3%  peak 8.0 GiB")


@pytest.fixture
def log_file(monkeypatch):
    """The file that gets the messages where stderr is no terminal."""
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, width=120))
    return file


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def screen(monkeypatch, clock):
    """The file that gets the messages where stderr is a terminal of 80 columns."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, highlight=False, get_time=clock)
    monkeypatch.setattr(terminal, "console", console)
    return file


def test_log_file_gets_line_every_thirty_seconds(log_file, monkeypatch, clock):
    monkeypatch.setattr(terminal.time, "monotonic", clock)

    with progress("training", 1000, 400) as show:
        for second, completed in ((0.5, 500), (29, 501), (30, 520), (59, 600), (61, 640)):
            clock.now = 100.0 + second
            show(completed, f"loss {second}")

    assert log_file.getvalue().splitlines() == [
        "training 520/1,000 (52%)  eta 0:02:00  loss 30",
        "training 640/1,000 (64%)  eta 0:01:32  loss 61",
    ]


def test_log_file_gets_eta_after_first_slow_item(log_file, monkeypatch, clock):
    monkeypatch.setattr(terminal.time, "monotonic", clock)

    with progress("training", 31) as show:
        for completed in (1, 2):
            clock.now += 4
            show(completed, "loss 3.21")

    assert log_file.getvalue() == "training 1/31 (3%)  eta 0:02:00  loss 3.21\n"


def test_single_item_has_no_bar(screen):
    with progress("reranking", 1) as show:
        show(1, "")

    assert screen.getvalue() == ""


def test_bar_estimates_time_of_slow_steps(screen, clock):
    with progress("training", 10, 4) as show:
        for completed in (5, 6):
            clock.now += 60
            show(completed, "loss 0.1234  padding 3%")

    for text in ("6/10", "loss 0.1234  padding 3%", "eta", "0:04:00"):
        assert text in screen.getvalue()


LONG_LINE = f"warning: {'some words ' * 9}and /a/path/{'x' * 90}/of/one/word"


def test_log_file_keeps_long_lines(log_file):
    say(LONG_LINE)

    assert log_file.getvalue() == f"{LONG_LINE}\n"


def test_terminal_breaks_lines_between_words(screen):
    say(LONG_LINE)

    lines = screen.getvalue().splitlines()
    assert len(lines) == 3
    assert " ".join(line.strip() for line in lines) == LONG_LINE
