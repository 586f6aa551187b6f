"""A look over the headers of a tar file before `tarfile` reads it: what would cost memory or time is refused here.

`tarfile` reads a pax header into memory whole and runs regular expressions over it that take quadratic time, follows
negative sizes in circles, and stops silently at a broken header. The walk here reads one block a member.
"""

import re
import tarfile
from pathlib import Path
from typing import IO

from skilltrain.data.collecting.archive_members import ArchiveError, ArchiveLimits

# A path is at most 1,024 bytes (archive_members), so that a header which names one is never longer.
MAX_HEADER_BYTES = 4096
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_PAX = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
# A size in a pax header would make tarfile skip another number of bytes than the walk does.
_PAX_REFUSED = (b" size=", b"GNU.sparse")
_MANY_DIGITS = re.compile(rb"\d{64}")  # what tarfile's expressions take quadratic time for


def is_tar_header(block: bytes) -> bool:
    """Whether a file that starts with `block` (512 bytes) is a tar file: its header's checksum is right."""
    try:
        tarfile.TarInfo.frombuf(block[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def check_tar_headers(path: Path, limits: ArchiveLimits) -> None:
    """Walk the headers of a plain tar file. Raises ArchiveError at the first that is broken, too big or sparse."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        position = num_members = 0
        while (info := _header_at(file, position)) is not None:
            num_members += 1
            if num_members > 3 * limits.max_files:  # a long name may take two headers beside its member's own
                raise ArchiveError("bomb", f"holds more than {limits.max_files:,} files", float(num_members))
            position += tarfile.BLOCKSIZE + _num_data_bytes(info, file)
            if position > num_bytes:
                raise ArchiveError("broken_archive", f"is cut off inside a file ({num_bytes:,} bytes)")


def _header_at(file: IO[bytes], position: int) -> tarfile.TarInfo | None:
    file.seek(position)
    block = file.read(tarfile.BLOCKSIZE)
    if not block or block.count(0) == tarfile.BLOCKSIZE:
        return None
    try:
        return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError) as error:
        raise ArchiveError("broken_archive", f"has a broken header at byte {position:,}: {error}") from error


def _num_data_bytes(info: tarfile.TarInfo, file: IO[bytes]) -> int:
    """Bytes from the end of a header to the next one, as tarfile counts them."""
    if info.size < 0:
        raise ArchiveError("broken_archive", "declares a file of negative size")
    if info.type == tarfile.GNUTYPE_SPARSE:
        raise ArchiveError("special_file", "holds a sparse file")
    if info.type in _NAMING or info.type in _PAX:
        if info.size > MAX_HEADER_BYTES:
            raise ArchiveError("bomb", f"has an extended header of {info.size:,} bytes", float(info.size))
        data = file.read(info.size)
        if info.type in _PAX and any(key in data for key in _PAX_REFUSED):
            raise ArchiveError("special_file", "has a pax header that sets a size or describes a sparse file")
        if info.type in _PAX and _MANY_DIGITS.search(data):
            raise ArchiveError("bomb", "has a pax header with a number of more than 64 digits")
    elif not info.isreg() and info.type in tarfile.SUPPORTED_TYPES:
        return 0
    return -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
