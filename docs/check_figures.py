"""Check that every measured figure in README.md and docs/ says where it comes from.

Usage: python docs/check_figures.py

A comment stands above each paragraph, list or table with figures:

    <!-- figures: results/quickstart.yaml -->   each figure is in benchmarks/results/quickstart.yaml
    <!-- figures: SkillRouter, table 1 -->      another source, named in words
    <!-- figures: setting -->                   a default or a limit of the program

One comment may name several result files, separated by commas. A comment
`<!-- figures on this page: ... -->` is for all blocks of a page without one of their own.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks"
MARKER = re.compile(r"<!-- figures: (.+?) -->")
PAGE_MARKER = re.compile(r"<!-- figures on this page: (.+?) -->")
FENCED_BLOCK = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK_TARGET = re.compile(r"\]\([^)]*\)")
UNITS = r"(?:GB|GiB|MB|MiB|KB|ms|s|seconds?|min|minutes?|hours?|tokens/s)\b"
# A score, a count of measurements, a p-value, a share (but the level of an interval), or an amount
# with a unit.
FIGURE = re.compile(
    r"[<>]?-?\d*\.\d{2,}|\bn = [\d,]+|\bp [=<] \.\d+|\b(?!95\s?%)\d[\d.,]*\s?%"
    rf"|\d[\d.,]*\s{UNITS}"
)
NUMBER = re.compile(r"\d[\d,]*\.?\d*|\.\d+")


def documents() -> list[Path]:
    """Return README.md and all hand-written pages."""
    pages = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", *(page for page in pages if page.parent.name != "reference")]


def find_faults(text: str, results: Path = RESULTS) -> list[str]:
    """Return one line for each block whose figures have no source or differ from it.

    Args:
        text: A page in Markdown.
        results: Folder that contains `results/`.
    """
    faults = []
    page_marker = PAGE_MARKER.search(text)
    page_source = page_marker[1] if page_marker else None
    source = page_source
    for block in blocks_of(PAGE_MARKER.sub("", text)):
        marker = MARKER.search(block)
        prose = MARKER.sub("", block).strip()
        if marker is not None:
            source = marker[1]
        figures = FIGURE.findall(prose)
        if prose and figures:
            faults += faults_of(prose, figures, source, results)
        if prose:
            source = page_source
    return faults


def blocks_of(text: str) -> list[str]:
    """Return the paragraphs, lists and tables of a page, without code and link targets."""
    text = FENCED_BLOCK.sub("", text)
    text = INLINE_CODE.sub("", text)
    text = LINK_TARGET.sub("]", text)
    return re.split(r"\n\s*\n", text)


def faults_of(prose: str, figures: list[str], source: str | None, results: Path) -> list[str]:
    """Return what is wrong with the figures of one block."""
    start = " ".join(prose.split())[:60]
    if source is None:
        return [f"{start}: no source for {', '.join(figures[:5])}"]
    if not source.startswith("results/"):
        return []

    known: set[str] = set()
    for name in source.split(","):
        path = results / name.strip()
        if not path.is_file():
            return [f"{start}: benchmarks/{name.strip()} does not exist"]
        known |= numbers_in(path.read_text(encoding="utf-8"))
    missing = sorted(numbers_in(" ".join(figures)) - known)
    return [f"{start}: not in {source}: {', '.join(missing)}"] if missing else []


def numbers_in(text: str) -> set[str]:
    """Return the numbers of a text, with `0.5`, `.50` and `.5` written alike."""
    numbers = (number.replace(",", "").rstrip(".") for number in NUMBER.findall(text))
    return {str(float(number)) for number in numbers if number}


def main() -> None:
    faults = []
    for page in documents():
        for fault in find_faults(page.read_text(encoding="utf-8")):
            faults.append(f"{page.relative_to(ROOT)}: {fault}")
    print("\n".join(faults) or "Every figure has its source.")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
