"""The page of `skilltrain inspect`: counts by hand, checks, missing runs, hostile texts."""

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from faults import raises
from skilltrain import tables
from skilltrain.data.lists import JUDGED
from skilltrain.evaluation.inspect_data import follow_runs, inspect_lists, page_values
from skilltrain.evaluation.page import percent
from skilltrain.plugins import plugin_paths
from skilltrain.records import Dropped, Query, Skill
from skilltrain.tables import DROPPED, LISTS, QUERIES, RANKINGS, SKILLS, read_table, write_table
from small_library import skilltrain, succeeds
from test_report import check_safe

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u202e\"'&"
BODY = "read the rows of the table and join them by their key "  # 54 characters
# skill_id: (name, description, body, category, lang, source)
POOL = {
    "s/join": ("table-join", "Join two tables.", BODY * 10, "data", "en", "s"),
    "t/join": ("Table Join", "Joins tables.", BODY * 9 + "differently", "data", "en", "t"),
    "s/chart": ("chart", "Draw a chart.", "draw " * 100, "data", "en", "s"),
    "s/pods": ("pods", "Restart pods.", "pods " * 30, "cloud", "en", "s"),
    "t/pods": ("k8s", "Restart pods.", "pods " * 30, "cloud", "en", "t"),
    "z/tu": ("图表", "画图。", "画图" * 200, None, "zh", "z"),
}
TEXTS = {
    "q1": "two tables must become one by a common key",
    "q2": "my pods keep failing, help",
    "q3": "draw it",
}
# query_id: (skill_id, verdict, source, rank)
ROWS = {
    "q1": [
        ("s/join", "required", "gold", 0),
        ("t/join", "irrelevant", "semantic", 1),
        ("s/chart", "irrelevant", "semantic", 4),
        ("z/tu", "irrelevant", "lexical", 2),
    ],
    "q2": [
        ("s/pods", "required", "gold", 0),
        ("t/pods", "irrelevant", "semantic", 2),
        ("s/chart", "irrelevant", "lexical", 3),
        ("z/tu", "irrelevant", "lexical", 9),
    ],
    "q3": [("s/chart", "required", "gold", 0), ("s/join", "irrelevant", "semantic", 1)],
}
MINED = {"semantic": 6, "lexical": 5}
DROPS = [
    Dropped("q1", "t/pods", "name", "same name as a gold skill", 1.0, "semantic", "s/join"),
    Dropped(
        "q1",
        "t/join",
        "jaccard",
        "body overlap 0.900 > 0.6 with a gold skill",
        0.9,
        "lexical",
        "s/join",
    ),
    Dropped("q3", "z/tu", "rank_window", "rank 1 is outside 2 to 50", 1.0, "lexical"),
]


def write_run(folder: Path, recipe: dict[str, Any], *tables: tuple[tables.TableSpec, Any]) -> Path:
    for spec, rows in tables:
        write_table(rows, spec, folder)
    folder.mkdir(exist_ok=True)
    (folder / "run.json").write_text(
        json.dumps({"recipe": recipe, "finished": True, "summary": {}}, default=str)
    )
    return folder


def list_rows(lists: dict[str, list[tuple[str, str, str, int]]]) -> list[dict[str, Any]]:
    """Return rows of LISTS."""
    rows = []
    for query_id, entries in lists.items():
        skill_ids, verdicts, sources, ranks = map(list, zip(*entries, strict=True))
        row = {"query_id": query_id, "skill_ids": skill_ids, "verdicts": verdicts}
        rows.append(row | {"sources": sources, "ranks": ranks})
    return rows


def ranking_rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Return rows of RANKINGS with as many candidates of each source as `sizes` says."""
    rows = []
    for stage, size in sizes.items():
        for rank in range(1, size + 1):
            row = {"query_id": "q1", "skill_id": f"k{rank}", "rank": rank, "score": 0.5}
            rows.append(row | {"stage": stage})
    return rows


def write_runs(
    root: Path, pool: Any = POOL, texts: Any = TEXTS, drops: Any = DROPS, lists: Any = ROWS
) -> Path:
    """Write the runs pool, queries, mined, filtered and lists; return the folder of lists.

    They are small enough to count by hand.
    """
    paths = {"pool": root / "pool", "queries": root / "queries"}
    queries = [Query(query_id, text, "single", "llm", "train") for query_id, text in texts.items()]
    skills = [Skill(skill_id, *row) for skill_id, row in pool.items()]
    empty = Dropped("", "s/empty", "empty", "body is empty")
    write_run(paths["pool"], {"stage": "pool"}, (SKILLS, skills), (DROPPED, [empty]))
    write_run(paths["queries"], {"stage": "queries"}, (QUERIES, queries), (DROPPED, []))
    mined = write_run(
        root / "mined", {"stage": "mine", **paths}, (RANKINGS, ranking_rows(MINED)), (DROPPED, [])
    )
    num_dropped = Counter(drop.source for drop in drops)
    num_kept = {source: size - num_dropped[source] for source, size in MINED.items()}
    layers = [{"name": "name"}, {"name": "jaccard"}, {"name": "cosine"}, {"name": "rank_window"}]
    filtered = write_run(
        root / "filtered",
        {"stage": "filter", **paths, "rankings": mined, "layers": layers},
        (RANKINGS, ranking_rows(num_kept)),
        (DROPPED, drops),
    )
    quotas = {"semantic": 2, "lexical": 2, "taxonomy": 1}
    return write_run(
        root / "lists",
        {"stage": "lists", **paths, "rankings": filtered, "quotas": quotas},
        (LISTS, list_rows(lists)),
        (QUERIES, queries),
        (
            DROPPED,
            [Dropped("q9", "", "no_positive", "no required skill of this query is in the pool")],
        ),
    )


def values_of(folder: Path, max_lists: int = 10) -> dict[str, Any]:
    """Return the variables of the page of `folder`."""
    rows = read_table(folder, LISTS).to_pylist()
    return page_values(rows, follow_runs(folder), None, max_lists)


def page_of(folder: Path, max_lists: int = 10) -> str:
    """Write the page of `folder` beside it, and return its text."""
    return Path(inspect_lists(folder, None, None, max_lists)["page"]).read_text()


def test_candidates_are_counted_by_source(tmp_path: Path):
    values = values_of(write_runs(tmp_path))

    assert values["mined"] == {"semantic": 6, "lexical": 5}
    assert values["dropped"] == {"semantic": 1, "lexical": 2}
    assert values["kept"] == {"semantic": 5, "lexical": 3}
    assert values["chosen"] == {"semantic": 4, "lexical": 3}


def test_drops_are_counted_by_filter(tmp_path: Path):
    values = values_of(write_runs(tmp_path))

    counts = {key: len(drops) for key, drops in values["drops"].items()}

    assert counts == {
        ("pool", "empty"): 1,
        ("filter", "name"): 1,
        ("filter", "jaccard"): 1,
        ("filter", "rank_window"): 1,
        ("lists", "no_positive"): 1,
    }


def test_drop_is_shown_beside_its_gold_skill(tmp_path: Path):
    page = page_of(write_runs(tmp_path))

    headings = re.findall(r'<h4 dir="auto">(.*?)</h4>', page)

    assert headings == [
        *("k8s", "table-join"),
        *("Table Join", "table-join"),
        *("图表", "chart"),  # a drop that names no skill: the positive of its query
    ]


def test_a_positive_may_follow_negatives(tmp_path: Path):
    entries = [("s/join", "irrelevant", "top", 1), ("z/tu", "required", "gold", 2)]

    values = values_of(write_runs(tmp_path, lists={"q3": entries}))

    assert values["positives"] == {"q3": "z/tu"}


def test_pair_of_two_sources_is_shown_once(tmp_path: Path):
    twice = [DROPS[1], replace(DROPS[1], source="semantic")]

    drops = values_of(write_runs(tmp_path, drops=twice))["shown_drops"]

    assert [drop.skill_id for drop in drops] == ["t/join"]


def test_source_that_gave_nothing_is_named(tmp_path: Path):
    page = page_of(write_runs(tmp_path))

    assert "<h3>No negative came from taxonomy</h3>" in page
    assert "Candidates of" not in page


def test_candidates_that_vanished_are_counted(tmp_path: Path):
    lists = write_runs(tmp_path)
    write_table(ranking_rows({"semantic": 3, "lexical": 3}), RANKINGS, tmp_path / "filtered")

    page = page_of(lists)

    assert "<b>2</b><div><h3>Candidates of semantic are missing" in page


def test_built_in_sources_and_filters_are_explained(tmp_path: Path):
    sources = dict.fromkeys(plugin_paths("source"), 1)
    drops = [replace(DROPS[0], filter=name) for name in plugin_paths("filter")]
    lists = write_runs(tmp_path, drops=drops)
    record = json.loads((lists / "run.json").read_text())
    record["recipe"]["quotas"] = sources | {JUDGED: 1}
    (lists / "run.json").write_text(json.dumps(record))

    page = page_of(lists)

    explained = set(re.findall(r'<abbr title="[^"]+">(\w+)</abbr>', page))
    assert explained >= {*sources, JUDGED, *plugin_paths("filter")}
    assert "<dt>jaccard</dt><dd>Filter. The candidate’s body shares" in page
    assert "<dt>judged</dt><dd>Judged by" in page


def test_sources_may_exceed_their_quotas(tmp_path: Path):
    page = page_of(write_runs(tmp_path))

    assert "so they can give more per list than their quota" in page


def test_checks_point_at_the_skills(tmp_path: Path):
    findings = values_of(write_runs(tmp_path))["findings"]

    assert findings == {
        "leak": {"q2": {"s/pods"}},
        "same_name": {"q1": {"t/join"}},
        "same_description": {"q2": {"t/pods"}},
        "same_body": {"q2": {"t/pods"}},
        "short_positive": {"q2": {"s/pods"}},
    }


def test_near_duplicates_of_positives_are_found(tmp_path: Path):
    lists = write_runs(tmp_path)
    rows = [{"skill_id": skill_id, "cluster": 0} for skill_id in ("s/join", "s/chart")]
    write_table(rows, tables.CLUSTERS, tmp_path / "pool")

    findings = values_of(lists)["findings"]

    assert findings["cluster"] == {"q1": {"s/chart"}, "q3": {"s/join"}}


def test_positive_in_another_language_is_found(tmp_path: Path):
    lists = ROWS | {"q2": [("z/tu", "required", "gold", 0), *ROWS["q2"][1:]]}
    texts = TEXTS | {"q2": "please restart the pods for me"}

    findings = values_of(write_runs(tmp_path, texts=texts, lists=lists))["findings"]

    assert findings["other_language"] == {"q2": {"z/tu"}}


def test_unknown_skills_are_shown_with_scores(tmp_path: Path):
    lists = write_runs(tmp_path, lists={"q1": [*ROWS["q1"][:2], ("gone", "irrelevant", "x", 9)]})
    rows = read_table(lists, LISTS).to_pylist()
    write_table([row | {"teacher_scores": [0.5, 0.625, 0.1]} for row in rows], LISTS, lists)

    page = page_of(lists)

    assert "gone · not in the pool" in page
    assert "irrelevant, 0.625" in page


def test_unknown_skills_and_queries_are_named(tmp_path: Path):
    lists = write_runs(
        tmp_path, lists={"q1": [*ROWS["q1"][:2], ("gone", "irrelevant", "x", 9)], "q8": ROWS["q2"]}
    )

    line = succeeds("inspect", lists).out

    assert "not_in_pool 1" in line
    assert "no_query_text 1" in line


def test_ragged_lists_are_refused(tmp_path: Path):
    lists = write_runs(tmp_path)
    rows = read_table(lists, LISTS).to_pylist()
    write_table([row | {"verdicts": ["required"]} for row in rows], LISTS, lists)

    with raises("invalid-list"):
        inspect_lists(lists, None, None, 10)


def test_foreign_run_record_is_ignored(tmp_path: Path):
    lists = write_runs(tmp_path)
    (lists / "run.json").write_text('{"recipe": 5, "inputs": [], "finished": true}')

    missing = inspect_lists(lists, None, tmp_path / "pool", 10)["missing"]

    assert "no record of its run" in missing[0]


def test_hostile_text_stays_text(tmp_path: Path):
    pool = {key: (EVIL, EVIL, EVIL + row[2], EVIL, "en", EVIL) for key, row in POOL.items()}
    texts = dict.fromkeys(TEXTS, EVIL)
    lists = write_runs(tmp_path / EVIL.replace("/", "_"), pool=pool, texts=texts)

    inspect_lists(lists, tmp_path / "page.html", None, 10)

    page = (tmp_path / "page.html").read_text()
    check_safe(page, num_scripts=1)

    assert not {"\u202e", "\u2028"} & set(page)
    assert "&lt;img src=x onerror=alert(2)&gt;[U+2028][U+202E]" in page


def test_missing_runs_are_named(tmp_path: Path):
    lists = write_runs(tmp_path)
    for name in ("pool", "filtered"):
        (tmp_path / name).rename(tmp_path / f"{name}-moved")

    missing = inspect_lists(lists, None, None, 10)["missing"]
    with_pool = inspect_lists(lists, None, tmp_path / "pool-moved", 10)["missing"]

    page = (tmp_path / "lists.html").read_text()

    assert [line.split(":")[0] for line in missing] == ["rankings of stage lists", "pool"]
    assert [line.split(":")[0] for line in with_pool] == ["rankings of stage lists"]
    assert 'class="missing"' in page
    assert "<b>?</b>" in page


def test_lists_without_record_are_shown(tmp_path: Path):
    lists = write_runs(tmp_path)
    (lists / "run.json").unlink()

    values = inspect_lists(lists, None, tmp_path / "pool", 10)

    assert "no record of its run" in values["missing"][0]
    assert values["num_lists_shown"] == 3


def test_runs_are_found_after_move(tmp_path: Path):
    write_runs(tmp_path / "here", drops=[])
    moved = (tmp_path / "here").rename(tmp_path / "there")

    values = inspect_lists(moved / "lists", None, None, 10)

    assert (values["missing"], values["num_drops_shown"]) == ([], 0)


def test_sample_is_same_each_time(tmp_path: Path):
    positive = ("s/join", "required", "gold", 0)
    lists = {f"q{n}": [positive, ("s/chart", "irrelevant", "semantic", 1)] for n in range(300)}
    lists["q299"].append(("t/join", "irrelevant", "semantic", 2))
    texts = dict.fromkeys(lists, "a question of some length")
    folder = write_runs(tmp_path, lists=lists, texts=texts, drops=[])

    page = page_of(folder, max_lists=5)

    assert page_of(folder, max_lists=5) == page
    assert "6 of 300 lists" in page
    # A check reports this list, which is not in the sample.
    rows = values_of(folder, max_lists=5)["shown"]
    assert "q299" in {row["query_id"] for row in rows}


def test_the_command_prints_counts(tmp_path: Path):
    lists = write_runs(tmp_path)

    printed = succeeds("inspect", lists, "--out", tmp_path / "p.html", "--max-lists", 2, "--json")

    assert json.loads(printed.out)["num_lists"] == 3
    assert (tmp_path / "p.html").is_file()


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["pool"], "holds no lists"),
        (["nothing"], "holds no lists"),
        (["lists", "--pool", "mined"], "holds no skills"),
        (["lists", "--out", "lists/page.html"], "folder of the lists"),
    ],
)
def test_other_folders_are_refused(
    arguments: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_runs(tmp_path)
    monkeypatch.chdir(tmp_path)

    refused = skilltrain("inspect", *arguments)

    assert fault in refused.only_line


def test_a_broken_table_is_refused(tmp_path: Path):
    lists = write_runs(tmp_path)
    (lists / "lists.parquet").write_bytes(b"no parquet")

    refused = skilltrain("inspect", lists)

    assert "lists.parquet: is not parquet" in refused.only_line


def test_percents_are_short():
    pairs = [(0, 9), (1, 9_999), (17, 1_000), (1, 1), (1, 0)]

    assert [percent(*pair) for pair in pairs] == ["0%", "<0.1%", "1.7%", "100%", "0%"]
