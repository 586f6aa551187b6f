"""Read the files beside a SKILL.md that belong to the skill.

Notes:
    - Hidden files (.github, .vscode, .claude, git hooks) are screened, because users clone them and
      some programs run them without asking. They are not copied with a skill.
    - Links, and the folders of other skills, do not belong to a skill.
    - A loaded skill lacks the other front matter, but an agent that opens the SKILL.md reads it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from skilltrain.data.pool.skill_file import MAX_FILES, SKILL_FILE, bundled_paths, split_header
from skilltrain.texts import clean_text, decode_text, printable

MAX_BYTES = 4 * 2**20  # per skill; files beyond it are neither screened nor copied
_NON_ASCII_BYTES = re.compile(rb"[^\t\n -~]+")  # all but printable ASCII, tabs and line ends


@dataclass(frozen=True, slots=True)
class BundledFile:
    """One file of a skill's folder; `path` is relative to the folder."""

    path: Path
    content: bytes
    is_executable: bool

    @property
    def field(self) -> str:
        """Name of the file in a flag: `./` and its path."""
        return f"./{printable(self.path.as_posix())}"

    @property
    def text(self) -> str:
        """Text of the file, or the ASCII characters of a binary file.

        Binary files are not skipped, because a shell runs the commands in them all the same.
        """
        text = decode_text(self.content)
        if text is None:
            text = _NON_ASCII_BYTES.sub(b"\n", self.content).decode("ascii")
        return clean_text(text)


def read_bundled_files(folder: Path, *, hidden: bool = False) -> tuple[list[BundledFile], int]:
    """Read the files of a skill's folder, except SKILL.md.

    Args:
        folder: The folder of the skill.
        hidden: Whether to read the hidden files instead of the visible files.

    Returns:
        The files; the number of unreadable or too large files.
    """
    files = []
    num_bytes = 0
    num_omitted = 0
    for path in bundled_paths(folder, hidden):
        try:
            if path.is_symlink() or not path.is_file():
                continue
            size = path.stat().st_size
            if len(files) == MAX_FILES or num_bytes + size > MAX_BYTES:
                num_omitted += 1
                continue
            content = path.read_bytes()
        except OSError:
            num_omitted += 1
            continue
        num_bytes += size
        files.append(BundledFile(path.relative_to(folder), content, os.access(path, os.X_OK)))
    return files, num_omitted


def read_front_matter(folder: Path) -> BundledFile:
    """Return the front matter of a SKILL.md, without name and description, as a file."""
    file = folder / SKILL_FILE
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    fields, _ = split_header(text)
    known_keys = ("name", "description")
    other_fields = {key: value for key, value in fields.items() if key not in known_keys}
    return BundledFile(Path(SKILL_FILE), str(other_fields).encode(), is_executable=False)
