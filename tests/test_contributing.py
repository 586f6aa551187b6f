"""The examples of CONTRIBUTING, as a package beside a copy of the project."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

# Their settings name the plug-ins that are installed now.
import skilltrain.data.filter
import skilltrain.data.mine
import skilltrain.testing as checks
from benchmark_folders import write_ours, write_pool
from skilltrain.data.filter_layers import PAIR, FilterPool
from skilltrain.data.sources import Mining
from skilltrain.losses import EncoderLoss
from skilltrain.metrics.measures import Relevance
from skilltrain.plugins import BUILT_IN, load_plugin, plugin_paths
from skilltrain.records import Query, Skill
from skilltrain.retrieval.nearest import ChunkVectors
from skilltrain.tables import DROPPED, LISTS, RANKINGS, read_table
from skilltrain.workers import WorkersConfig
from small_library import skilltrain, succeeds
from test_layers import violations
from test_sizes import broken_rules

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
MODULE = re.compile(r"^```python\n(# acme/(\w+)\.py\n.*?)^```", re.MULTILINE | re.DOTALL)
ENTRY = re.compile(r'^- Entry point: `("(\w+)\.(\w+)" = "(acme\.\w+:\w+)")`', re.MULTILINE)
ENTRIES = {kind: (line, name, path) for line, kind, name, path in ENTRY.findall(TEXT)}
EXAMPLES = {name: code for code, name in MODULE.findall(TEXT)}
MAX_LINES = 15  # of code
# Where each example would stand in skilltrain itself.
PLACES = {
    "losses": "losses",
    "rankers": "retrieval",
    "layers": "data",
    "sources": "data",
    "measures": "metrics",
    "benchmark": "metrics",
    "analyses": "evaluation",
    "optimizers": "training",
    "schedulers": "training",
    "hooks": "training",
    "prompts": "data",
    "stages": "data",
    "commands": "cli",
}
SKILLS = [
    Skill("gold", "pdf reader", "", "read the pages of a pdf"),
    Skill("copy", "reader", "", "first read the pages of a pdf and then print them"),
    Skill("far", "git", "", "commit and push"),
    Skill("near", "docx reader", "", "read a file of words"),
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of the source, and beside it the package acme with its entry points."""
    clone = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "src", clone / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    for name, code in EXAMPLES.items():
        file = clone / "src" / "acme" / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(code, encoding="utf-8")
    info = clone / "src" / "acme-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    lines = [line.replace('"', "") for line, *_ in ENTRIES.values()]
    (info / "entry_points.txt").write_text("\n".join(["[skilltrain.plugins]", *lines]))
    return clone


@pytest.fixture
def acme(clone, monkeypatch):
    """The package, installed in this process."""
    monkeypatch.syspath_prepend(clone / "src")
    plugin_paths.cache_clear()
    yield
    plugin_paths.cache_clear()


@pytest.fixture
def library(tmp_path) -> Path:
    """A pool, queries, and a benchmark in the form of the example."""
    write_pool(tmp_path / "pool", SKILLS)
    write_ours(tmp_path / "queries", [("q1", "read a pdf", "train")], {"q1": {"gold": "required"}})
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "acme.tsv").write_text("read a pdf\tgold\ncommit\tfar\n")
    return tmp_path


def plugin(kind: str):
    """The plug-in of an example, by the name of its entry point."""
    _, name, path = ENTRIES[kind]
    loaded = load_plugin(kind, name)
    assert loaded is load_plugin(kind, path)
    return loaded


def mine(library: Path, model: Path) -> None:
    paths = [f"{name}={library / name}" for name in ("pool", "queries")]
    arguments = [f"encoder.source={model}", "sources=[random, longest]", f"out={library / 'mined'}"]
    succeeds("mine", *paths, *arguments)


# Style --------------------------------------------------------------------------------------------


def test_every_kind_has_an_example():
    assert ENTRIES.keys() == BUILT_IN.keys()
    assert EXAMPLES.keys() == PLACES.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_keeps_the_rules(name: str):
    lines = [line for line in EXAMPLES[name].splitlines()[1:] if line.strip()]

    assert len(lines) <= MAX_LINES
    assert broken_rules(EXAMPLES[name]) == []
    assert violations(EXAMPLES[name], f"skilltrain.{PLACES[name]}.{name}") == []


def test_examples_pass_ruff(clone):
    for command in (("check", "--no-cache"), ("format", "--check", "--no-cache")):
        ruff = [sys.executable, "-m", "ruff", *command, "src/acme"]
        outcome = subprocess.run(ruff, cwd=clone, capture_output=True, text=True)

        assert outcome.returncode == 0, outcome.stdout


# Checks -------------------------------------------------------------------------------------------


def test_loss_passes_its_check(acme):
    hinge = plugin("loss")

    checks.check_loss(hinge())

    assert isinstance(TypeAdapter(EncoderLoss).validate_python({"name": "hinge"}), hinge)


def test_ranker_passes_its_check(acme):
    headline = plugin("ranker")

    ranker = headline().over({skill.skill_id: skill for skill in SKILLS})
    queries = [Query("q1", "read a pdf", "", "", "")]
    checks.check_ranker(ranker, queries, SKILLS)

    assert ranker.rank(queries, None, 1)["q1"][0][0] == "gold"


def test_layer_passes_its_check(acme):
    pairs = np.zeros(3, dtype=PAIR)
    pairs["skill"] = [1, 2, 3]
    pool = FilterPool(SKILLS, pairs, ["random"] * 3, ["q"], None, None, WorkersConfig(num=1))
    contains = plugin("filter")()

    checks.check_filter(contains, pool)

    np.testing.assert_array_equal(contains.check(pool, pairs), [1, np.nan, np.nan])


def test_source_passes_its_check(acme):
    vectors = np.eye(4, dtype=np.float32)
    query = Query("q1", "read a pdf", "", "", "")
    chunks = ChunkVectors.one_each(vectors)
    mining = Mining(SKILLS, [query], [np.array([0])], vectors[:1], chunks, 3, "pool", seed=0)
    longest = plugin("source")()

    checks.check_source(longest, mining, limit=2)

    positions, _ = longest.find(mining, 0, 2)
    assert [SKILLS[position].skill_id for position in positions] == ["copy", "near"]


def test_measure_passes_its_check(acme):
    half = plugin("measure")

    checks.check_measure("Half@3")
    checks.check_measure("acme.measures:half@3")

    relevance = Relevance(frozenset("abc"), dict.fromkeys("abc", 1.0))
    assert [half(ranking, relevance, 3) for ranking in ("a", "ab", "xab", "xyab")] == [0, 1, 1, 0]


def test_reader_passes_its_check(acme, library):
    reader = plugin("benchmark")

    checks.check_benchmark(reader, library / "bench")

    tasks = reader.read(library / "bench", "test").tasks
    assert [task.query.text for task in tasks] == ["read a pdf", "commit"]


def test_stage_passes_its_check(acme, library, tmp_path):
    stage = plugin("stage")
    config = stage(stage="count_words", pool=library / "pool", out=tmp_path / "out")
    (tmp_path / "twice").mkdir()

    checks.check_stage(config.run, tmp_path / "twice")

    assert (tmp_path / "twice" / "1" / "words.txt").read_text() == "25\n"


# Use by name --------------------------------------------------------------------------------------


def test_evaluation_uses_examples(acme, library):
    arguments = [f"benchmark={library / 'bench'}", f"pool={library / 'pool'}"]
    arguments += ["measures=[Hit@1, Half@3]", "analysis.more=[{kind: misses}]"]
    arguments += ["systems=[{name: mine, rankers: [{kind: headline}]}]"]

    succeeds("evaluate", *arguments, f"out={library / 'report'}")

    report = json.loads((library / "report" / "metrics.json").read_text())

    assert report["systems"][0]["metrics"]["Half@3"]["mean"] == 1
    assert report["analysis"]["misses"] == [{"system": "mine", "misses": 0}]
    assert "| system | misses |" in (library / "report" / "report.md").read_text()
    assert "<h2>misses</h2>" in (library / "report" / "report.html").read_text()
    assert "1 if at least half" in (library / "report" / "report.md").read_text()


def test_mining_uses_examples(acme, library, model_folders):
    mine(library, model_folders["bert"])
    paths = [f"{name}={library / name}" for name in ("pool", "queries")]
    rankings = f"rankings={library / 'mined'}"
    layers = "layers=[{name: contains}]"
    succeeds("filter", *paths, rankings, layers, f"out={library / 'kept'}")
    rankings = f"rankings={library / 'kept'}"
    succeeds("lists", *paths, rankings, "quotas={longest: 2}", f"out={library / 'lists'}")

    mined = read_table(library / "mined", RANKINGS).to_pylist()
    dropped = read_table(library / "kept", DROPPED).to_pylist()
    (row,) = read_table(library / "lists", LISTS).to_pylist()
    longest = [row["skill_id"] for row in mined if row["stage"] == "longest"]

    assert longest == ["copy", "near", "far"]
    assert {(row["skill_id"], row["filter"]) for row in dropped} == {("copy", "contains")}
    assert sorted(row["sources"]) == ["gold", "longest", "longest"]


@pytest.mark.parametrize("prompt", ["hurried", "acme.prompts:HURRIED", "hurried.yaml"])
def test_synthesis_uses_prompt_of_example(acme, library, monkeypatch, prompt: str):
    monkeypatch.chdir(library)
    Path("hurried.yaml").write_text(json.dumps(load_plugin("prompt", "hurried")))
    settings = ["llm.kind=openai", "llm.model=made-up", "llm.prices={prompt: 1, completion: 1}"]

    outcome = succeeds(
        "synthesize", "pool=pool", f"prompt={prompt}", *settings, "out=written", "--dry-run"
    )

    assert f'"num_asked": {len(SKILLS)}' in outcome.out


def test_help_names_examples(clone, library):
    word_by_command = {
        "filter --help-all": "name=contains",
        "mine --help-all": "longest",
        "evaluate --help-all": "kind=misses",
        "recipes schema filter": '"contains"',
        "recipes schema evaluate": '"misses"',
        "--help": "count_words",
        f"count_words pool={library / 'pool'} out={library / 'counted'}": "counted",
        f"longest {library / 'pool'}": "reader",
    }
    # One process runs all commands; a zero byte ends the output of each.
    program = "import sys, typer, skilltrain.cli as c\n"
    for command in word_by_command:
        arguments = f"{command.split()!r}, standalone_mode=False"
        program += f"typer.main.get_command(c.app).main({arguments})\nprint('\\0')\n"
    environment = os.environ | {"PYTHONPATH": str(clone / "src")}

    outcome = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )

    outputs = outcome.stdout.split("\0")
    for (command, word), output in zip(word_by_command.items(), outputs, strict=False):
        assert word in output, f"{command}: {output}{outcome.stderr}"


def test_unknown_measure_names_the_nearest(acme, library):
    outcome = skilltrain("evaluate", f"benchmark={library / 'bench'}", "measures=[Hlaf@3]", "out=x")

    assert outcome.code == 2
    assert "did you mean 'Half@3'?" in outcome.err


def test_unknown_prompt_names_all(acme):
    outcome = skilltrain("synthesize", "pool=x", "prompt=hurry", "out=x")

    assert outcome.code == 2
    assert "unknown prompt 'hurry'; choose from styles, skillrouter, hurried" in outcome.err
