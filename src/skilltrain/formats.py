"""The formats of the folders that skilltrain writes. A folder of another format is refused in one line."""

from dataclasses import dataclass
from typing import Any

from skilltrain.errors import SkilltrainError


@dataclass(frozen=True)
class Format:
    """Format of one kind of folder.

    Attributes:
        number: Number in the records of new folders. Raise it when the files of the folder change.
        oldest: Smallest number that can still be read. A record without a number counts as 0.
    """

    number: int
    oldest: int

    def check(self, record: Any, where: object, fix: str) -> None:
        """Raise SkilltrainError if a record is of another format; `fix` says how to make an older folder again."""
        stored = record.get("format", 0) if isinstance(record, dict) else 0
        if not isinstance(stored, int) or stored > self.number:
            problem = "was made by a newer skilltrain; upgrade"
            raise SkilltrainError(
                "newer-format", problem, where=where, fix="pip install --upgrade skilltrain"
            )
        if stored < self.oldest:
            problem = "was made by an older skilltrain, in a format that is no longer read"
            raise SkilltrainError("older-format", problem, where=where, fix=fix)


RUN = Format(number=1, oldest=1)
"""Of run.json, in the folder of every stage."""
CHECKPOINT = Format(number=1, oldest=1)
"""Of state.json, in every checkpoint of a training run."""
ROUTER = Format(number=1, oldest=1)
"""Of index.json, in a router."""
MODEL = Format(number=1, oldest=0)
"""Of skilltrain.json, in a model folder."""
