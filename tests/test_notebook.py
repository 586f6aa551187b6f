"""The example notebook runs from its first cell to its last, and shows bars and tables."""

import json
import shutil
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs the extra dev")
nbformat = pytest.importorskip("nbformat", reason="needs the extra dev")
pytest.importorskip("ipywidgets", reason="needs the extra dev")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"
SAMPLES = ROOT / "examples" / "skill_library"
TOPICS = ("documents", "spreadsheets")  # those of the notebook
WIDGET = "application/vnd.jupyter.widget-view+json"
MAX_OUTPUT_CHARS = 30_000  # of all texts that the notebook shows, without pictures


def copy_library(folder: Path) -> None:
    """Copy every second skill and query of the notebook's topics. All would take twice as long."""
    (folder / "queries").mkdir(parents=True)
    for topic in TOPICS:
        for skill in sorted((SAMPLES / "skills" / topic).iterdir())[::2]:
            shutil.copytree(skill, folder / "skills" / topic / skill.name)
        queries = SAMPLES / "queries" / f"{topic}.jsonl"
        lines = queries.read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / "queries" / queries.name).write_text("".join(lines[::2]), encoding="utf-8")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> dict[str, list]:
    """Outputs of the executed notebook by the first line of a cell."""
    folder = tmp_path_factory.mktemp("notebook")
    copy_library(folder / "skill_library")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return {
        cell.source.splitlines()[0]: cell.outputs
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


def kinds_of(outputs: list) -> set[str]:
    """Return the MIME types of a cell's outputs."""
    return {kind for output in outputs for kind in output.get("data", {})}


def last_html(outputs: list) -> str:
    return outputs[-1]["data"]["text/html"]


def test_stored_notebook_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))

    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["outputs"] for cell in cells] == [[]] * len(cells)
    assert {cell["execution_count"] for cell in cells} == {None}


def test_training_shows_bars(outputs):
    (cell,) = [name for name in outputs if name.startswith("encoder = skilltrain.train")]

    assert WIDGET in kinds_of(outputs[cell])


def test_answer_is_a_table(outputs):
    (cell,) = [name for name in outputs if name.startswith("router.route(")]

    assert "<th>skill</th><th>score</th>" in last_html(outputs[cell])
    assert "documents/" in last_html(outputs[cell])


def test_curves_are_pictures(outputs):
    plots = [cell for cell in outputs if "image/png" in kinds_of(outputs[cell])]

    assert len(plots) == 2


def test_outputs_are_short(outputs):
    texts = []
    for cell_outputs in outputs.values():
        for output in cell_outputs:
            shown = output.get("data", {}).get("text/plain", "")
            texts.append(output.get("text", "") + shown)

    assert "Warning" not in "".join(texts)
    assert sum(map(len, texts)) < MAX_OUTPUT_CHARS
