#!/usr/bin/env python
"""Check that a folder holds the inputs with which the benchmarks were run.

python benchmarks/check_inputs.py DATA

inputs.yaml beside this program lists these inputs with their source, SHA-256 and number of rows.
Prints a line for each input. The exit code is 1 if any is missing or differs.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import yaml

INPUTS = Path(__file__).with_name("inputs.yaml")


def describe(path: Path) -> dict[str, Any]:
    """Return the SHA-256 of a file or folder, and its number of rows, entries or files.

    The hash of a folder is that of its list of files: lines with the hash and the relative path.
    """
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        lines = [f"{sha256_of(file)}  {file.relative_to(path).as_posix()}\n" for file in files]
        digest = hashlib.sha256("".join(lines).encode()).hexdigest()
        return {"sha256": digest, "files": len(files)}
    entry: dict[str, Any] = {"sha256": sha256_of(path)}
    if path.suffix == ".parquet":
        entry["rows"] = pq.read_metadata(path).num_rows
    if path.suffix == ".jsonl":
        entry["rows"] = len(path.read_bytes().splitlines())
    return entry


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def main(data: Path) -> int:
    """Compare the inputs in a folder with inputs.yaml. Return the exit code."""
    inputs = yaml.safe_load(INPUTS.read_text(encoding="utf-8"))["inputs"]
    num_faults = 0
    for group in inputs.values():
        for name, expected in group["files"].items():
            path = data / name
            if not path.exists():
                result = "missing"
            elif describe(path) != expected:
                result = "differs"
            else:
                result = "equal"
            num_faults += result != "equal"
            print(f"{name}: {result}")
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
