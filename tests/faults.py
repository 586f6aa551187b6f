"""Expect an error by its code."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from skilltrain.errors import SkilltrainError


@contextmanager
def raises(code: str) -> Iterator[pytest.ExceptionInfo[SkilltrainError]]:
    """Check that the block raises a SkilltrainError with this code."""
    with pytest.raises(SkilltrainError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
