"""From skills and queries as they are found to the tables that training reads."""

from collections import Counter
from collections.abc import Iterable


def counted(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, in their order: so stages count what they wrote and dropped."""
    return dict(sorted(Counter(values).items()))
