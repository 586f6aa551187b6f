"""What a benchmark asks is found in training data, taken out with its ground, and refused by training."""

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
from small_library import skilltrain


def plainly(text):
    return re.findall(rf"[{CJK}]|[^\W_{CJK}]+", unicodedata.normalize("NFKC", text).lower())


# Whether a capital sigma becomes a final one depends on what follows beyond the word: not compared.
@given(
    st.text(st.characters(exclude_characters="Σ"))
    | st.text("aZ9_ -.é中文\u0301\u2028\uff21ß", max_size=30)
)
@example("Read_PDF-file 2.0, naïve ﬁle…中文a字")
@example("\x00\x1c\x85 a\u00a0b\ufffd")
def test_the_fast_way_to_words_finds_what_the_rule_says(text):
    assert words_of(text) == plainly(text)


def overlaps(asked, text, **limits):
    """(task, value, reason) of what stands against `text`; tasks are numbered from 1."""
    relevance = Relevance(frozenset({"g"}), {"g": 1.0})
    tasks = (
        Task(Query(f"t{n}", one, "single", "test", "test"), relevance)
        for n, one in enumerate(asked, 1)
    )
    found = BenchmarkIndex(
        [HeldOutBenchmark("bench", tuple(tasks), ())], ContaminationLimits(**limits)
    ).query_matches(text)
    return [(match.reason.split()[-4], match.value, match.reason) for match in found]


def words(letters):
    """A query whose words are named by letters, so that n-grams can be counted by eye."""
    return " ".join(f"w{letter}" for letter in letters)


TWELVE = words("abcdefghijkl")  # 10 trigrams
MORE = " and other words that follow"
CHINESE = "请帮我把这些合同按日期整理成表格"  # 16 characters, 14 trigrams


@pytest.mark.parametrize(
    ("asked", "text", "limit", "values"),
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
def test_queries_are_one_where_they_share_enough(asked, text, limit, values):
    assert {
        task_id: value for task_id, value, _ in overlaps(asked, text, query_overlap=limit)
    } == values


@given(st.lists(st.sampled_from(["a", "b", "c", "中"]), max_size=24))
def test_a_query_of_a_benchmark_is_always_found(letters):
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
    ("one", "limits", "matches"),
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
        (
            skill("x", " - ", ""),
            {},
            [],
        ),  # nor does a name without letters equal another, or an empty body
    ],
)
def test_a_skill_is_a_gold_skill_by_id_name_or_body(one, limits, matches):
    golds = (*GOLDS, skill("gt/void", "--", ""))
    index = BenchmarkIndex([HeldOutBenchmark("bench", (), golds)], ContaminationLimits(**limits))

    assert [
        (match.filter, match.value, match.other_id) for match in index.skill_matches(one)
    ] == matches


@given(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=5), st.text("abc ", max_size=30))
def test_the_index_finds_what_comparing_every_pair_finds(bodies, body):
    golds = [skill(f"g{at}", body=text) for at, text in enumerate(bodies)]
    index = BenchmarkIndex(
        [HeldOutBenchmark("bench", (), tuple(golds))], ContaminationLimits(name=False)
    )
    found = {match.other_id: match.value for match in index.skill_matches(skill("x", body=body))}
    own = word_trigrams(body)

    values = {f"g{at}": jaccard(word_trigrams(text), own) for at, text in enumerate(bodies)}

    assert found == {skill_id: value for skill_id, value in values.items() if value >= 0.6}


@pytest.fixture
def bench(tmp_path):
    """(skills of each task's gold, split of each task, name) → folder of a benchmark in our own tables."""

    def write(golds=(("gt/pdf",), ("gt/pdf", "gt/log")), splits=("test", "test"), name="bench"):
        write_pool(tmp_path / "pool", GOLDS)
        queries = [
            (f"t{n}", f"do the task number {n} now", split) for n, split in enumerate(splits, 1)
        ]
        verdicts = {
            f"t{n}": dict.fromkeys(several, "required") for n, several in enumerate(golds, 1)
        }
        return write_ours(tmp_path / name, queries, verdicts)

    return write


def test_of_each_benchmark_and_ground_the_strongest_stands(bench, tmp_path):
    paths = [bench(name="one"), bench(golds=(("gt/log",), ("gt/log",)), name="two")]
    index = BenchmarkIndex(
        open_benchmarks(paths, tmp_path / "pool", need_golds=True), ContaminationLimits()
    )
    positives = [
        skill("p1", "PDF tools", words("abcdefgxy")),
        skill("p2", "other", words("abcdefgh")),
    ]
    of_skills = [match for one in positives for match in index.skill_matches(one)]

    found = index.contaminations("q", "Do the task number 2 now!", of_skills)

    assert [(one.skill_id, one.filter, one.source, one.value) for one in found] == [
        ("", "query_overlap", "one", 1.0),
        ("", "query_overlap", "two", 1.0),
        ("p1", "name", "one", 1.0),
        ("p2", "jaccard", "one", 1.0),
    ]
    assert found[2].reason == "same name as gold skill gt/pdf of benchmark one"
    assert index.contaminations("q", "another one", []) == []


def test_queries_to_train_on_are_no_benchmark_and_equal_names_are_told_apart_by_paths(
    bench, tmp_path
):
    paths = [
        bench(name="a/queries", splits=("train", "dev")),
        bench(name="b/queries"),
        bench(name="c"),
    ]
    found = open_benchmarks(paths, tmp_path / "pool", need_golds=True)

    assert [one.name for one in found] == [
        str(tmp_path / "a/queries"),
        str(tmp_path / "b/queries"),
        "c",
    ]
    assert [one.query.query_id for one in found[0].tasks] == ["t2"]
    assert [gold.skill_id for gold in found[0].golds] == ["gt/log", "gt/pdf"]


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


def write_queries(path, texts):
    queries = [(query_id, text, split) for query_id, (split, text, _) in texts.items()]
    write_ours(
        path, queries, {query_id: {gold: "required"} for query_id, (_, _, gold) in texts.items()}
    )


@pytest.fixture
def folder(tmp_path):
    write_pool(tmp_path / "pool", POOL)
    write_ours(tmp_path / "bench", [("t1", TASK, "test")], {"t1": {"bench/pdf": "required"}})
    write_queries(tmp_path / "queries", QUERY_TEXTS)
    of_train = {key: row for key, row in QUERY_TEXTS.items() if row[0] == "train"}
    write_queries(tmp_path / "lists", of_train)
    lists = [
        {
            "query_id": query_id,
            "skill_ids": [row[2], "own/none"],
            "verdicts": ["required", "irrelevant"],
            "sources": ["gold", "random"],
            "ranks": [0, 1],
            "teacher_scores": None,
        }
        for query_id, row in of_train.items()
    ]
    write_table(lists, LISTS, tmp_path / "lists")
    return tmp_path


def run(folder, **settings):
    """(the summary, the queries that are left, the rows of DROPPED)."""
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
ROWS = [
    ("q3", "near/pdf", "jaccard", 17 / 20, f"body overlap 0.850 with {GOLD}", "bench", "bench/pdf"),
    ("q4", "own/pdf-to-text", "name", 1.0, f"same name as {GOLD}", "bench", "bench/pdf"),
    (
        "q5",
        "",
        "query_overlap",
        17 / 19,
        "word overlap 0.895 with task t1 of benchmark bench",
        "bench",
        None,
    ),
]


def test_what_the_benchmark_asks_for_is_dropped_with_its_ground(folder):
    summary, kept, rows = run(folder)

    assert kept == ["q1", "q2", "q6"] == ids(folder / "out", JUDGEMENTS)
    assert rows == ROWS
    assert summary == {
        "num_queries": 5,
        "num_kept": 2,
        "num_dropped": 3,
        "dropped_by_benchmark": {"bench": 3},
        "dropped_by_ground": {"query_overlap": 1, "name": 1, "jaccard": 1},
    }
    assert not (folder / "out" / "lists.parquet").exists()

    _, kept, rows = run(folder, split=None)

    assert kept == ["q1", "q2"]
    assert rows[-1] == (
        "q6",
        "",
        "query_overlap",
        1.0,
        "the same words as task t1 of benchmark bench",
        "bench",
        None,
    )

    summary, kept, rows = run(folder, queries=folder / "lists", out=folder / "lists_out")

    assert kept == ids(folder / "lists_out", LISTS) == ["q1", "q2"]
    assert rows == ROWS
    assert (summary["num_lists_kept"], summary["num_lists_dropped"]) == (2, 3)


def test_grounds_can_be_left_out_and_need_no_gold_texts_then(folder, capsys):
    write_pool(folder / "pool", POOL[2:])

    with raises("missing-gold-skill"):
        run(folder)

    _, kept, rows = run(folder, limits={"name": False, "jaccard": None})

    assert kept == ["q1", "q2", "q3", "q4", "q6"]
    assert [row[0] for row in rows] == ["q5"]
    assert "1 of 4 positives are not in" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"benchmarks": "absent"}, "not-found"),
        ({"benchmarks": "lists"}, "empty-split"),
        ({"benchmarks": "pool"}, "not-a-benchmark"),
        ({"queries": "absent"}, "missing-table"),
        ({"queries": "none"}, "empty-split"),
        ({"queries": "all"}, "nothing-left"),
        ({"pool": "other"}, "wrong-pool"),
        ({"split": "test"}, "empty-split"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, settings, code):
    write_queries(folder / "none", {})
    write_queries(folder / "all", {key: QUERY_TEXTS[key] for key in ("q3", "q4")})
    write_pool(folder / "other", POOL[:1])

    with raises(code):
        run(
            folder,
            **{key: value if key == "split" else folder / value for key, value in settings.items()},
        )


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
    return validate(TrainEncoder, values | ({"dev": dev} if dev else {}), "recipe")


def checked(folder, **settings):
    config = training(folder, **settings)
    return check_held_out(config, load_training_set(config.data))


def test_training_refuses_contaminated_lists_in_one_line_and_takes_what_decontaminate_writes(
    folder,
):
    with pytest.raises(SkilltrainError) as error:
        checked(folder, held_out=[folder / "bench"])
    assert str(error.value) == (
        f"{folder}/lists: 3 list(s) are contaminated (query_overlap 1, name 1, jaccard 1); the first, query q3, "
        f"positive near/pdf: body overlap 0.850 with {GOLD} (run `skilltrain decontaminate pool={folder}/pool "
        f"queries={folder}/lists 'benchmarks=[{folder}/bench]' out=…` and train on what it writes, "
        "or set data.contamination=allow)"
    )

    run(folder, queries=folder / "lists")

    assert checked(folder, held_out=folder / "bench", lists="out") == {"num_contaminated_lists": 0}


def test_a_dev_set_may_share_skills_with_training_but_no_query(folder):
    dev = {"benchmark": folder / "queries", "split": "dev"}

    with pytest.raises(SkilltrainError) as error:
        checked(folder, dev=dev)
    assert (
        "1 list(s) are contaminated (query_overlap 1); the first, query q5: word overlap 0.895"
        in str(error.value)
    )
    assert f"(choose another dev.split, or run `skilltrain decontaminate pool={folder}/pool" in str(
        error.value
    )
    assert (
        "limits.name=false limits.jaccard=null out=…` and train on what it writes, or set data"
        in str(error.value)
    )
    assert checked(folder, dev=dev, contamination="allow") == {"num_lists_of_dev_queries": 1}

    write_queries(
        folder / "queries",
        QUERY_TEXTS | {"q6": ("dev", "another question about sound", "own/audio")},
    )

    assert checked(folder, dev=dev) == {"num_lists_of_dev_queries": 0}


def test_the_model_card_says_that_lists_were_contaminated(folder, model_folders):
    file = folder / "train.yaml"
    file.write_text(json.dumps(training(folder, model_folders["bert"]).model_dump(mode="json")))

    refused = skilltrain("train", file, f"data.held_out=[{folder}/bench]")

    assert "3 list(s) are contaminated" in refused.error_line
    assert not (folder / "model").exists()

    done = skilltrain(
        "train", file, f"data.held_out=[{folder}/bench]", "data.contamination=allow", "--json"
    )

    assert done.code == 0 and json.loads(done.out)["num_contaminated_lists"] == 3, done
    assert "| contaminated lists | 3 |" in (folder / "model" / "README.md").read_text()
