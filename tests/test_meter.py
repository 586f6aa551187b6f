import io

import pytest
from rich.console import Console

from skilltrain import terminal
from skilltrain.terminal import progress, say
from skilltrain.training.log import note_of


def test_the_line_for_the_terminal():
    figures = {"loss": 0.12344, "learning_rate": 1.9e-5, "grad_norm": 2.314, "padding_share": 0.03}
    line = "loss 0.1234  lr 1.9e-05  |g| 2.31  12.3 queries/s  5,600 tokens/s  padding 3%"

    assert note_of(figures | {"queries_per_second": 12.33, "tokens_per_second": 5600}) == line

    many = {"queries_per_second": 3000, "tokens_per_second": 2_500_000, "peak_gib": 7.96}

    assert note_of(figures | many).endswith(
        "3,000.0 queries/s  2,500,000 tokens/s  padding 3%  peak 8.0 GiB"
    )


@pytest.fixture
def output(monkeypatch):
    """What is printed where stderr is no terminal."""
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, width=120))
    return file


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_log_file_gets_a_line_every_thirty_seconds(output, monkeypatch):
    monkeypatch.setattr(terminal.time, "monotonic", clock := Clock())
    with progress("training", 1000, 400) as show:
        for second, completed in ((4, 500), (29, 501), (30, 520), (59, 600), (61, 640)):
            clock.now = 100.0 + second
            show(completed, f"loss {second}")

    assert output.getvalue().splitlines() == [
        "training 520/1,000 (52%)  eta 0:02:00  loss 30",
        "training 640/1,000 (64%)  eta 0:01:32  loss 61",
    ]


def test_a_terminal_gets_a_bar_with_the_note_below_and_an_eta_also_of_slow_steps(monkeypatch):
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(
        terminal, "console", Console(file=file, width=80, force_terminal=True, get_time=clock)
    )
    with progress("reranking", 1) as show:
        show(1, "")

    assert file.getvalue() == ""  # a single item has no bar

    with progress("training", 10, 4) as show:
        for completed in (5, 6):
            clock.now += 60
            show(completed, "loss 0.1234  padding 3%")

    assert all(
        text in file.getvalue() for text in ("6/10", "loss 0.1234  padding 3%", "eta", "0:04:00")
    )


def test_a_terminal_breaks_long_lines_between_words_only(monkeypatch, output):
    line = f"warning: {'some words ' * 9}and /a/path/{'x' * 90}/of/one/word"
    say(line)

    assert output.getvalue() == f"{line}\n"  # a log file has it whole

    file = io.StringIO()
    monkeypatch.setattr(
        terminal, "console", Console(file=file, width=80, force_terminal=True, highlight=False)
    )
    say(line)
    shown = file.getvalue().splitlines()

    assert " ".join(part.strip() for part in shown) == line
    assert len(shown) == 3
