"""How numbers are put into words, the same on every page, in Markdown and in the terminal."""

from skilltrain.evaluation.analysis import FeatureComparison
from skilltrain.evaluation.bootstrap import LEVEL, Interval, compact
from skilltrain.evaluation.comparison import Comparison

ALPHA = 1 - LEVEL


def share(value: float) -> str:
    """The number at a tick of an axis of shares: 0, .25, 1."""
    return f"{value:.0f}" if value in (0, 1) else compact(value, 2)


def percent(part: float, whole: float) -> str:
    """A share in words: `1.7%`, `<0.1%`, `0%`."""
    found = 100 * part / whole if whole else 0.0
    if 0 < found < 0.1:
        return "<0.1%"
    return f"{found:.1f}%" if found < 10 and found != round(found) else f"{found:.0f}%"


def p_value(p: float | None) -> str:
    """A p like `.0321`, `<.0001` where it is smaller, 1 where it rounds to it; a dash where a test does not apply."""
    if p is None:
        return "–"
    if p >= 0.99995:
        return "1"
    return "<.0001" if p < 0.0001 else compact(p, 4)


def p_equals(p: float | None) -> str:
    """A p in a sentence: `p = .0321`, `p < .0001`."""
    value = p_value(p)
    return f"p < {value[1:]}" if value.startswith("<") else f"p = {value}"


def signed(value: float | None, places: int = 3) -> str:
    """A difference with its sign, like `+.173`; 0 has none; a dash where there is none."""
    if value is None:
        return "–"
    text = compact(value, places)
    return text if text.startswith("-") or not text.strip("0.") else f"+{text}"


def signed_interval(value: Interval) -> str:
    """A difference with its interval, like `+.173 [.08, .27]`."""
    return f"{signed(value.mean)} {value.bounds()}"


def reading(comparison: Comparison) -> str:
    """What a comparison allows to say, by its p after Holm's correction: above, below or not told apart."""
    if comparison.p_holm >= ALPHA or not comparison.difference.mean:
        return "not told apart"
    return "above" if comparison.difference.mean > 0 else "below"


def feature_reading(feature: FeatureComparison) -> str:
    """What the test allows to say of gold skills: more, less or not told apart."""
    if feature.p >= ALPHA or feature.effect == 0.5:
        return "not told apart"
    return "more" if feature.effect > 0.5 else "less"


def number(value: float) -> str:
    """A count, length or rate in three significant digits or more: `1,240`, `12.5`, `.04`."""
    if abs(value) >= 100 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else compact(value, 2)


def duration(seconds: float) -> str:
    """A time of waiting in three significant digits: `.42 ms`, `85.0 ms`, `1.30 s`."""
    value, unit = (seconds, "s") if seconds >= 1 else (1000 * seconds, "ms")
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{compact(value, 1 if value >= 9.995 else 2)} {unit}"


def counted(num: int, noun: str) -> str:
    """A count with its noun: `1 query`, `3 queries`, `2 systems`."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{num:,} {noun if num == 1 else plural}"
