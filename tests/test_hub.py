"""Pushes of models, routers and tables to a Hub on loopback, and what is downloaded from there."""

import io
import json
import re
import shlex
import shutil
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from datasets import load_dataset
from huggingface_hub import constants

from benchmark_folders import write_pool
from faults import raises
from hub_server import TOKEN, Repository, commit_of, hub_server
from skilltrain.data.screening import write_flags
from skilltrain.data.screening.rules import Flag
from skilltrain.export.card import Published
from skilltrain.export.push import PushOptions, push_files, upload
from skilltrain.export.tables import find_tables, push_tables
from skilltrain.files import cache_folder, locked
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.provenance import HUB_REVISIONS, provenance_of
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import system_of
from skilltrain.retrieval.dense import DenseConfig
from skilltrain.serving.hub import local_router, push_router
from skilltrain.serving.index import Contents
from skilltrain.serving.indexing import write_index
from skilltrain.serving.router import Router
from skilltrain.tables import LISTS, QUERIES, read_skills, read_table, write_table
from small_library import skilltrain, succeeds

REPO = "our-team/sr-emb"
MARKER = "skilltrain.json"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """Start a Hub. The environment has its token, and an empty cache of its files."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    with hub_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = f"{running.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield running


@pytest.fixture
def files(tmp_path):
    """Return the files of a model that is to be pushed, by name."""
    paths = {name: tmp_path / name for name in ("README.md", MARKER)}
    for path in paths.values():
        path.write_text("{}")
    return paths


def old_repository(**more):
    return Repository(files={MARKER: b"old", "old.txt": b"old"}, **more)


# Push -------------------------------------------------------------------------


def test_push_writes_only_its_branch(hub, files):
    hub.repositories[REPO] = old_repository(branches={"next": {MARKER: b"older"}})

    url = upload(files, REPO, PushOptions(revision="next"))

    repository = hub.repositories[REPO]
    assert url.endswith(REPO)
    assert repository.branches["next"] == {MARKER: b"{}", "README.md": b"{}"}
    assert repository.files[MARKER] == b"old"


@pytest.mark.parametrize("repositories", [{REPO: old_repository()}, {}])
def test_push_creates_no_branch(hub, files, repositories):
    hub.repositories |= repositories

    with raises("upload-failed"):
        upload(files, REPO, PushOptions(revision="missing"))

    assert not any(line.startswith("POST") for line in hub.log)


def test_push_tags_its_commit(hub, files):
    upload(files, REPO, PushOptions(tag="v1"))

    repository = hub.repositories[REPO]
    assert repository.tags == {"v1": repository.files}


def test_existing_tag_stops_push(hub, files):
    hub.repositories[REPO] = old_repository(tags={"v1": {}})

    with raises("tag-exists"):
        upload(files, REPO, PushOptions(tag="v1"))

    assert hub.repositories[REPO].commits == 0


def test_refused_tag_is_named(hub, files):
    hub.status_of_tag = 403

    with pytest.raises(Exception, match="cannot tag the uploaded files: The tag is refused"):
        upload(files, REPO, PushOptions(tag="v1"))


def test_pull_request_leaves_branch_alone(hub, files):
    hub.repositories[REPO] = old_repository()

    url = upload(files, REPO, PushOptions(create_pr=True))

    repository = hub.repositories[REPO]
    assert url.endswith("/discussions/1")
    assert len(repository.pull_requests) == 1
    assert repository.files == {MARKER: b"old", "old.txt": b"old"}


@pytest.mark.parametrize("status", [401, 403, 404, 409, 429, 500, 503])
@pytest.mark.parametrize("step", ["status_of_read", "status_of_commit"])
def test_refused_push_changes_nothing(hub, files, status, step):
    hub.repositories[REPO] = old_repository()
    setattr(hub, step, status)

    with raises("upload-failed") as caught:
        upload(files, REPO, PushOptions())

    assert "\n" not in str(caught.value)
    assert hub.repositories[REPO].files == {MARKER: b"old", "old.txt": b"old"}


def test_secret_in_table_is_not_sent(hub, files, tmp_path):
    table = tmp_path / "queries.parquet"
    pq.write_table(pa.table({"text": ["no secret", "the key AKIA" + "QX7ZP2LMVT9RDK4W"]}), table)

    with pytest.raises(Exception, match=r"queries\.parquet, row 2: holds what looks like a secret"):
        push_files(files | {table.name: table}, Published(REPO), PushOptions())

    assert hub.log == []


# Routers ----------------------------------------------------------------------

ROUTER = "our-team/router"
SOURCE = f"hf:{ROUTER}"
POOL = [
    Skill("merge", "pdf-merge", "Merge PDF files", "Join the pages.", license="MIT"),
    Skill("chart", "chart-maker", "Draw a chart", "Label both axes.", license="CC|BY"),
]


def write_router(folder, rankers, pool=POOL):
    contents = Contents(folder / "pool", {folder / "pool": pool}, ())
    write_index(folder, system_of(rankers), contents, {})
    return folder


@pytest.fixture
def found_router(tmp_path):
    """The folder of a router over a pool in which a chat model has found the first skill."""
    folder = tmp_path / "found"
    finding = Flag("chat_model", "body", 0, 0, "", "it does harm")
    write_flags({POOL[0].skill_id: [finding]}, write_pool(folder / "pool", POOL))
    return write_router(folder, "lexical")


@pytest.fixture
def router(tmp_path, model_folders):
    """The folder of a router with one model inside the folder, and another outside."""
    folder = tmp_path / "somebody" / "router"
    shutil.copytree(model_folders["bert"], folder / "encoder")
    legs = [{"kind": "lexical"}, {"kind": "dense", "source": str(folder / "encoder")}]
    late = {"kind": "late", "source": str(model_folders["bert"])}
    return write_router(folder, [{"kind": "fuse", "of": legs}, late])


def rankings(router):
    return router.trace("merge pdf files").ranking


def test_pulled_router_ranks_as_before(hub, router):
    expected = rankings(Router.load(router))

    push_router(router, Published(ROUTER), PushOptions())
    shutil.rmtree(router)

    assert rankings(Router.load(SOURCE)) == expected


def test_pulled_router_keeps_findings(hub, found_router):
    push_router(found_router, Published(ROUTER), PushOptions())
    shutil.rmtree(found_router)

    pulled = Router.load(SOURCE)

    (skill,) = pulled.route("merge pdf files", k=1).skills
    assert [flag.rule for flag in skill.flags] == ["chat_model"]


def test_pushed_router_names_no_path(hub, router, tmp_path):
    push_router(router, Published(ROUTER, "mit"), PushOptions())

    files = hub.repositories[ROUTER].files
    assert "local.json" not in files
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    assert not any(b"somebody" in content for content in files.values())


def test_card_of_router_states_licenses(hub, router):
    card = push_router(router, Published(ROUTER, "mit"), PushOptions(dry_run=True))["card"]

    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "mit"
    assert front["library_name"] == "skilltrain"
    assert "| CC\\|BY | 1 |" in card
    assert f'Router.load("{SOURCE}")' in card
    assert "{{" not in card
    assert hub.log == []


def test_card_of_router_counts_flagged_skills(hub, tmp_path):
    skills = [
        Skill("a", "bike", "Mend bikes", "See http://45.140.17.2/x"),
        Skill("b", "b", "b", "b"),
    ]
    folder = write_router(tmp_path / "router", "lexical", skills)

    card = push_router(folder, Published(ROUTER), PushOptions(dry_run=True))["card"]

    assert "screening flags 1 of the skills" in card


def test_card_of_router_counts_findings(hub, found_router):
    card = push_router(found_router, Published(ROUTER), PushOptions(dry_run=True))["card"]

    assert "screening flags 1 of the skills" in card


def test_cards_commands_run(hub, router, monkeypatch):
    card = push_router(router, Published(ROUTER), PushOptions())["card"]
    command, *_ = re.findall(r"^skilltrain (route .*)$", card, re.MULTILINE)
    (program,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)

    printed = succeeds(*shlex.split(command)).out
    exec(program, {})

    assert "pdf-merge" in printed


def test_router_with_secret_is_not_sent(hub, tmp_path):
    pool = [replace(POOL[0], body="Use AKIA" + "QX7ZP2LMVT9RDK4W"), POOL[1]]
    folder = write_router(tmp_path / "router", "lexical", pool)

    with raises("secret-found") as caught:
        push_router(folder, Published(ROUTER), PushOptions())

    assert "skills.arrow, row 1" in str(caught.value)
    assert hub.log == []


def test_password_of_example_is_sent(hub, tmp_path):
    pool = [replace(POOL[0], body="curl http://user:pass@" + "host/x; password: SecurePass123")]
    folder = write_router(tmp_path / "router", "lexical", pool)

    assert push_router(folder, Published(ROUTER), PushOptions())["url"]


def test_router_with_bodies_may_be_refused(hub, tmp_path):
    folder = write_router(tmp_path / "router", "lexical")

    with raises("private-bodies"):
        push_router(folder, Published(ROUTER), PushOptions(no_bodies=True))

    assert hub.log == []


@pytest.mark.parametrize(
    "ranker",
    [
        {"kind": "select", "prompt": "prompt.yaml"},
        {"kind": "admit", "specificity": True, "specificity_prompt": "prompt.yaml"},
    ],
)
def test_router_with_prompt_file_is_not_sent(hub, tmp_path, monkeypatch, ranker):
    monkeypatch.chdir(tmp_path)
    prompt = {
        "system": "choose",
        "user": "{{ query }} {% for s in skills %}{{ s.name }}{% endfor %}",
    }
    (tmp_path / "prompt.yaml").write_text(json.dumps(prompt))
    llm = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    folder = write_router(tmp_path / "router", [{"kind": "lexical"}, ranker | {"llm": llm}])

    with raises("conflicting-settings"):
        push_router(folder, Published(ROUTER), PushOptions(dry_run=True))

    assert str(tmp_path) not in (folder / "index-1" / "index.json").read_text()


def test_router_with_code_is_not_sent(hub, tmp_path, model_folders):
    shutil.copytree(model_folders["bert"], tmp_path / "encoder")
    (tmp_path / "encoder" / "modeling.py").write_text("")
    rankers = [{"kind": "dense", "source": str(tmp_path / "encoder")}]
    folder = write_router(tmp_path / "router", rankers)

    with raises("remote-code"):
        push_router(folder, Published(ROUTER), PushOptions())


def test_router_replaces_no_model(hub, tmp_path):
    folder = write_router(tmp_path / "router", "lexical")
    hub.repositories[ROUTER] = Repository(files={MARKER: b"{}"})

    with raises("repository-taken"):
        push_router(folder, Published(ROUTER), PushOptions())


def test_revision_pins_router(hub, tmp_path):
    folder = write_router(tmp_path / "router", "lexical")
    push_router(folder, Published(ROUTER), PushOptions(tag="v1"))
    write_router(folder, "lexical", POOL[:1])
    push_router(folder, Published(ROUTER), PushOptions())

    assert len(Router.load(f"{SOURCE}@v1").skills) == 2
    assert len(Router.load(SOURCE).skills) == 1
    assert HUB_REVISIONS[f"{ROUTER}@v1"] == commit_of(hub.repositories[ROUTER].tags["v1"])


def test_downloaded_router_is_not_changed(hub, tmp_path):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    router = Router.load(SOURCE)

    with raises("conflicting-settings"):
        router.update(POOL[:1])

    assert len(Router.load(SOURCE).skills) == 2


def damage_array(files):
    """Replace an array by a pickled one, as a stranger could."""
    content = io.BytesIO()
    np.save(content, np.array([{}], dtype=object), allow_pickle=True)
    record = json.loads(files["index-1/index.json"])
    files["index-1/keys.npy"] = content.getvalue()
    record["files"]["keys.npy"] = len(content.getvalue())
    del record["digests"]["keys.npy"]
    files["index-1/index.json"] = json.dumps(record).encode()


def name_file_outside(files):
    record = json.loads(files["index-1/index.json"])
    record["files"]["../../outside.json"] = 2
    files["index-1/index.json"] = json.dumps(record).encode()


def send_file_outside(files):
    files["../outside.json"] = b"{}"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (dict.clear, "no-router"),
        (damage_array, "damaged-router"),
        (name_file_outside, "path-outside-folder"),
        (send_file_outside, "download-failed"),
    ],
)
def test_unsafe_router_is_refused(hub, tmp_path, change, code):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    change(hub.repositories[ROUTER].files)

    outcome = skilltrain("route", "merge", "--router", SOURCE)

    assert outcome.error_line.endswith(f"[{code}]")
    assert not list(tmp_path.rglob("outside.json"))


def test_code_of_router_is_not_downloaded(hub, tmp_path):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    hub.repositories[ROUTER].files |= {"encoder/model.bin": b"", "a.pkl": b"", "a.py": b""}

    folder = local_router(SOURCE)

    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".json", ".npy", ".arrow"}


def test_router_brings_no_paths(hub, tmp_path):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    files = hub.repositories[ROUTER].files
    record = json.loads(files["index-1/index.json"])
    (source,) = record["sources"]
    private = tmp_path / "private" / "merge"
    private.mkdir(parents=True)
    (private / "SKILL.md").write_text("private")
    files["index-1/index.json"] = json.dumps(
        record | {"pool": "local:a", "sources": {"local:a": 2}}
    ).encode()
    files["local.json"] = json.dumps({"local:a": str(private.parent)}).encode()

    router = Router.load(SOURCE)

    assert source.startswith("./")
    assert router.route("merge").skills[0].path is None


@pytest.mark.parametrize("path", ["/etc", "~/keys", "C:\\keys", "../keys"])
@pytest.mark.parametrize("key", ["pool", "prompt"])
def test_router_names_no_path_here(hub, tmp_path, path, key):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    files = hub.repositories[ROUTER].files
    record = json.loads(files["index-1/index.json"])
    (record if key == "pool" else record["rankers"][0])[key] = path
    files["index-1/index.json"] = json.dumps(record).encode()

    with raises("path-outside-folder"):
        Router.load(SOURCE)


def test_second_process_waits_for_router(hub, tmp_path, monkeypatch):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())
    folder = cache_folder("routers") / commit_of(hub.repositories[ROUTER].files)
    other = ExitStack()
    other.enter_context(locked(folder))
    monkeypatch.setattr("skilltrain.serving.hub.sleep", lambda seconds: other.close())

    assert local_router(SOURCE) == folder
    assert (folder / "router.json").is_file()


def test_printed_configuration_names_hub(hub, tmp_path):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())

    printed = succeeds("serve", SOURCE, "--print-config", "cursor").out

    assert json.loads(printed)["mcpServers"]["skilltrain"]["args"] == ["serve", SOURCE]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500, 503])
def test_refused_router_is_one_line(hub, status):
    hub.status_of_read = status

    outcome = skilltrain("serve", SOURCE)

    assert outcome.error_line.endswith("[download-failed]")


def test_missing_revision_is_one_line(hub, tmp_path):
    push_router(write_router(tmp_path / "router", "lexical"), Published(ROUTER), PushOptions())

    outcome = skilltrain("route", "merge", "--router", f"{SOURCE}@v9")

    assert outcome.error_line.endswith("[download-failed]")
    assert not (tmp_path / "cache" / "skilltrain").exists()


# Models -----------------------------------------------------------------------


def test_revision_pins_model(hub, model_folders, tmp_path):
    files = {path.name: path.read_bytes() for path in model_folders["bert"].iterdir()}
    hub.repositories[REPO] = Repository(files={}, tags={"v1": files})
    source = f"{REPO}@v1"

    encoder = load_encoder(EncoderConfig(source=source), torch.device("cpu"))

    assert encoder.dim
    assert HUB_REVISIONS[source] == commit_of(files)
    with raises("download-failed"):
        load_encoder(EncoderConfig(source=f"{REPO}@v2"), torch.device("cpu"))


def test_evaluation_records_revision(hub, model_folders):
    files = {path.name: path.read_bytes() for path in model_folders["bert"].iterdir()}
    hub.repositories[REPO] = Repository(files=files)
    source = f"{REPO}@main"
    Router(POOL, [{"kind": "dense", "source": source}])

    provenance = provenance_of(DenseConfig(source=source))

    assert provenance["hub_revisions"] == {source: commit_of(files)}


# Tables -----------------------------------------------------------------------

DATA = "our-team/skill-lists"


@pytest.fixture(scope="module")
def stages(tmp_path_factory, library):
    """The folder with the outputs of stages: pool, queries and lists."""
    root = tmp_path_factory.mktemp("home_of_ada")
    succeeds("pool", f"sources={library}/skills", f"out={root}/pool")
    files = f"files={library}/queries/*.jsonl"
    succeeds("queries", files, f"pool={root}/pool", f"out={root}/queries")
    row = {"query_id": "q00", "skill_ids": ["a"], "verdicts": ["required"], "sources": ["x"]}
    write_table([row | {"ranks": [0], "teacher_scores": None}], LISTS, root / "lists")
    return root


def push(*folders, **options):
    return push_tables(find_tables(folders), folders, Published(DATA), PushOptions(**options))


def pushed_folder(hub, folder):
    """Write the files of the pushed repository to a folder, as `hf download` does."""
    folder.mkdir()
    for name, content in hub.repositories[DATA].files.items():
        (folder / name).write_bytes(content)
    return folder


def test_load_dataset_opens_pushed_tables(hub, stages, tmp_path):
    push(stages / "queries", stages / "lists", stages / "pool")

    folder = pushed_folder(hub, tmp_path / "data")
    rows = {
        name: load_dataset(str(folder), name, split="full", cache_dir=str(tmp_path / "cache"))
        for name in ("queries", "judgements", "lists", "skills")
    }

    assert hub.repositories[DATA].type == "dataset"
    assert rows["queries"].to_list() == read_table(stages / "queries", QUERIES).to_pylist()
    assert rows["lists"][0]["skill_ids"] == ["a"]
    assert [len(table) for table in rows.values()] == [16, 18, 1, 20]


def test_pool_reads_pushed_skills(hub, stages, tmp_path):
    push(stages / "queries", stages / "pool")
    folder = pushed_folder(hub, tmp_path / "data")

    succeeds("pool", f"sources=hf:{folder}", f"out={tmp_path}/pool")

    old_bodies = {skill.body for skill in read_skills(stages / "pool")}
    assert {skill.body for skill in read_skills(tmp_path / "pool")} == old_bodies


def test_pool_is_sent_only_if_named(hub, stages):
    outcome = push(stages / "queries")

    names = {"README.md", "provenance.json", "queries.parquet", "judgements.parquet"}
    assert outcome["files"].keys() == hub.repositories[DATA].files.keys() == names


def test_bodies_may_stay_private(hub, stages, tmp_path):
    push(stages / "pool", no_bodies=True)

    table = pq.read_table(pushed_folder(hub, tmp_path / "data") / "skills.parquet")
    assert "body" not in table.column_names
    assert table.num_rows == 20


def test_dataset_names_no_path(hub, stages):
    push(stages / "queries", stages / "lists", stages / "pool")

    contents = hub.repositories[DATA].files.values()
    assert not any(b"home_of_ada" in content for content in contents)


def test_dataset_card_states_facts(hub, stages):
    card = push(stages / "queries", stages / "lists", dry_run=True)["card"]

    for line in (
        "| queries | 16 |",
        "| judgements | verdict | string | no |",
        "| skills | not stated | 20 |",
        '"stage": "queries"',
        "No record of a stage is in this folder.",
        "Do not train on the others.",
        f'queries = load_dataset("{DATA}", "queries", split="full")',
    ):
        assert line in card
    assert "{{" not in card
    assert "\n\n\n" not in card
    assert hub.log == []


def test_card_without_pool_says_so(tmp_path, stages):
    shutil.copytree(stages / "lists", tmp_path / "lists")

    card = push(tmp_path / "lists", dry_run=True)["card"]

    assert "licences of its sources are not known here" in card


def test_card_warns_of_users_requests(stages, tmp_path):
    rows = read_table(stages / "queries", QUERIES).to_pylist()
    write_table([row | {"origin": "use"} for row in rows], QUERIES, tmp_path / "learned")

    cards = [
        push(folder, dry_run=True)["card"] for folder in (tmp_path / "learned", stages / "queries")
    ]

    assert ["requests of users" in card for card in cards] == [True, False]


def test_password_in_query_is_not_sent(stages, tmp_path):
    (row, *_) = read_table(stages / "queries", QUERIES).to_pylist()
    text = "open https://user:pass1234@" + "host.org/x"
    write_table([row | {"text": text}], QUERIES, tmp_path / "learned")

    with raises("secret-found"):
        push(tmp_path / "learned", dry_run=True)


def test_recipe_without_pool_is_pushed(stages, tmp_path):
    shutil.copytree(stages / "pool", tmp_path / "distractors")
    file = tmp_path / "distractors" / "run.json"
    record = json.loads(file.read_text())
    record["recipe"]["pool"] = None
    file.write_text(json.dumps(record))

    card = push(tmp_path / "distractors", dry_run=True)["card"]

    assert "| skills | not stated | 20 |" in card


def test_folders_of_one_name_keep_records(hub, stages, tmp_path):
    for kind in ("queries", "pool"):
        shutil.copytree(stages / kind, tmp_path / kind / "data")

    push(tmp_path / "queries" / "data", tmp_path / "pool" / "data")

    records = json.loads(hub.repositories[DATA].files["provenance.json"])
    stages_by_name = {name: record["recipe"]["stage"] for name, record in records.items()}
    assert stages_by_name == {"data": "queries", "data (2)": "pool"}


def test_card_says_that_bodies_are_missing(stages):
    card = push(stages / "pool", no_bodies=True, dry_run=True)["card"]

    assert "without their bodies" in card


def test_dataset_replaces_no_other_data(hub, stages):
    hub.repositories[DATA] = Repository(files={"train.csv": b"a"}, type="dataset")

    with raises("repository-taken"):
        push(stages / "queries")

    assert hub.repositories[DATA].files == {"train.csv": b"a"}


def test_table_is_named_once(stages, tmp_path):
    shutil.copytree(stages / "queries", tmp_path / "again")

    with raises("conflicting-settings"):
        find_tables([stages / "queries", tmp_path / "again"])


# Command ----------------------------------------------------------------------


def test_command_pushes_each_kind(hub, stages, tmp_path):
    folder = write_router(tmp_path / "router", "lexical")

    for arguments in ([folder, "--repo", ROUTER], [stages / "queries", "--repo", DATA]):
        succeeds("push", *arguments, "--tag", "v1")

    assert "router.json" in hub.repositories[ROUTER].tags["v1"]
    assert "queries.parquet" in hub.repositories[DATA].tags["v1"]


@pytest.mark.parametrize("options", [["--form", "onnx"], ["--base-model", "a/b"]])
def test_options_of_models_are_refused(stages, options):
    outcome = skilltrain("push", stages / "queries", "--repo", DATA, *options)

    assert outcome.error_line.endswith("[conflicting-settings]")


def test_model_has_no_bodies_to_leave_out(model_folders):
    outcome = skilltrain("push", model_folders["bert"], "--repo", REPO, "--no-bodies")

    assert outcome.error_line.endswith("[conflicting-settings]")


def test_file_of_table_is_refused(stages):
    file = stages / "queries" / "queries.parquet"

    outcome = skilltrain("push", file, "--repo", DATA)

    assert "only folders are pushed" in outcome.error_line


def test_two_models_are_refused(tmp_path):
    outcome = skilltrain("push", tmp_path, tmp_path, "--repo", REPO)

    assert outcome.error_line.endswith("[conflicting-settings]")
