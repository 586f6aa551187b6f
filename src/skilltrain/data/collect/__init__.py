"""Skills from a registry over HTTP: its listing, its archives, and what was fetched so far."""

from skilltrain.records import Dropped


class RefusalError(Exception):
    """A request or an archive of which nothing is kept; the next may succeed."""

    def __init__(self, filter: str, reason: str, value: float | None = None) -> None:
        self.filter, self.reason, self.value = filter, reason, value
        super().__init__(f"{filter}: {reason}")

    def row(self, skill_id: str) -> Dropped:
        """What DROPPED says of the skill."""
        return Dropped("", skill_id, self.filter, self.reason, self.value)
