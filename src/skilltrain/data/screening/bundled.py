"""Read the files beside a SKILL.md that belong to the skill."""

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

    Links and the folders of other skills do not belong to the skill.

    Args:
        folder: The folder of the skill.
        hidden: Whether to read the hidden files (.github, .vscode, .claude, git hooks) instead of
            the visible ones. Hidden files are not copied with a skill. They are screened because
            users clone them and because some programs run them without asking.

    Returns:
        The files, and the number of files that are unreadable or exceed the limits.
    """
    files = []
    num_bytes = 0
    num_omitted = 0
    for path in bundled_paths(folder, hidden):
        try:
            # Links may lead out of the skill's folder, so they are not followed.
            if path.is_symlink() or not path.is_file():
                continue
            size = path.stat().st_size
            # Count a file beyond the limits. A smaller file after it may still fit.
            if len(files) == MAX_FILES or num_bytes + size > MAX_BYTES:
                num_omitted += 1
                continue
            content = path.read_bytes()
        except OSError:
            # The file cannot be read, for example for lack of permission.
            num_omitted += 1
            continue
        num_bytes += size
        files.append(
            BundledFile(path.relative_to(folder), content, is_executable=os.access(path, os.X_OK))
        )
    return files, num_omitted


def read_front_matter(folder: Path) -> BundledFile:
    """Return what the front matter of a SKILL.md holds beside name and description, as a file.

    A loaded skill does not have it, but an agent that opens the SKILL.md reads it.
    """
    file = folder / SKILL_FILE
    text = file.read_text("utf-8", "replace") if file.is_file() else ""
    # The second value is the body, which is not needed here.
    fields, _ = split_header(text)
    known_keys = ("name", "description")
    other_fields = {key: value for key, value in fields.items() if key not in known_keys}
    return BundledFile(Path(SKILL_FILE), str(other_fields).encode(), is_executable=False)
