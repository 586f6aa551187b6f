import io

import pytest
from rich.console import Console

from skilltrain import terminal
from skilltrain.terminal import progress, say
from skilltrain.training.log import StepResult, note_of


def result(seconds=1.0, queries=8, tokens=900, slots=1000, loss=0.5):
    return StepResult(loss, 2e-5, 2.31, queries, tokens, slots, seconds)


def test_the_figures_of_a_step_by_hand():
    figures = result(seconds=2.0).figures(epoch=1.5)
    rates = {"queries_per_second": 4.0, "tokens_per_second": 450.0, "padding_share": 0.1}
    assert figures == pytest.approx({"epoch": 1.5, "loss": 0.5, "learning_rate": 2e-5, "grad_norm": 2.31} | rates)
    assert result(tokens=0, slots=0, seconds=0.0).figures(1.0)["padding_share"] == 0


def test_the_line_for_the_terminal():
    figures = StepResult(0.12344, 1.9e-5, 2.314, 37, 16_800, 17_320, 3.0).figures(0.1)
    assert note_of(figures) == "loss 0.1234  lr 1.9e-05  |g| 2.31  12.3 queries/s  5,600 tokens/s  padding 3%"
    figures = StepResult(0.1, 1e-5, 2.0, 3000, 2_500_000, 2_500_000, 1.0).figures(0.2)
    assert "3,000.0 queries/s  2,500,000 tokens/s" in note_of(figures)


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


def test_a_terminal_gets_a_bar_with_the_note_below(monkeypatch):
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, width=80, force_terminal=True))
    with progress("training", 30, 10) as show:
        show(20, "loss 0.1234  padding 3%")
    text = file.getvalue()
    assert "20/30" in text and "loss 0.1234  padding 3%" in text and "eta" in text


def test_slow_steps_have_an_eta_too(monkeypatch):
    file, clock = io.StringIO(), Clock()
    monkeypatch.setattr(terminal, "console", Console(file=file, width=80, force_terminal=True, get_time=clock))
    with progress("training", 10, 4) as show:
        for completed in (5, 6):
            clock.now += 60
            show(completed, "")
    assert "0:04:00" in file.getvalue()


def test_a_single_item_has_no_bar(monkeypatch):
    monkeypatch.setattr(terminal, "console", Console(file=(file := io.StringIO()), width=80, force_terminal=True))
    with progress("reranking", 1) as show:
        show(1, "")
    assert file.getvalue() == ""


def test_a_terminal_breaks_long_lines_between_words_only(monkeypatch, output):
    line = f"warning: {'some words ' * 9}and /a/path/{'x' * 90}/of/one/word"
    say(line)
    assert output.getvalue() == f"{line}\n"  # a log file has it whole
    file = io.StringIO()
    monkeypatch.setattr(terminal, "console", Console(file=file, width=80, force_terminal=True, highlight=False))
    say(line)
    shown = file.getvalue().splitlines()
    assert " ".join(part.strip() for part in shown) == line and len(shown) == 3
