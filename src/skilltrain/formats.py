"""Formats of the folders that skilltrain writes. A folder of another format is refused."""

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
        """Check that the record of a folder has a format that can be read.

        Args:
            record: Content of the record's JSON file.
            where: Path of the folder or the record, for the error.
            fix: What the user can do about an older format.

        Raises:
            SkilltrainError: The folder's format is newer than `self.number`, the format of new
                folders, or older than `self.oldest`.
        """
        # Records of the first versions have no number, which counts as 0.
        stored_number = record.get("format", 0) if isinstance(record, dict) else 0

        # This version writes whole numbers, so anything else is from a newer version.
        is_number = isinstance(stored_number, int)
        if not is_number or stored_number > self.number:
            raise SkilltrainError(
                "newer-format",
                "was made by a newer skilltrain; upgrade",
                where=where,
                fix="pip install --upgrade skilltrain",
            )
        if stored_number < self.oldest:
            raise SkilltrainError(
                "older-format",
                "was made by an older skilltrain, in a format that is no longer read",
                where=where,
                fix=fix,
            )


RUN = Format(number=1, oldest=1)
"""Format of run.json, in the folder of every stage."""
CHECKPOINT = Format(number=1, oldest=1)
"""Format of state.json, in every checkpoint of a training run."""
ROUTER = Format(number=1, oldest=1)
"""Format of index.json, in a router."""
CALIBRATION = Format(number=1, oldest=1)
"""Format of calibration.json. A calibration without a number has another feature of BM25."""
MODEL = Format(number=1, oldest=0)
"""Format of skilltrain.json, in a model folder."""
