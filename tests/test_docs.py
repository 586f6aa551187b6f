"""The documentation builds, its figures have sources, and its paragraphs are short."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_PARAGRAPH_WORDS = 80
MAX_README_LINES = 120
CHECKER = runpy.run_path(str(ROOT / "docs" / "check_figures.py"))
PAGES = [str(page.relative_to(ROOT)) for page in CHECKER["documents"]()]
# Lines of lists, tables, headings, quotes, HTML and admonitions are no prose.
NO_PROSE = re.compile(r"^\s*([-*|#>:<!=?]|\d+\.)")


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def test_site_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(tmp_path)]

    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


@pytest.mark.parametrize("page", PAGES)
def test_figures_have_sources(page: str):
    faults = CHECKER["find_faults"](read(page))

    assert faults == []


@pytest.mark.parametrize("page", PAGES)
def test_paragraphs_are_short(page: str):
    blocks = CHECKER["blocks_of"](read(page))
    prose = [block for block in blocks if not NO_PROSE.match(block)]

    long_ones = [block[:60] for block in prose if len(block.split()) > MAX_PARAGRAPH_WORDS]

    assert long_ones == []


def test_readme_is_short():
    assert len(read("README.md").splitlines()) <= MAX_README_LINES


@pytest.fixture
def results(tmp_path) -> Path:
    """A folder with one results file."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "a.yaml").write_text("Hit@1: .58 [.52, .65], 250 queries\n")
    return tmp_path


def test_figure_without_source_is_a_fault(results: Path):
    faults = CHECKER["find_faults"]("The router has .58 here.", results)

    assert faults == ["The router has .58 here.: no source for .58"]


def test_figure_that_differs_from_its_source_is_a_fault(results: Path):
    text = "<!-- figures: results/a.yaml -->\nThe router has .59 [.52, .65], n = 250."

    faults = CHECKER["find_faults"](text, results)

    assert len(faults) == 1
    assert faults[0].endswith("not in results/a.yaml: 0.59")


def test_figure_from_missing_file_is_a_fault(results: Path):
    faults = CHECKER["find_faults"]("<!-- figures: results/b.yaml -->\nIt has .58.", results)

    assert faults == ["It has .58.: benchmarks/results/b.yaml does not exist"]


def test_figure_in_its_results_file_passes(results: Path):
    text = "<!-- figures: results/a.yaml -->\n\n| 0.580 | [.52, .65] |\n\nNo figure here."

    assert CHECKER["find_faults"](text, results) == []


def test_source_covers_one_block(results: Path):
    text = "<!-- figures: SkillRouter, table 1 -->\nThey have .74.\n\nWe have .76."

    faults = CHECKER["find_faults"](text, results)

    assert faults == ["We have .76.: no source for .76"]
