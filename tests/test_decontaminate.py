import json
from dataclasses import replace

import pytest

from skilltrain.config import validate
from skilltrain.data.decontaminate import DecontaminateConfig, run_decontaminate
from skilltrain.errors import SkilltrainError
from skilltrain.records import Query, Skill
from skilltrain.tables import CLUSTERS, DROPPED, JUDGEMENTS, LISTS, QUERIES, SKILLS, read_table, rows_of, write_table
from skilltrain.training.stages import TrainEncoderConfig, check_held_out
from skilltrain.training.training_set import load_training_set
from small_library import skilltrain

PDF = "open the file read each page in order and write the text of all pages to a new file"
POOL = [
    Skill("bench/pdf", "PDF to text", "d", PDF),
    Skill("copy/pdf", "extract", "d", PDF),
    Skill("near/pdf", "reader", "d", PDF + " then close it"),
    Skill("own/pdf-to-text", "pdf-to-text", "d", "nothing like the other body at all"),
    Skill("own/chart", "chart maker", "d", "draw one bar for each row of the table"),
    Skill("own/audio", "audio clip", "d", "cut the sound between two marks and fade both ends"),
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


def judgements(rows):
    return [{"query_id": q, "skill_id": s, "verdict": "required", "judge": "test"} for q, s in rows]


def a_list(query_id, positive, negative="own/none"):
    return {
        "query_id": query_id, "skill_ids": [positive, negative], "verdicts": ["required", "irrelevant"],
        "sources": ["gold", "random"], "ranks": [0, 1], "teacher_scores": None,
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    pool = [*POOL, Skill("own/none", "none", "d", "a body that answers no query of this test")]
    write_table(rows_of(pool), SKILLS, tmp_path / "pool")
    write_table(rows_of([Query("t1", TASK, "single", "test", "test")]), QUERIES, tmp_path / "bench")
    write_table(judgements([("t1", "bench/pdf")]), JUDGEMENTS, tmp_path / "bench")
    write_queries(tmp_path / "queries", QUERY_TEXTS)
    write_queries(tmp_path / "lists", {key: row for key, row in QUERY_TEXTS.items() if row[0] == "train"})
    write_table([a_list(q, row[2]) for q, row in QUERY_TEXTS.items() if row[0] == "train"], LISTS, tmp_path / "lists")
    return tmp_path


def write_queries(path, texts):
    write_table(
        rows_of(Query(q, text, "single", "test", split) for q, (split, text, _) in texts.items()), QUERIES, path
    )
    write_table(judgements([(q, row[2]) for q, row in texts.items()]), JUDGEMENTS, path)


def config_of(folder, **settings):
    values = {"stage": "decontaminate", "pool": folder / "pool", "queries": folder / "queries",
              "benchmarks": [folder / "bench"], "out": folder / "out"}  # fmt: skip
    return validate(DecontaminateConfig, values | settings, "recipe")


def run(folder, **settings):
    config = config_of(folder, **settings)
    summary = run_decontaminate(config, config.out)
    return summary, ids(config.out, QUERIES), dropped(config.out)


def ids(path, spec):
    return read_table(path, spec).column("query_id").to_pylist()


def dropped(path):
    return [tuple(row.values()) for row in read_table(path, DROPPED).to_pylist()]


GOLD = "gold skill bench/pdf of benchmark bench (task t1)"
# bodies: 19 words in all, 17 trigrams; near/pdf has 3 more.
ROWS = [
    ("q3", "near/pdf", "jaccard", 17 / 20, f"body overlap 0.850 with {GOLD}", "bench", "bench/pdf"),
    ("q4", "own/pdf-to-text", "name", 1.0, f"same name as {GOLD}", "bench", "bench/pdf"),
    ("q5", "", "query_overlap", 1.0, "100% of the 8-grams in common with task t1 of benchmark bench", "bench", None),
]


def test_what_the_benchmark_asks_for_is_dropped_with_its_ground(folder):
    summary, kept, rows = run(folder)
    assert kept == ["q1", "q2", "q6"] == ids(folder / "out", JUDGEMENTS)
    assert rows == ROWS
    assert (summary["num_queries"], summary["num_kept"], summary["num_dropped"]) == (5, 2, 3)
    assert summary["dropped_by_ground"] == {"query_overlap": 1, "name": 1, "jaccard": 1, "cluster": 0, "cosine": 0}
    assert summary["dropped_by_benchmark"] == {"bench": 3}
    assert not (folder / "out" / "lists.parquet").exists() and "num_lists_kept" not in summary


def test_all_splits_and_lists_are_cleaned(folder):
    _, kept, rows = run(folder, split=None)
    assert kept == ["q1", "q2"]
    assert rows[-1] == ("q6", "", "query_overlap", 1.0, "the same words as task t1 of benchmark bench", "bench", None)
    summary, kept, rows = run(folder, queries=folder / "lists", out=folder / "lists_out")
    assert kept == ids(folder / "lists_out", LISTS) == ["q1", "q2"] and rows == ROWS
    assert (summary["num_lists_kept"], summary["num_lists_dropped"]) == (2, 3)


def test_grounds_can_be_left_out_and_need_no_gold_texts_then(folder):
    write_table(rows_of(POOL[3:]), SKILLS, folder / "pool")
    with pytest.raises(SkilltrainError, match="gold skill 'bench/pdf' of task t1 has no text in the benchmark or the"):
        run(folder)
    _, kept, rows = run(folder, limits={"name": False, "jaccard": None})
    assert kept == ["q1", "q2", "q3", "q4", "q6"] and [row[0] for row in rows] == ["q5"]


def test_a_positive_outside_the_pool_is_told(folder, capsys):
    write_table(rows_of(skill for skill in POOL if skill.skill_id != "own/chart"), SKILLS, folder / "pool")
    assert "q1" in run(folder)[1]
    assert "1 of 4 positives are not in" in " ".join(capsys.readouterr().err.split())


def test_close_vectors_are_a_ground_of_their_own(folder, model_folders):
    encoder = {"source": str(model_folders["bert"])}
    off = {"name": False, "jaccard": None, "query_overlap": 1.0}
    moved = [replace(skill, name="PDF to text", body=PDF) if skill.skill_id == "own/chart" else skill for skill in POOL]
    write_table(rows_of(moved), SKILLS, folder / "pool")
    summary, _, rows = run(folder, encoder=encoder, cosine=0.99999, limits=off)
    assert summary["dropped_by_ground"]["cosine"] >= 1
    (row,) = [row for row in rows if row[1] == "own/chart"]
    assert row[2] == "cosine" and row[3] == pytest.approx(1, abs=1e-5) and row[4] == f"cosine 1.000 to {GOLD}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"benchmarks": "absent"}, "absent: no such folder; a benchmark is a folder"),
        ({"benchmarks": "lists"}, "lists: all 5 queries are of split 'train': this is training data, not a benchmark"),
        ({"benchmarks": "pool"}, "pool: is not a benchmark"),
        ({"queries": "absent"}, "absent/queries.parquet: no queries table here"),
        ({"split": "test"}, "queries: no query of split 'test' (splits here: dev, train) (set split)"),
    ],
)
def test_what_makes_no_sense_is_refused(folder, settings, message):
    placed = {key: value if key == "split" else folder / value for key, value in settings.items()}
    with pytest.raises(SkilltrainError) as error:
        run(folder, **placed)
    assert message in str(error.value)


def test_queries_and_pools_of_which_nothing_is_left_are_errors(folder):
    write_queries(folder / "queries", {key: QUERY_TEXTS[key] for key in ("q3", "q4")})
    with pytest.raises(SkilltrainError, match=r"queries: no query is left of 2; the first: body overlap 0\.850 with"):
        run(folder)
    write_queries(folder / "queries", {})
    with pytest.raises(SkilltrainError, match=r"no query of split .train. \(splits here: none, the table is empty\)"):
        run(folder)
    write_queries(folder / "queries", QUERY_TEXTS)
    write_table(rows_of([POOL[0]]), SKILLS, folder / "pool")
    with pytest.raises(SkilltrainError, match="pool: holds no positive of the queries"):
        run(folder)


def training(folder, model, dev=None, lists="lists", **data):
    values = {
        "stage": "train_encoder", "model": {"source": str(model), "max_tokens": 32, "query_max_tokens": 32},
        "data": {"pool": folder / "pool", "lists": folder / lists} | data, "near_duplicates": None,
        "training": {"batch_size": 2, "accumulation": 1, "token_budget": 256}, "out": folder / "model",
    }  # fmt: skip
    return validate(TrainEncoderConfig, values | ({"dev": dev} if dev else {}), "recipe")


def checked(config):
    return check_held_out(config.data, config.dev, load_training_set(config.data))


def test_training_refuses_contaminated_lists_in_one_line(folder):
    with pytest.raises(SkilltrainError) as error:
        checked(training(folder, "none", held_out=[folder / "bench"]))
    assert str(error.value) == (
        f"{folder}/lists: 3 list(s) are contaminated (query_overlap 1, name 1, jaccard 1); the first, query q3, "
        f"positive near/pdf: body overlap 0.850 with {GOLD} (run `skilltrain decontaminate pool={folder}/pool "
        f"queries={folder}/lists 'benchmarks=[{folder}/bench]' out=…` and train on what it writes, "
        "or set data.contamination=allow)"
    )


def test_training_is_content_with_what_decontaminate_writes(folder):
    run(folder, queries=folder / "lists")
    assert checked(training(folder, "none", held_out=folder / "bench", lists="out")) == {"num_contaminated_lists": 0}


def test_a_dev_set_may_share_skills_with_training_but_no_query(folder, capsys):
    dev = {"benchmark": folder / "queries", "split": "dev"}
    with pytest.raises(SkilltrainError) as error:
        checked(training(folder, "none", dev=dev))
    assert "1 list(s) are contaminated (query_overlap 1); the first, query q5: 100% of the 8-grams" in str(error.value)
    assert f"(choose another dev.split, or run `skilltrain decontaminate pool={folder}/pool" in str(error.value)
    assert "limits.name=false limits.jaccard=null out=…` and train on what it writes, or set data" in str(error.value)
    assert checked(training(folder, "none", dev=dev, contamination="allow")) == {"num_lists_of_dev_queries": 1}
    texts = dict(QUERY_TEXTS, q6=("dev", "another question about sound", "own/audio"))
    write_queries(folder / "queries", texts)
    assert checked(training(folder, "none", dev=dev)) == {"num_lists_of_dev_queries": 0}


def test_the_model_card_says_that_lists_were_contaminated(folder, model_folders):
    file = folder / "train.yaml"
    file.write_text(json.dumps(training(folder, model_folders["bert"]).model_dump(mode="json")))
    refused = skilltrain("train", file, f"data.held_out=[{folder}/bench]")
    assert "3 list(s) are contaminated" in refused.error_line and not (folder / "model").exists()
    done = skilltrain("train", file, f"data.held_out=[{folder}/bench]", "data.contamination=allow", "--json")
    assert done.code == 0 and json.loads(done.out)["num_contaminated_lists"] == 3, done
    assert "| lists contaminated by held-out benchmarks | 3 |" in (folder / "model" / "README.md").read_text()


def test_a_positive_linked_to_a_gold_skill_by_a_chain_of_copies_goes(folder):
    linked = ("bench/pdf", "own/chart")
    rows = [{"skill_id": one.skill_id, "cluster": 0 if one.skill_id in linked else n} for n, one in enumerate(POOL, 1)]
    write_table(rows, CLUSTERS, folder / "clusters")
    summary, kept, rows = run(folder, clusters=folder / "clusters")
    assert summary["dropped_by_ground"]["cluster"] == 1 and "q1" not in kept
    assert rows[0] == ("q1", "own/chart", "cluster", 1.0, f"in one cluster with {GOLD}", "bench", "bench/pdf")
