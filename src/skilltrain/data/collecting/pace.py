"""When the next request may be sent: a fixed rate, and what a server asks for beyond it."""

import email.utils
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from, in seconds. `now` counts from anywhere, `date` from 1970."""

    now: Callable[[], float]
    date: Callable[[], float]
    sleep: Callable[[float], None]


REAL_CLOCK = Clock(time.monotonic, time.time, time.sleep)


class Pace:
    """Lets requests through no faster than `per_second`, whoever asks for them and why."""

    def __init__(self, per_second: float, clock: Clock) -> None:
        self._interval, self._clock, self._next = 1 / per_second, clock, -math.inf

    def wait(self) -> None:
        """Return when the next request may be sent."""
        while (seconds := self._next - self._clock.now()) > 0:
            self._clock.sleep(seconds)
        self._next = self._clock.now() + self._interval

    def hold(self, seconds: float) -> None:
        """Let nothing through for `seconds` from now."""
        self._next = max(self._next, self._clock.now() + seconds)


def is_rate_limit(status: int, headers: Mapping[str, str]) -> bool:
    """Whether an answer says "too many requests"; GitHub says so with 403, too. Header names are in lower case."""
    used_up = headers.get("x-ratelimit-remaining", "").strip() == "0"
    return status == 429 or (status == 403 and (used_up or "retry-after" in headers))


def seconds_to_wait(headers: Mapping[str, str], date: float) -> float:
    """What Retry-After (seconds or a date) or a used-up rate limit's reset asks for; 0 where they say nothing."""
    text = headers.get("retry-after", "").strip()
    if (seconds := _number(text)) is not None:
        return seconds
    try:
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - date)
    except (ValueError, TypeError, OverflowError):
        pass
    reset = _number(headers.get("x-ratelimit-reset", "").strip())
    used_up = headers.get("x-ratelimit-remaining", "").strip() == "0"
    return max(0.0, reset - date) if used_up and reset is not None else 0.0


def _number(text: str) -> float | None:
    return float(text[:12]) if text.isascii() and text.isdigit() else None
