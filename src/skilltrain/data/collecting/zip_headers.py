"""A look over a zip file's directory before and after `zipfile` reads it: size, encryption, overlapping entries."""

import struct
import zipfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from skilltrain.data.collecting.archive_members import MAX_PATH_BYTES, ArchiveError, ArchiveLimits, check_totals

_END, _END_FORMAT = b"PK\x05\x06", struct.Struct("<4s4H2LH")
_END_64 = b"PK\x06\x07"
_LOCAL, _LOCAL_FORMAT = b"PK\x03\x04", struct.Struct("<4s5H3L2H")
_ENTRY_BYTES = 46 + MAX_PATH_BYTES + 512  # of the directory: a header, a name, extra fields
_MAX_COMMENT = 2**16
_ENCRYPTED = 0x2041  # by password, strong, or the directory itself
_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}


def check_zip_end(path: Path, limits: ArchiveLimits) -> None:
    """Raises ArchiveError where the directory, of which zipfile makes an object an entry, is too large to read."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, num_bytes - _MAX_COMMENT - _END_FORMAT.size))
        tail = file.read()
    # As zipfile looks for it: at the very end where there is no comment, else the last one that is found.
    start = len(tail) - _END_FORMAT.size
    if start < 0 or not tail.startswith(_END, start) or not tail.endswith(b"\0\0"):
        start = tail.rfind(_END)
    if start < 0 or start + _END_FORMAT.size > len(tail):
        raise ArchiveError("broken_archive", "has no end of a zip file: it is cut off")
    if tail.startswith(_END_64, start - 20) and start >= 20:
        raise ArchiveError("unknown_format", "is a zip64 file, which nothing of a skill's size needs to be")
    num_entries, directory_bytes = _END_FORMAT.unpack_from(tail, start)[4:6]
    check_totals(num_entries, 0, num_bytes, limits)
    if directory_bytes > num_bytes - len(tail) + start:
        raise ArchiveError("broken_archive", "has a directory that starts before the file does")
    if directory_bytes > limits.max_files * _ENTRY_BYTES:
        raise ArchiveError("bomb", f"has a directory of {directory_bytes:,} bytes", float(directory_bytes))


def check_zip_entries(path: Path, infos: Sequence[zipfile.ZipInfo], directory_start: int) -> None:
    """Raises ArchiveError for encrypted entries, unknown compression, and entries that share bytes."""
    spans = []
    with path.open("rb") as file:
        for info in infos:
            name = ascii(info.orig_filename[:120])
            if info.flag_bits & _ENCRYPTED:
                raise ArchiveError("encrypted", f"{name} is encrypted")
            if info.compress_type not in _METHODS:
                raise ArchiveError("unknown_format", f"{name} is compressed by method {info.compress_type}")
            file.seek(max(0, info.header_offset))
            header = file.read(_LOCAL_FORMAT.size)
            if info.header_offset < 0 or len(header) < _LOCAL_FORMAT.size or not header.startswith(_LOCAL):
                raise ArchiveError("broken_archive", f"{name} has no header of its own")
            lengths = sum(_LOCAL_FORMAT.unpack(header)[-2:])
            spans.append((info.header_offset, info.header_offset + len(header) + lengths + info.compress_size, name))
    spans.sort()
    for (_, end, name), (start, _, _) in pairwise([*spans, (directory_start, 0, "")]):
        if end > start:
            raise ArchiveError("bomb", f"{name} shares bytes with what comes after it")
