"""When the next request may go out: rates kept, failures waited off."""

import asyncio
import math
import random
import time
from email.utils import parsedate_to_datetime

_FIRST_WAIT, _LONGEST_BACK_OFF = 0.5, 60.0


class Pacer:
    """Spreads requests evenly over time, at most so many and so many tokens a minute; null is no limit."""

    def __init__(self, requests_per_minute: float | None, tokens_per_minute: float | None) -> None:
        self._per_minute = (requests_per_minute, tokens_per_minute)
        self._free_at = [0.0, 0.0]
        self._held_until = 0.0

    def book(self, num_tokens: int, now: float) -> float:
        """Seconds from `now` until the next request of so many tokens may go out; it is booked as sent then."""
        start = max([now, *(free_at for free_at, rate in zip(self._free_at, self._per_minute, strict=True) if rate)])
        for i, (amount, rate) in enumerate(zip((1, num_tokens), self._per_minute, strict=True)):
            if rate:
                self._free_at[i] = start + amount * 60 / rate
        return start - now

    def hold(self, seconds: float) -> None:
        """Let nothing out for so long: a server that is overrun means all requests, not one."""
        self._held_until = max(self._held_until, time.monotonic() + seconds)

    async def turn(self, num_tokens: int) -> None:
        """Return when a request of so many tokens may go out."""
        await asyncio.sleep(self.book(num_tokens, time.monotonic()))
        while (left := self._held_until - time.monotonic()) > 0:
            await asyncio.sleep(left * random.uniform(1.0, 1.1))  # not all at the same moment


def back_off(num_tries: int) -> float:
    """Seconds to wait after so many failed tries: 0.5, 1, 2, … up to 60, less a random part up to a half of it."""
    return min(_LONGEST_BACK_OFF, _FIRST_WAIT * 2.0 ** min(num_tries - 1, 30)) * random.uniform(0.5, 1.0)


def retry_after(header: str | None, now: float) -> float | None:
    """The seconds that a Retry-After header asks for, given as a number or as a date; None if it says nothing."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - now
        except (ValueError, TypeError, OverflowError):
            return None
    return None if math.isnan(seconds) else max(0.0, seconds)
