"""The page of `skilltrain inspect`: its counts by hand, its checks, what is missing, and hostile texts."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from skilltrain import tables
from skilltrain.records import Dropped, Query, Skill
from skilltrain.report.lists import inspect_lists, numbers_of
from skilltrain.report.material import Material, run_checks
from skilltrain.report.page import histograms, percent
from skilltrain.tables import DROPPED, LISTS, QUERIES, RANKINGS, SKILLS, write_table
from skilltrain.texts import visible
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
    names = ("skill_ids", "verdicts", "sources", "ranks")
    columns = {
        q: {name: [row[n] for row in rows] for n, name in enumerate(names)}
        for q, rows in lists.items()
    }
    return [{"query_id": query_id, **of_query} for query_id, of_query in columns.items()]


def ranking_rows(sizes: dict[str, int]) -> list[dict[str, Any]]:
    found = [(stage, n) for stage, size in sizes.items() for n in range(1, size + 1)]
    return [
        {"query_id": "q1", "skill_id": f"k{n}", "rank": n, "score": 0.5, "stage": stage}
        for stage, n in found
    ]


def write_runs(
    root: Path, pool: Any = POOL, texts: Any = TEXTS, drops: Any = DROPS, lists: Any = ROWS
) -> Path:
    """pool, queries, mined, filtered and lists in `root`, small enough to count by hand; the folder of lists."""
    paths = {"pool": root / "pool", "queries": root / "queries"}
    asked = [Query(query_id, text, "single", "llm", "train") for query_id, text in texts.items()]
    skills = [Skill(skill_id, *row) for skill_id, row in pool.items()]
    empty = Dropped("", "s/empty", "empty", "body is empty")
    write_run(paths["pool"], {"stage": "pool"}, (SKILLS, skills), (DROPPED, [empty]))
    write_run(paths["queries"], {"stage": "queries"}, (QUERIES, asked), (DROPPED, []))
    mined = write_run(
        root / "mined", {"stage": "mine", **paths}, (RANKINGS, ranking_rows(MINED)), (DROPPED, [])
    )
    gone = Counter(drop.source for drop in drops)
    kept = {source: size - gone[source] for source, size in MINED.items()}
    layers = [{"name": "name"}, {"name": "jaccard"}, {"name": "cosine"}, {"name": "rank_window"}]
    filtered = write_run(
        root / "filtered",
        {"stage": "filter", **paths, "rankings": mined, "layers": layers},
        (RANKINGS, ranking_rows(kept)),
        (DROPPED, drops),
    )
    quotas = {"semantic": 2, "lexical": 2, "taxonomy": 1}
    return write_run(
        root / "lists",
        {"stage": "lists", **paths, "rankings": filtered, "quotas": quotas},
        (LISTS, list_rows(lists)),
        (QUERIES, asked),
        (
            DROPPED,
            [Dropped("q9", "", "no_positive", "no required skill of this query is in the pool")],
        ),
    )


def data_of(page: Path) -> dict[str, Any]:
    return json.loads(page.read_text().split('id="data">')[1].split("</script>")[0])


def found_by(folder: Path, pool: Path | None = None) -> dict[str, list[tuple[str, str]]]:
    """check → (query_id, skill_id) of what it found."""
    m = Material(folder, pool)
    return {
        key: [(m.query_ids[m.in_list[e]], m.skills[m.skill[e]].skill_id) for e in entries.tolist()]
        for key, entries in run_checks(m).items()
    }


def totals(figure: Any) -> dict[str, tuple[int, list[int]]]:
    """Name → (how many, [5th percentile, median, 95th percentile]) of histograms."""
    return {row["name"]: (row["total"], row["percentiles"]) for row in figure["rows"]}


def test_candidates_are_followed_from_mining_to_lists_and_one_that_vanished_is_said(tmp_path: Path):
    material = Material(write_runs(tmp_path), None)
    found = numbers_of(material)
    assert found["sources"] == ["semantic", "lexical", "taxonomy"]
    assert found["filters"] == ["judged", "name", "jaccard", "cosine", "rank_window"]
    assert found["dropped"] == {
        ("semantic", "name"): 1,
        ("lexical", "jaccard"): 1,
        ("lexical", "rank_window"): 1,
    }
    assert found["chosen"] == {"semantic": 4, "lexical": 3}
    assert (material.mined, material.kept) == (
        {"semantic": 6, "lexical": 5},
        {"semantic": 5, "lexical": 3},
    )
    inspect_lists(tmp_path / "lists", None, None, 10)
    page = (tmp_path / "lists.html").read_text()
    assert "Candidates of" not in page and "<h3>No negative came from taxonomy</h3>" in page
    write_table(ranking_rows({"semantic": 3, "lexical": 3}), RANKINGS, tmp_path / "filtered")
    inspect_lists(tmp_path / "lists", None, None, 10)
    assert (
        "<b>2</b><div><h3>Candidates of semantic vanished without a row"
        in (tmp_path / "lists.html").read_text()
    )


def test_ranks_lengths_shares_and_recurring_negatives(tmp_path: Path):
    found = numbers_of(Material(write_runs(tmp_path), None))
    assert totals(found["ranks"]["semantic"]) == {
        "rank": (4, [1, 2, 4])
    }  # 1, 1, 2, 4: the median is 1.5
    assert found["positive_ranks"] is None  # no ranking held a positive
    assert totals(found["words"]) == {"all queries": (3, [2, 5, 9])}
    assert {name: row[0] for name, row in totals(found["bodies"]).items()} == {
        "positives": 3,
        "negatives": 7,
    }
    # shares: data 2/3 + 4/7, cloud 1/3 + 1/7, none 0 + 2/7
    part = found["shares"]["Categories"]
    assert part["rows"] == [("data", 2, 4), ("cloud", 1, 1), ("none", 0, 2)]
    assert (round(part["highest"], 3), part["same"]) == (
        0.667,
        4,
    )  # s/chart of q2: data beside cloud
    assert [(skill.skill_id, sum(by_source)) for skill, by_source in found["hubs"][:3]] == [
        ("s/chart", 2),
        ("z/tu", 2),
        ("s/join", 1),
    ]


def test_checks_point_at_the_entries_that_break_an_assumption(tmp_path: Path):
    lists = write_runs(tmp_path)
    assert {key: found for key, found in found_by(lists).items() if found} == {
        "leak": [("q2", "s/pods")],
        "same_name": [("q1", "t/join")],
        "same_text": [("q2", "t/pods")],
        "short_positive": [("q2", "s/pods")],
    }


def test_checks_on_clusters_and_language_and_what_is_known_of_skills_and_entries(tmp_path: Path):
    rows = ROWS | {
        "q2": [
            ("z/tu", "required", "gold", 0),
            *ROWS["q2"][1:3],
            ("gone", "irrelevant", "lexical", 9),
        ]
    }
    lists = write_runs(tmp_path, texts=TEXTS | {"q2": "please restart the pods for me"}, lists=rows)
    scored = [
        row | {"teacher_scores": [0.5, 0.6, *[0.1] * (len(row["skill_ids"]) - 2)]}
        for row in list_rows(rows)
    ]
    write_table(scored, LISTS, lists)
    write_table(
        [{"skill_id": s, "cluster": n} for s, n in (("s/join", 0), ("s/chart", 0))],
        tables.CLUSTERS,
        tmp_path / "pool",
    )
    flag = {
        "rule": "shell",
        "field": "body",
        "start": 0,
        "end": 4,
        "span": EVIL,
        "reason": "pipes into a shell",
    }
    write_table(
        [flag | {"skill_id": "z/tu"}, flag | {"skill_id": "unused"}],
        tables.FLAGS,
        tmp_path / "pool",
    )
    found = found_by(lists)
    assert found["cluster"] == [("q1", "s/chart"), ("q3", "s/join")]
    assert found["other_language"] == [("q2", "z/tu")]
    inspect_lists(lists, tmp_path / "page.html", None, 10)
    data = data_of(tmp_path / "page.html")
    skills = {row["id"]: row for row in data["skills"]}
    assert skills["z/tu"]["flags"] == ["shell"]
    assert skills["gone"]["chars"] == -1
    assert data["lists"][0]["entries"][1][4] == 0.6


def test_histograms_hold_every_value_and_speak_in_round_numbers():
    few = histograms({"n": np.array([1, 2, 2, 4])})
    assert few and [bar[2:] for bar in few["rows"][0]["bars"]] == [
        (0.5, 1, 1, 1),
        (1, 2, 2, 2),
        (0.5, 4, 4, 1),
    ]
    assert (few["axis"].ticks, few["axis"].place(2)) == ((1, 2, 3, 4), 37.5)
    wide = histograms({"n": np.array([200, 5_000, 16_000]), "none": np.array([], dtype=np.int64)})
    assert wide and (wide["axis"].logarithmic, wide["axis"].ticks) == (True, (1_000, 10_000))
    assert wide["rows"][1]["bars"] == []
    for values in ([0], [7], [3, 3], list(range(1, 51)), [0, 0, 1, 90_000]):
        figure = histograms({"n": np.array(values)})
        assert figure and sum(bar[-1] for bar in figure["rows"][0]["bars"]) == len(values)
    assert histograms({"n": np.array([], dtype=np.int64)}) is None
    assert [percent(*pair) for pair in ((0, 9), (1, 9_999), (17, 1_000), (1, 1), (1, 0))] == [
        "0%",
        "<0.1%",
        "1.7%",
        "100%",
        "0%",
    ]


def test_hostile_text_stays_text_and_the_page_asks_for_nothing(tmp_path: Path):
    pool = {key: (EVIL, EVIL, EVIL + row[2], EVIL, "en", EVIL) for key, row in POOL.items()}
    lists = write_runs(
        tmp_path / EVIL.replace("/", "_"), pool=pool, texts=dict.fromkeys(TEXTS, EVIL)
    )
    inspect_lists(lists, tmp_path / "page.html", None, 10)
    text = (tmp_path / "page.html").read_text()
    check_safe(text, num_scripts=2)
    assert not {"\u202e", "\u2028"} & set(text) and "[U+202E]" in text
    data = data_of(tmp_path / "page.html")
    assert data["lists"][0]["query"] == data["skills"][0]["name"] == visible(EVIL)


def test_what_is_not_found_is_said_and_is_no_error(tmp_path: Path):
    lists = write_runs(tmp_path)
    for gone in ("pool", "filtered"):
        (tmp_path / gone).rename(tmp_path / f"{gone}-moved")
    shown = inspect_lists(lists, None, None, 10)
    assert shown["page"] == str(tmp_path / "lists.html")
    assert [line.split(":")[0] for line in shown["missing"]] == ["rankings of stage lists", "pool"]
    page = (tmp_path / "lists.html").read_text()
    assert 'class="missing"' in page and "<b>?</b>" in page
    assert data_of(tmp_path / "lists.html")["skills"][0]["chars"] == -1
    found = inspect_lists(lists, None, tmp_path / "pool-moved", 10)
    assert [line.split(":")[0] for line in found["missing"]] == ["rankings of stage lists"]
    (lists / "run.json").unlink()
    assert "no record of its run" in inspect_lists(lists, None, None, 10)["missing"][0]


def test_lists_without_a_drop_and_runs_that_moved_together_have_a_page(tmp_path: Path):
    write_runs(tmp_path / "here", drops=[])
    moved = (tmp_path / "here").rename(tmp_path / "there")
    shown = inspect_lists(moved / "lists", None, None, 10)
    assert (shown["missing"], shown["num_dropped_pairs_shown"]) == ([], 0)
    assert "Nothing, as far as the trail goes." in (moved / "lists.html").read_text()


def test_of_many_lists_the_same_sample_is_shown_each_time_and_what_a_check_points_at(
    tmp_path: Path,
):
    pool = {
        f"s/{n}": (
            f"skill-{n}",
            "What it does. " * 20,
            f"{n} <b>word</b> " * 400,
            "data",
            "en",
            "s",
        )
        for n in range(300)
    }
    positive = ("s/0", "required", "gold", 0)
    lists = {
        f"q{q}": [
            positive,
            *((f"s/{(q * 7 + n) % 299 + 1}", "irrelevant", "semantic", n + 1) for n in range(5)),
        ]
        for q in range(1_500)
    }
    texts = {
        query_id: f"query {query_id} wants something of about this length" for query_id in lists
    }
    folder = write_runs(tmp_path, pool=pool, lists=lists, texts=texts, drops=[])
    shown = inspect_lists(folder, None, None, 1_000)
    more = shown["num_lists_shown"] - 1_000  # a check finds that all skills share a description
    assert shown["num_lists"] == 1_500 and 10 <= more <= 50
    page = (tmp_path / "lists.html").read_text()
    inspect_lists(folder, tmp_path / "again.html", None, 1_000)
    assert (tmp_path / "again.html").read_text() == page
    assert f"1,000 of 1,500 lists, drawn by seed, and {more} more that a check points at" in page
    assert len(page.encode()) < 4_000_000  # bodies are cut


def test_the_command_prints_counts_and_refuses_what_is_no_lists_folder(tmp_path: Path):
    lists = write_runs(tmp_path)
    printed = json.loads(
        succeeds("inspect", lists, "--out", tmp_path / "p.html", "--max-lists", 2, "--json").out
    )
    assert printed["num_lists"] == 3 and (tmp_path / "p.html").is_file()
    assert "holds no lists" in skilltrain("inspect", tmp_path / "pool").only_line
    assert "no such folder" in skilltrain("inspect", tmp_path / "nothing").only_line
    assert "holds no pool" in skilltrain("inspect", lists, "--pool", tmp_path / "mined").only_line
    assert (
        "folder of the lists"
        in skilltrain("inspect", lists, "--out", lists / "page.html").only_line
    )
    (lists / "lists.parquet").write_bytes(b"no parquet")
    assert "lists.parquet: is not parquet" in skilltrain("inspect", lists).only_line
