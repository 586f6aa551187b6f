"""Contamination: benchmark queries in training data are found, dropped and refused by training."""

import json
import re
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmark_folders import write_ours, write_pool
from faults import raises
from skilltrain.config import validate
from skilltrain.data.contamination import (
    BenchmarkIndex,
    ContaminationLimits,
    Decontaminate,
    HeldOutBenchmark,
    open_benchmarks,
)
from skilltrain.data.near_duplicates import jaccard, word_trigrams
from skilltrain.errors import SkilltrainError
from skilltrain.metrics.benchmarks.benchmark import Task
from skilltrain.metrics.measures import Relevance
from skilltrain.records import Query, Skill
from skilltrain.tables import DROPPED, JUDGEMENTS, LISTS, QUERIES, read_table, write_table
from skilltrain.texts import CJK, words_of
from skilltrain.training.train import TrainEncoder, check_held_out
from skilltrain.training.training_set import load_training_set
from small_library import skilltrain, succeeds


def words_by_regex(text):
    return re.findall(rf"[{CJK}]|[^\W_{CJK}]+", unicodedata.normalize("NFKC", text).lower())


# Σ is not compared: its lower case depends on what follows beyond the word.
@given(
    st.text(st.characters(exclude_characters="Σ"))
    | st.text("aZ9_ -.é中文\u0301\u2028\uff21ß", max_size=30)
)
@example("Read_PDF-file 2.0, naïve ﬁle…中文a字")
@example("\x00\x1c\x85 a\u00a0b\ufffd")
def test_words_equal_those_of_regex(text):
    assert words_of(text) == words_by_regex(text)


def overlaps(texts, text, **limits):
    """Compare a text with the tasks t1, t2, … of a benchmark; return the overlap by task id."""
    relevance = Relevance(frozenset({"g"}), {"g": 1.0})
    tasks = [
        Task(Query(f"t{number}", task_text, "single", "test", "test"), relevance)
        for number, task_text in enumerate(texts, 1)
    ]
    benchmark = HeldOutBenchmark("bench", tuple(tasks), ())
    matches = BenchmarkIndex([benchmark], ContaminationLimits(**limits)).query_matches(text)
    # A reason ends with: task ID of benchmark bench.
    return {match.reason.split()[-4]: match.value for match in matches}


def words(letters):
    """Return a text with a word for each letter, so that n-grams can be counted by eye."""
    return " ".join(f"w{letter}" for letter in letters)


TWELVE = words("abcdefghijkl")  # 10 trigrams
MORE = " and other words that follow"
CHINESE = "请帮我把这些合同按日期整理成表格"  # 16 characters, 14 trigrams


@pytest.mark.parametrize(
    ("texts", "text", "limit", "values"),
    [
        (["Merge: these PDFs!"], "merge these\npdfs", 0.5, {"t1": 1.0}),
        (["a b", "x", "A, b"], "a b", 0.5, {"t1": 1.0, "t3": 1.0}),
        (["", "—", "merge these pdfs now"], "\U0001f600", 0.5, {}),  # a text without words
        (["—"], "merge these pdfs now", 0.5, {}),
        # 8 of the 10 and 13 trigrams are shared, then 7 of the 10 and 12.
        ([TWELVE], words("abcdefghij") + MORE, 0.5, {"t1": 8 / 15}),
        ([TWELVE], words("abcdefghi") + MORE, 0.5, {}),
        ([TWELVE], words("abcdefghi") + MORE, 0.4, {"t1": 7 / 15}),
        ([TWELVE], words("abcdefxhijkl"), 0.5, {"t1": 7 / 13}),  # one word changed
        (["Merge these PDFs"], "merge these pdfs and those", 0.5, {}),
        ([CHINESE], "你好，请帮我把这些合同按日期整理", 0.5, {"t1": 11 / 16}),
        ([CHINESE], "请帮我把这些照片按地点整理成相册", 0.5, {}),
        ([TWELVE], TWELVE, None, {}),
    ],
)
def test_overlap_of_queries_by_hand(texts, text, limit, values):
    assert overlaps(texts, text, query_overlap=limit) == values


@given(st.lists(st.sampled_from(["a", "b", "c", "中"]), max_size=24))
def test_benchmark_query_is_always_found(letters):
    text = " ".join(letters)
    assert overlaps([text], text, query_overlap=1) or not letters


# Skills -------------------------------------------------------------------------------------------


def skill(skill_id, name="", body=""):
    return Skill(skill_id, name or skill_id, "d", body)


# abcdefgh has 6 trigrams.
GOLDS = [
    skill("gt/pdf", "PDF Tools", words("abcdefgh")),
    skill("gt/log", "log search", words("mnopqrst")),
]
COPY = skill("x", "x", words("abcdefgxy"))  # shares 5 of them and has 2 of its own


@pytest.mark.parametrize(
    ("candidate", "limits", "expected"),
    [
        (skill("x", "pdf_tools", "another body"), {}, [("name", 1.0, "gt/pdf")]),
        (skill("x", "pdf", "another body"), {}, []),
        (skill("x", "pdf tools", "another"), {"name": False}, []),
        (skill("gt/log", "renamed", ""), {}, [("name", 1.0, "gt/log")]),  # the gold skill itself
        (GOLDS[1], {}, [("name", 1.0, "gt/log"), ("jaccard", 1.0, "gt/log")]),
        (COPY, {}, [("jaccard", 5 / 8, "gt/pdf")]),
        (COPY, {"jaccard": 5 / 8}, [("jaccard", 5 / 8, "gt/pdf")]),
        (COPY, {"jaccard": 0.63}, []),
        (COPY, {"jaccard": None}, []),
        (skill("x", "x", words("abc")), {"jaccard": 0.1}, [("jaccard", 1 / 6, "gt/pdf")]),
        # A name without letters equals no other, and neither does an empty body.
        (skill("x", " - ", ""), {}, []),
    ],
)
def test_gold_skill_matches_by_id_name_or_body(candidate, limits, expected):
    golds = (*GOLDS, skill("gt/void", "--", ""))
    index = BenchmarkIndex([HeldOutBenchmark("bench", (), golds)], ContaminationLimits(**limits))

    matches = index.skill_matches(candidate)

    assert [(match.filter, match.value, match.other_id) for match in matches] == expected


@given(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=5), st.text("abc ", max_size=30))
def test_index_equals_comparing_every_pair(bodies, body):
    golds = tuple(skill(f"g{number}", body=text) for number, text in enumerate(bodies))
    trigrams = word_trigrams(body)
    values = {gold.skill_id: jaccard(word_trigrams(gold.body), trigrams) for gold in golds}
    index = BenchmarkIndex([HeldOutBenchmark("bench", (), golds)], ContaminationLimits(name=False))

    matches = index.skill_matches(skill("x", body=body))

    value_by_match = {match.other_id: match.value for match in matches}
    assert value_by_match == {key: value for key, value in values.items() if value >= 0.6}


@pytest.fixture
def bench(tmp_path):
    """Return a function that writes a benchmark in our own tables.

    It takes the gold skills and the split of each task, and the name of the folder.
    """

    def write(golds=(("gt/pdf",), ("gt/pdf", "gt/log")), splits=("test", "test"), name="bench"):
        write_pool(tmp_path / "pool", GOLDS)
        queries = []
        verdicts = {}
        for number, (skill_ids, split) in enumerate(zip(golds, splits, strict=True), 1):
            queries.append((f"t{number}", f"do the task number {number} now", split))
            verdicts[f"t{number}"] = dict.fromkeys(skill_ids, "required")
        return write_ours(tmp_path / name, queries, verdicts)

    return write


@pytest.fixture
def two_benchmarks(bench, tmp_path):
    paths = [bench(name="one"), bench(golds=(("gt/log",), ("gt/log",)), name="two")]
    benchmarks = open_benchmarks(paths, tmp_path / "pool", need_golds=True)
    return BenchmarkIndex(benchmarks, ContaminationLimits())


def test_strongest_match_of_each_ground_counts(two_benchmarks):
    matches = [
        *two_benchmarks.skill_matches(skill("p1", "PDF tools", words("abcdefgxy"))),
        *two_benchmarks.skill_matches(skill("p2", "other", words("abcdefgh"))),
    ]

    rows = two_benchmarks.contaminations("q", "Do the task number 2 now!", matches)

    assert [(row.skill_id, row.filter, row.source, row.value) for row in rows] == [
        ("", "query_overlap", "one", 1.0),
        ("", "query_overlap", "two", 1.0),
        ("p1", "name", "one", 1.0),
        ("p2", "jaccard", "one", 1.0),
    ]
    assert rows[2].reason == "same name as gold skill gt/pdf of benchmark one"


def test_other_query_is_not_contaminated(two_benchmarks):
    assert two_benchmarks.contaminations("q", "another one", []) == []


def test_train_split_is_no_benchmark(bench, tmp_path):
    path = bench(splits=("train", "dev"))

    (benchmark,) = open_benchmarks([path], tmp_path / "pool", need_golds=True)

    assert [task.query.query_id for task in benchmark.tasks] == ["t2"]
    assert [gold.skill_id for gold in benchmark.golds] == ["gt/log", "gt/pdf"]


def test_benchmarks_of_equal_name_are_named_by_path(bench, tmp_path):
    paths = [bench(name="a/queries"), bench(name="b/queries"), bench(name="c")]

    benchmarks = open_benchmarks(paths, tmp_path / "pool", need_golds=True)

    assert [benchmark.name for benchmark in benchmarks] == [*map(str, paths[:2]), "c"]


# The stage ----------------------------------------------------------------------------------------

PDF = "open the file read each page in order and write the text of all pages to a new file"
POOL = [
    Skill("bench/pdf", "PDF to text", "d", PDF),
    Skill("near/pdf", "reader", "d", PDF + " then close it"),
    Skill("own/pdf-to-text", "pdf-to-text", "d", "nothing like the other body at all"),
    Skill("own/chart", "chart maker", "d", "draw one bar for each row of the table"),
    Skill("own/audio", "audio clip", "d", "cut the sound between two marks and fade both ends"),
    Skill("own/none", "none", "d", "a body that answers no query of this test"),
]
TASK = "Get the text of all nine reports in this folder and put it into one file, page by page"
QUERY_TEXTS = {
    "q1": ("train", "turn my sales into bars", "own/chart"),
    "q2": ("train", "make the whole recording shorter", "own/audio"),
    "q3": ("train", "I want words out of paper", "near/pdf"),
    "q4": ("train", "read this document to me", "own/pdf-to-text"),
    "q5": ("train", f"Hello! {TASK.lower()} please.", "own/audio"),
    "q6": ("dev", TASK, "own/audio"),
}


def write_queries(path, rows):
    """Write queries from (split, text, gold skill) by query id."""
    queries = []
    verdicts = {}
    for query_id, (split, text, gold) in rows.items():
        queries.append((query_id, text, split))
        verdicts[query_id] = {gold: "required"}
    write_ours(path, queries, verdicts)


@pytest.fixture
def folder(tmp_path):
    """A folder with a pool, queries, lists of the train split and a benchmark of one task."""
    write_pool(tmp_path / "pool", POOL)
    write_ours(tmp_path / "bench", [("t1", TASK, "test")], {"t1": {"bench/pdf": "required"}})
    write_queries(tmp_path / "queries", QUERY_TEXTS)
    train_rows = {key: row for key, row in QUERY_TEXTS.items() if row[0] == "train"}
    write_queries(tmp_path / "lists", train_rows)
    lists = [
        {
            "query_id": query_id,
            "skill_ids": [gold, "own/none"],
            "verdicts": ["required", "irrelevant"],
            "sources": ["gold", "random"],
            "ranks": [0, 1],
            "teacher_scores": None,
        }
        for query_id, (_, _, gold) in train_rows.items()
    ]
    write_table(lists, LISTS, tmp_path / "lists")
    return tmp_path


def run(folder, **settings):
    """Run the stage; return its summary, the ids of the remaining queries and the dropped rows."""
    values = {
        "stage": "decontaminate",
        "pool": folder / "pool",
        "queries": folder / "queries",
        "benchmarks": [folder / "bench"],
        "out": folder / "out",
    }
    config = validate(Decontaminate, values | settings, "recipe")
    summary = config.run(config.out)
    rows = [tuple(row.values()) for row in read_table(config.out, DROPPED).to_pylist()]
    return summary, ids(config.out, QUERIES), rows


def ids(path, spec):
    return read_table(path, spec).column("query_id").to_pylist()


GOLD = "gold skill bench/pdf of benchmark bench"


# Bodies: 19 words, 17 trigrams; near/pdf has 3 more. TASK: 19 words, 17 trigrams; q5 has 2 more.
def row_of_query(query_id, value, reason):
    """Return the dropped row of a query that overlaps with a task."""
    text = f"{reason} task t1 of benchmark bench"
    return (query_id, "", "query_overlap", value, text, "bench", None)


ROWS = [
    ("q3", "near/pdf", "jaccard", 17 / 20, f"body overlap 0.850 with {GOLD}", "bench", "bench/pdf"),
    ("q4", "own/pdf-to-text", "name", 1.0, f"same name as {GOLD}", "bench", "bench/pdf"),
    row_of_query("q5", 17 / 19, "word overlap 0.895 with"),
]


def test_contaminated_queries_are_dropped(folder):
    summary, query_ids, rows = run(folder)

    assert query_ids == ids(folder / "out", JUDGEMENTS) == ["q1", "q2", "q6"]
    assert rows == ROWS
    assert summary == {
        "num_queries": 5,
        "num_kept": 2,
        "num_dropped": 3,
        "dropped_by_benchmark": {"bench": 3},
        "dropped_by_ground": {"query_overlap": 1, "name": 1, "jaccard": 1},
    }
    assert not (folder / "out" / "lists.parquet").exists()


def test_all_splits_are_decontaminated(folder):
    _, query_ids, rows = run(folder, split=None)

    assert query_ids == ["q1", "q2"]
    assert rows[-1] == row_of_query("q6", 1.0, "the same words as")


def test_contaminated_lists_are_dropped(folder):
    summary, query_ids, rows = run(folder, queries=folder / "lists")

    assert query_ids == ids(folder / "out", LISTS) == ["q1", "q2"]
    assert rows == ROWS
    assert summary["num_lists_kept"] == 2
    assert summary["num_lists_dropped"] == 3


def test_grounds_of_skills_need_gold_texts(folder):
    write_pool(folder / "pool", POOL[2:])

    with raises("missing-gold-skill"):
        run(folder)


def test_ground_of_queries_needs_no_gold_texts(folder, capsys):
    write_pool(folder / "pool", POOL[2:])

    _, query_ids, rows = run(folder, limits={"name": False, "jaccard": None})

    assert query_ids == ["q1", "q2", "q3", "q4", "q6"]
    assert [row[0] for row in rows] == ["q5"]
    assert "1 of 4 positives are not in" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("benchmarks", "absent", "not-found"),
        ("benchmarks", "lists", "empty-split"),
        ("benchmarks", "pool", "not-a-benchmark"),
        ("queries", "absent", "missing-table"),
        ("queries", "none", "empty-split"),
        ("queries", "all", "nothing-left"),
        ("pool", "other", "wrong-pool"),
        ("split", "test", "empty-split"),
    ],
)
def test_invalid_decontamination_is_refused(folder, setting, value, code):
    write_queries(folder / "none", {})
    write_queries(folder / "all", {key: QUERY_TEXTS[key] for key in ("q3", "q4")})
    write_pool(folder / "other", POOL[:1])

    with raises(code):
        run(folder, **{setting: value if setting == "split" else folder / value})


@pytest.mark.parametrize("setting", ["clusters", "encoder", "cosine"])
def test_removed_setting_says_its_replacement(folder, setting):
    with pytest.raises(SkilltrainError, match=rf"unknown key '{setting}' \(removed: limits"):
        run(folder, **{setting: "x"})


# Training -----------------------------------------------------------------------------------------


def training(folder, model="none", dev=None, lists="lists", **data):
    values = {
        "stage": "train_encoder",
        "model": {"source": str(model), "max_tokens": 32, "query_max_tokens": 32},
        "data": {"pool": folder / "pool", "lists": folder / lists} | data,
        "near_duplicates": None,
        "training": {"batch_size": 2, "accumulation": 1, "token_budget": 256},
        "out": folder / "model",
    }
    if dev:
        values["dev"] = dev
    return validate(TrainEncoder, values, "recipe")


def check_lists(folder, **settings):
    """Check the lists of a training run against its held-out benchmarks."""
    config = training(folder, **settings)
    return check_held_out(config, load_training_set(config.data))


def test_training_refuses_contaminated_lists(folder):
    with raises("contaminated") as error:
        check_lists(folder, held_out=[folder / "bench"])

    assert str(error.value) == (
        f"{folder}/lists: 3 list(s) are contaminated (query_overlap 1, name 1, jaccard 1); "
        f"the first, query q3, positive near/pdf: body overlap 0.850 with {GOLD} "
        f"(run `skilltrain decontaminate pool={folder}/pool queries={folder}/lists "
        f"'benchmarks=[{folder}/bench]' out=…` and train on what it writes, "
        "or set data.contamination=allow)"
    )


def test_training_takes_decontaminated_lists(folder):
    run(folder, queries=folder / "lists")

    counts = check_lists(folder, held_out=folder / "bench", lists="out")

    assert counts == {"num_contaminated_lists": 0}


@pytest.fixture
def dev(folder):
    """The dev split, which has a query of the train split and shares skills with others."""
    return {"benchmark": folder / "queries", "split": "dev"}


def test_dev_set_may_not_share_queries(folder, dev):
    with raises("contaminated") as error:
        check_lists(folder, dev=dev)

    message = str(error.value)
    reason = "the first, query q5: word overlap 0.895"
    assert f"1 list(s) are contaminated (query_overlap 1); {reason}" in message
    advice = f"choose another dev.split, or run `skilltrain decontaminate pool={folder}/pool"
    assert f"({advice}" in message
    limits = "limits.name=false limits.jaccard=null"
    assert f"{limits} out=…` and train on what it writes, or set data" in message


def test_contamination_by_dev_set_can_be_allowed(folder, dev):
    counts = check_lists(folder, dev=dev, contamination="allow")

    assert counts == {"num_lists_of_dev_queries": 1}


def test_dev_set_may_share_skills(folder, dev):
    other_query = ("dev", "another question about sound", "own/audio")
    write_queries(folder / "queries", QUERY_TEXTS | {"q6": other_query})

    assert check_lists(folder, dev=dev) == {"num_lists_of_dev_queries": 0}


@pytest.fixture
def contaminated_command(folder, model_folders):
    """The command that trains on contaminated lists."""
    file = folder / "train.yaml"
    file.write_text(json.dumps(training(folder, model_folders["bert"]).model_dump(mode="json")))
    return ("train", file, f"data.held_out=[{folder}/bench]")


def test_contaminated_training_writes_nothing(folder, contaminated_command):
    outcome = skilltrain(*contaminated_command)

    assert "3 list(s) are contaminated" in outcome.error_line
    assert not (folder / "model").exists()


def test_model_card_counts_contaminated_lists(folder, contaminated_command):
    outcome = succeeds(*contaminated_command, "data.contamination=allow", "--json")

    assert json.loads(outcome.out)["num_contaminated_lists"] == 3
    assert "| contaminated lists | 3 |" in (folder / "model" / "README.md").read_text()
