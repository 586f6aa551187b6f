"""The files beside a SKILL.md: which of them belong to the skill, and their texts."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from skilltrain.data.pool.skill_file import MAX_FILES, bundled_paths
from skilltrain.texts import clean_text, decode_text, printable

MAX_BYTES = 4 * 2**20  # of one skill; what lies beyond is neither screened nor handed on
_NO_TEXT = re.compile(rb"[^\t\n -~]+")


@dataclass(frozen=True, slots=True)
class BundledFile:
    """One file of a skill's folder; `path` is relative to the folder."""

    path: Path
    content: bytes
    is_executable: bool

    @property
    def field(self) -> str:
        """How a flag names the file."""
        return f"./{printable(self.path.as_posix())}"

    @property
    def text(self) -> str:
        """The text of the file; where it is no text, the letters in it: a shell would run them all the same."""
        text = decode_text(self.content)
        return clean_text(
            text if text is not None else _NO_TEXT.sub(b"\n", self.content).decode("ascii")
        )


def bundled_files(folder: Path, *, hidden: bool = False) -> tuple[list[BundledFile], int]:
    """(the files of a skill's folder but SKILL.md, how many are left out because they cannot be read or are too much).

    Links and folders of other skills are no part of the skill. What is hidden (.github, .vscode, .claude, git's hooks)
    is not handed on, but people clone it, and programs run it unasked: `hidden` gives these files, and no others (.env
    is the user's own).
    """
    files: list[BundledFile] = []
    num_left_out = num_bytes = 0
    for path in bundled_paths(folder, hidden):
        try:
            if path.is_symlink() or not path.is_file():
                continue
            size = path.stat().st_size
            if len(files) == MAX_FILES or num_bytes + size > MAX_BYTES:
                num_left_out += 1
                continue
            content = path.read_bytes()
        except OSError:
            num_left_out += 1
            continue
        num_bytes += size
        files.append(BundledFile(path.relative_to(folder), content, os.access(path, os.X_OK)))
    return files, num_left_out
