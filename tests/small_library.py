"""A small library of twenty skills and sixteen queries, with commands for tiny models."""

import contextlib
import functools
import io
import json
from dataclasses import dataclass
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState

from skilltrain.cli import main

# What each skill does, its first step and its second step, by family and name.
SKILLS = {
    "documents": {
        "pdf-text-extract": (
            "extract the text of a pdf",
            "read every page of the pdf",
            "write its text to a file",
        ),
        "pdf-merge": (
            "merge pdf files into one document",
            "sort the files by name",
            "join their pages in that order",
        ),
        "contract-review": (
            "review a contract for risky clauses",
            "find clauses on payment",
            "list what is missing",
        ),
        "report-format": (
            "format a report for print",
            "set the margins of the report",
            "number its headings",
        ),
        "scan-cleanup": (
            "clean scanned paper documents",
            "straighten each scanned sheet",
            "remove dark borders",
        ),
    },
    "data": {
        "chart-maker": (
            "draw a chart from a table",
            "choose a chart for the data",
            "label both axes of the chart",
        ),
        "table-join": (
            "join two tables of data",
            "find the common column",
            "check that no row of data is lost",
        ),
        "spreadsheet-audit": (
            "audit a spreadsheet for errors",
            "trace each formula",
            "mark cells with constants",
        ),
        "csv-repair": (
            "repair broken csv data",
            "detect the delimiter of the data",
            "quote fields with line breaks",
        ),
        "outlier-report": (
            "report outliers in sales data",
            "compute the median of each month",
            "flag what is far",
        ),
    },
    "operations": {
        "pod-deploy": (
            "deploy pods to kubernetes",
            "write the manifest of the pods",
            "wait until they are ready",
        ),
        "pod-debug": (
            "find out why pods crash",
            "read the last log of the crashed pods",
            "compare memory limits",
        ),
        "image-slim": (
            "make a container image smaller",
            "use a builder layer",
            "leave caches out of the image",
        ),
        "log-search": (
            "search the logs of a cluster",
            "filter log lines by request",
            "count errors each minute",
        ),
        "backup-plan": (
            "plan backups of a database",
            "measure how fast data grows",
            "test one restore a month",
        ),
    },
    "media": {
        "audio-clip": (
            "cut a clip out of audio",
            "find the silence around the clip",
            "fade both ends of it",
        ),
        "video-subtitle": (
            "write subtitles for a video",
            "transcribe speech of the video",
            "keep two short lines",
        ),
        "photo-sort": (
            "sort photos by place and day",
            "read the date of each photo",
            "group those of one trip",
        ),
        "translate-text": (
            "translate a text for the web",
            "keep names and numbers",
            "ask a native speaker to review",
        ),
        "podcast-notes": (
            "write notes for a podcast",
            "split the talk into topics",
            "link what guests mention",
        ),
    },
}
QUERIES = [
    ("train", "get the words out of this pdf page by page", ["documents/pdf-text-extract"]),
    ("train", "I have nine pdf files and want one document", ["documents/pdf-merge"]),
    (
        "train",
        "tell me which clauses in this agreement are dangerous",
        ["documents/contract-review"],
    ),
    ("train", "the scanned sheets are crooked and dark at the border", ["documents/scan-cleanup"]),
    ("train", "show my table of sales as a picture with labelled axes", ["data/chart-maker"]),
    ("train", "combine two tables by their common column without losing rows", ["data/table-join"]),
    (
        "train",
        "somebody typed constants over formulas in our spreadsheet",
        ["data/spreadsheet-audit"],
    ),
    ("train", "bring three pods up on kubernetes and wait for them", ["operations/pod-deploy"]),
    (
        "train",
        "pods restart again and again, what do the logs say",
        ["operations/pod-debug", "operations/log-search"],
    ),
    ("train", "our container image has two gigabytes, make it small", ["operations/image-slim"]),
    ("train", "cut the laughter out of the audio and fade the ends", ["media/audio-clip"]),
    ("train", "put short lines of speech under my video", ["media/video-subtitle"]),
    ("test", "number the headings of a report before print", ["documents/report-format"]),
    ("test", "fields with line breaks destroy my csv import", ["data/csv-repair"]),
    ("test", "thousands of photos, put those of one trip together", ["media/photo-sort"]),
    (
        "test",
        "write notes for a talk and translate them",
        ["media/podcast-notes", "media/translate-text"],
    ),
]
# An untrained encoder gives all texts similar vectors.
LAYERS = "layers=[{name: name}, {name: jaccard}, {name: cosine, above: 0.998}]"
RECIPE = 'recipe: r"""\n{}\n# """; from skilltrain.recipe import run; run(__name__, __file__)\n'


@dataclass(frozen=True)
class Outcome:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def error_line(self) -> str:
        """The last line, which is the only error; the command failed without a traceback."""
        lines = self.err.splitlines()
        errors = [line for line in lines if line.startswith("error: ")]
        assert self.code == 2, self
        assert "Traceback" not in self.err, self
        assert errors == lines[-1:], self
        return lines[-1]

    @property
    def only_line(self) -> str:
        """The error of a command that wrote nothing else but warnings."""
        lines = [line for line in self.err.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1, self
        assert not self.out, self
        return self.error_line


def skilltrain(*arguments: object) -> Outcome:
    """Run a command in this process, without a terminal."""
    out = io.StringIO()
    err = io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(argument) for argument in arguments])
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        finally:
            forget_ranks()
    return Outcome(code, out.getvalue(), err.getvalue())


def forget_ranks() -> None:
    """Let the next training of this process set accelerate up anew."""
    PartialState._reset_state()
    AcceleratorState._reset_state()


def succeeds(*arguments: object) -> Outcome:
    """Run a command that must succeed."""
    outcome = skilltrain(*arguments)
    assert outcome.code == 0, outcome
    return outcome


def skill_text(name: str, family: str, steps: tuple[str, str, str]) -> str:
    """Return a SKILL.md; one skill has no category."""
    problem, first, second = steps
    category = "" if name == "backup-plan" else f"category: {family}\n"
    title = name.replace("-", " ")
    return f"""---
name: {name}
description: How to {problem}.
{category}---
# {title.capitalize()}

## When to use
- The user wants to {problem} today
- Somebody needs help to {first} for Acme without asking a colleague

## Steps
1. {first.capitalize()} before anything else is changed.
2. {second.capitalize()}, then show the user what was done and why.
"""


def write_library(folder: Path) -> Path:
    """Write skills/FAMILY/NAME/SKILL.md and queries/all.jsonl to a folder and return it."""
    for family, members in SKILLS.items():
        for name, steps in members.items():
            file = folder / "skills" / family / name / "SKILL.md"
            file.parent.mkdir(parents=True)
            file.write_text(skill_text(name, family, steps))
    rows = [
        {
            "query_id": f"q{number:02}",
            "query": query,
            "skill_ids": skill_ids,
            "split": split,
            "origin": "test",
        }
        for number, (split, query, skill_ids) in enumerate(QUERIES)
    ]
    (folder / "queries").mkdir()
    (folder / "queries" / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def write_recipe(file: Path, text: str) -> Path:
    """Write a recipe that runs itself and return its file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(RECIPE.format(text.strip()))
    return file


def encoder_recipe(runs: Path, model: Path, lists: str = "encoder_lists") -> str:
    """Return the recipe of an encoder: two epochs, six steps of four queries."""
    return f"""
stage: train_encoder
model: {{source: {model}, max_tokens: 48, query_max_tokens: 48}}
data: {{pool: {runs}/pool, lists: {runs}/{lists}}}
loss: {{name: infonce, temperature: 0.05}}
training: {{epochs: 2, batch_size: 4, accumulation: 1, learning_rate: 1.0e-3, token_budget: 512}}
out: {runs}/encoder
"""


def reranker_recipe(runs: Path, model: Path, max_tokens: int = 96) -> str:
    """Return the recipe of a reranker: one epoch, three steps of two times two queries."""
    return f"""
stage: train_reranker
model: {{source: {model}, max_tokens: {max_tokens}, query_max_tokens: 24}}
data: {{pool: {runs}/pool, lists: {runs}/reranker_lists}}
training: {{batch_size: 2, accumulation: 2, learning_rate: 1.0e-3, token_budget: 512}}
out: {runs}/reranker
"""


def list_stages(runs: Path, library: Path, model: Path) -> list[tuple[str, ...]]:
    """Return the commands from the pool to the lists of an encoder."""
    pool = f"pool={runs}/pool"
    queries = f"queries={runs}/queries"
    encoder = (f"encoder.source={model}", f"encoder.cache={runs}/vectors")
    quotas = "quotas={semantic: 3, lexical: 2, taxonomy: 2, random: 1}"
    sources = (f"sources={library}/skills", "categories=from_pool")
    mined = f"rankings={runs}/mined"
    filtered = f"rankings={runs}/filtered"
    return [
        ("pool", *sources, *encoder, f"out={runs}/pool"),
        ("queries", f"files={library}/queries/*.jsonl", pool, f"out={runs}/queries"),
        ("mine", pool, queries, *encoder, "depth=8", f"out={runs}/mined"),
        ("filter", pool, queries, mined, *encoder, LAYERS, f"out={runs}/filtered"),
        ("lists", pool, queries, filtered, quotas, f"out={runs}/encoder_lists"),
    ]


def training_stages(runs: Path, model: Path) -> list[tuple[str, ...]]:
    """Return the commands that train an encoder on these lists, and a reranker behind it."""
    pool = f"pool={runs}/pool"
    queries = f"queries={runs}/queries"
    encoder = write_recipe(runs / "recipes" / "encoder.yaml", encoder_recipe(runs, model))
    reranker = write_recipe(runs / "recipes" / "reranker.yaml", reranker_recipe(runs, model))
    return [
        ("train", str(encoder)),
        (
            "candidates",
            pool,
            queries,
            "system.name=trained",
            "depth=12",
            f"out={runs}/candidates",
            f"system.rankers=[{{kind: dense, source: {runs}/encoder}}]",
        ),
        (
            "filter",
            pool,
            queries,
            f"rankings={runs}/candidates",
            "judged_positives=keep",
            f"encoder.source={model}",
            LAYERS,
            f"out={runs}/candidates_filtered",
        ),
        (
            "lists",
            pool,
            queries,
            f"rankings={runs}/candidates_filtered",
            "list_size=8",
            f"out={runs}/reranker_lists",
        ),
        ("train", str(reranker)),
    ]


@functools.cache
def trained(root: Path, model: Path) -> tuple[Path, list[tuple[str, ...]], list[Outcome]]:
    """Run all commands below `root`; return the folder of the runs, the commands and outcomes."""
    library = write_library(root / "library")
    stages = [*list_stages(root / "runs", library, model), *training_stages(root / "runs", model)]
    return root / "runs", stages, [succeeds(*stage) for stage in stages]


def contents(*folders: Path) -> dict[Path, tuple[int, int]]:
    """Return the time of change and the size of every path below these folders."""
    states = {}
    for folder in folders:
        for path in folder.rglob("*"):
            state = path.stat()
            states[path] = (state.st_mtime_ns, state.st_size)
    return states
