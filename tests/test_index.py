"""A router's folder: it answers as the rankers themselves do, is updated in place, and is never half there."""

import json
import shutil
import threading

import numpy as np
import pytest

from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import locked
from skilltrain.records import Skill
from skilltrain.retrieval import dense
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.routing import indexing
from skilltrain.routing.index import Index
from skilltrain.routing.indexing import write_index
from skilltrain.routing.router import Router
from skilltrain.tables import SKILLS, rows_of, write_table
from small_library import skilltrain, succeeds

WORDS = ["pdf merge", "table join", "chart maker", "log search", "photo sort", "audio clip"]
POOL = [
    Skill(f"s{n}", name, f"How to {name}", f"# {name}\n\n" + f"{name} step {n} " * 30) for n, name in enumerate(WORDS)
]
LEXICAL = [{"kind": "lexical"}]


def system_of(rankers):
    return validate(SystemConfig, {"name": "router", "rankers": rankers}, "test")


def hybrid(model, **dense):
    """BM25 and a tiny encoder, whose late interaction helps to order what they find."""
    source = {"source": str(model), "precision": "float32"}
    legs = [{"kind": "lexical"}, {"kind": "dense", **source, **dense}]
    return [{"kind": "fuse", "of": legs, "keep": 4}, {"kind": "fuse", "of": [*legs, {"kind": "late", **source}]}]


def made(folder, pool=POOL, rankers=LEXICAL):
    """A router in `folder`."""
    write_index(folder, system_of(rankers), pool, {}, folder / "pool")
    return folder


def ids(router, task, k=6):
    return [routed.skill_id for routed in router.route(task, k).skills]


@pytest.fixture
def model(model_folders, tmp_path):
    return shutil.copytree(model_folders["bert"], tmp_path / "model")


@pytest.fixture
def encoded(monkeypatch):
    """The texts that encoders see, in order."""
    seen = []
    encode = dense.encode_texts

    def watched(model, work, *rest):
        seen.extend(work.texts)
        return encode(model, work, *rest)

    monkeypatch.setattr(dense, "encode_texts", watched)
    return seen


def test_an_index_answers_as_its_rankers_do(model, tmp_path):
    rankers = hybrid(model, chunks={"windows": 3}, template={"skill": {"body_chars": 80}})
    loaded, opened = Router.load(made(tmp_path / "router", rankers=rankers)), Router(POOL, system_of(rankers))
    for task in ("join two tables", "find a line in the logs"):
        traces = [router.trace(task) for router in (loaded, opened)]
        assert [skill_id for skill_id, _ in traces[0].ranking] == [skill_id for skill_id, _ in traces[1].ranking]
        for name, within in (("lexical", 1e-5), ("dense", 1e-5), ("late", 3e-3)):  # tokens are stored in 8 bits
            found, expected = (dict(trace.found[name]) for trace in traces)
            assert found == pytest.approx(expected, abs=within)
    assert [*loaded.skills.values()] == POOL and loaded.skills["s1"] == POOL[1]
    why = loaded.route("join two tables", 1).skills[0].why
    assert why.terms == ("join", "tables")
    assert {placed.ranker for placed in why.placed} == {"lexical", "dense", "late"}
    assert why.window in [(0, 80), (80, 160), (160, 240)]


def test_only_what_is_new_or_changed_is_encoded(model, tmp_path, encoded):
    rankers = hybrid(model, cache=str(tmp_path / "vectors"))
    router = Router.load(made(tmp_path / "router", rankers=rankers))
    assert len(encoded) == 6
    encoded.clear()
    changed = Skill("s1", "table pivot", "How to pivot a table", "turn rows into columns")
    now = [*POOL[2:], changed, Skill("new", "subtitle writer", "Subtitles", "write short lines")]
    assert router.update(now) == {"num_skills": 6, "num_new": 1, "num_changed": 1, "num_gone": 1}
    assert {text.split(" |")[0] for text in encoded} == {"table pivot", "subtitle writer"}
    assert router.skills["s1"].name == "table pivot" and "s0" not in router.skills
    anew = Router(now, system_of(hybrid(model)))
    assert ids(router, "pivot a table", 4) == ids(anew, "pivot a table", 4)
    encoded.clear()
    assert router.update(now)["num_new"] == 0 and encoded == []


def test_readers_keep_what_they_opened_until_they_refresh(tmp_path):
    folder = made(tmp_path / "router")
    reader, writer = Router.load(folder), Router.load(folder)
    writer.update([Skill("new", "table join", "join", "join tables"), *POOL[:1]])
    assert ids(reader, "join tables")[0] == "s1" and reader.skills["s1"].name == "table join"
    assert reader.refresh() and not reader.refresh()
    assert ids(reader, "join tables", 1) == ids(writer, "join tables", 1) == ["new"]
    assert sorted(path.name for path in folder.iterdir()) == ["index-2", "router.json"]


def test_tasks_are_answered_while_the_router_is_written(tmp_path):
    folder, faults, stop = made(tmp_path / "router"), [], threading.Event()

    def ask():
        router = Router.load(folder)
        while not stop.is_set():
            try:
                router.refresh()
                assert ids(router, "join tables", 1) in (["s1"], ["other"])
                Router.load(folder)
            except Exception as error:
                faults.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    router = Router.load(folder)
    for number in range(6):
        router.update(POOL if number % 2 else [Skill("other", "join tables", "join", "tables"), *POOL[2:]])
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_ten_thousand_skills_change_at_once(tmp_path):
    pool = [Skill(f"s{n}", f"skill {n}", f"about {n}", f"the body of word{n}") for n in range(10_000)]
    router = Router.load(made(tmp_path / "router", pool))
    changed = [Skill(skill.skill_id, skill.name, skill.description, f"{skill.body} anew") for skill in pool]
    assert router.update(changed)["num_changed"] == 10_000
    assert ids(router, "word777", 1) == ["s777"] and router.skills["s777"].body.endswith("anew")


def damage_file(folder):
    (folder / "index-1" / "part-1" / "weights.npy").unlink()


def cut_file(folder):
    file = folder / "index-1" / "skills.arrow"
    file.write_bytes(file.read_bytes()[:-100])


def lose_record(folder):
    (folder / "index-1" / "index.json").unlink()


def mix_pools(folder):
    """keys.npy of another pool, with its size in the record."""
    record = json.loads((folder / "index-1" / "index.json").read_text())
    np.save(folder / "index-1" / "keys.npy", np.array([b"1"], "S16"))
    record["files"]["keys.npy"] = (folder / "index-1" / "keys.npy").stat().st_size
    (folder / "index-1" / "index.json").write_text(json.dumps(record))


def leave_folder(folder):
    file = folder / "index-1" / "index.json"
    record = json.loads(file.read_text())
    record["rankers"] = [{"kind": "dense", "source": "x", "cache": "./../elsewhere"}]
    file.write_text(json.dumps(record))


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (damage_file, "is half-written or damaged: part-1/weights.npy is not there"),
        (cut_file, "is half-written or damaged: skills.arrow is not there, or not of"),
        (lose_record, "it lacks index.json (run skilltrain index again)"),
        (mix_pools, "its parts are of different pools"),
        (leave_folder, "the path '../elsewhere' leaves its folder"),
        (lambda folder: (folder / "router.json").write_text('{"index": "../x"}'), "names no index"),
        (lambda folder: (folder / "router.json").write_text('{"ind'), "is not JSON"),
        (lambda folder: (folder / "router.json").write_text('{"index": "index-7"}'), "it lacks index.json"),
        (lambda folder: (folder / "router.json").unlink(), "holds no router (make one with skilltrain fit or"),
    ],
)
def test_what_is_not_whole_is_refused_and_made_again(tmp_path, harm, complaint):
    folder = made(tmp_path / "router")
    harm(folder)
    with pytest.raises(SkilltrainError) as raised:
        Router.load(folder)
    assert complaint in str(raised.value)
    assert ids(Router.load(made(folder)), "join tables", 1) == ["s1"]


def test_an_index_of_another_model_is_refused(model, tmp_path):
    folder = made(tmp_path / "router", rankers=hybrid(model))
    (model / "README.md").write_text("no part of the model")
    Router.load(folder)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"layer_norm_eps": 1e-5}))
    with pytest.raises(SkilltrainError, match=r"is of another model: .*model has changed"):
        Router.load(folder)
    Router.load(made(folder, rankers=hybrid(model)))


def test_a_writer_waits_for_nobody(tmp_path):
    folder = made(tmp_path / "router")
    with locked(folder), pytest.raises(SkilltrainError, match="another process is writing this very folder"):
        Router.load(folder).update(POOL[:2])
    assert len(Router.load(folder).skills) == 6


@pytest.mark.parametrize("last", ["staged_folder", "write_json", "np.save"])
def test_a_writer_that_is_stopped_changes_nothing_and_leaves_nothing(tmp_path, monkeypatch, last):
    folder = made(tmp_path / "router")

    def stop(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(indexing.np if "." in last else indexing, last.removeprefix("np."), stop)
        with pytest.raises(KeyboardInterrupt):
            made(folder, POOL[:3])
    assert len(Router.load(folder).skills) == 6
    (folder / ".index-2.partial").mkdir()  # as kill -9 leaves it
    shutil.copytree(folder / "index-1", folder / "index-9")
    (folder / "index-of-mine").mkdir()
    assert len(Router.load(made(folder, POOL[:3])).skills) == 3
    assert sorted(path.name for path in folder.iterdir()) == ["index-10", "index-of-mine", "router.json"]


def test_a_router_may_be_moved_with_what_lies_in_it(model, tmp_path):
    folder = tmp_path / "router"
    shutil.copytree(model, folder / "encoder")
    (folder / "pool").mkdir()
    record = Index.open(made(folder, rankers=hybrid(folder / "encoder", cache=str(folder / "vectors")))).record
    assert set(record.models) == {"./encoder"} and record.pool == "./pool"
    shutil.move(folder, tmp_path / "moved")
    router = Router.load(tmp_path / "moved")
    assert router.update(POOL[:4])["num_gone"] == 2 and (tmp_path / "moved" / "vectors").is_dir()


def test_the_command_makes_a_router_and_takes_up_changes(tmp_path):
    pool, folder = tmp_path / "pool", tmp_path / "router"
    write_table(rows_of(POOL), SKILLS, pool)
    line = ("index", f"pool={pool}", "rankers=[{kind: lexical}]", f"out={folder}")
    assert "6 skills: 6 new, 0 changed, 0 gone" in succeeds(*line).out
    write_table(rows_of(POOL[1:]), SKILLS, pool)
    assert json.loads(succeeds("index", f"out={folder}", "--dry-run").out)["plan"]["num_gone"] == 1
    assert "5 skills: 0 new, 0 changed, 1 gone" in succeeds("index", f"out={folder}").out
    shown = json.loads(succeeds("route", "join tables", "--router", folder, "--json").out)
    assert shown["fits"] and shown["skills"][0]["skill_id"] == "s1" and shown["skills"][0]["probability"] is None
    assert shown["skills"][0]["why"]["placed"][0].keys() == {"ranker", "rank", "score"}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["rankers=[{kind: lexical}]"], "holds no router (give pool=… and rankers=…)"),
        (["pool={pool}"], "holds no router (give pool=… and rankers=…)"),
        (["pool={pool}", "rankers=[{kind: saved, rankings: {pool}}]"], "rankings that were made before answer no new"),
        (["pool={pool}", "rankers=[{kind: late, source: x}]"], "the first ranker finds skills in the pool"),
        (["pool={pool}", "rankers=[{kind: dense, source: {pool}}]"], "is no model folder"),
        (["pool={pool}/nowhere", "rankers=[{kind: lexical}]"], "no such file or folder"),
    ],
)
def test_settings_that_make_no_router_are_refused(tmp_path, settings, complaint):
    write_table(rows_of(POOL), SKILLS, tmp_path / "pool")
    given = [text.replace("{pool}", str(tmp_path / "pool")) for text in settings]
    assert complaint in skilltrain("index", *given, f"out={tmp_path}/router").error_line
    assert not (tmp_path / "router" / "router.json").exists()
