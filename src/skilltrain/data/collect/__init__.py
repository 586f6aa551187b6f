"""Skills from a registry over HTTP: its listing, its archives, and what was fetched so far."""


class RefusalError(Exception):
    """A request or an archive of which nothing is kept; `status` is that of an HTTP answer."""

    def __init__(self, filter: str, reason: str, status: int | None = None) -> None:
        self.filter, self.reason, self.status = filter, reason, status
        super().__init__(f"{filter}: {reason}")
