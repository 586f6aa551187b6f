"""Pushing a model to a Hub on loopback: what arrives, what is checked before, and one clear line for every refusal."""

import json
import shutil

import pytest
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from hub_server import TOKEN, Repository, hub_server
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published
from skilltrain.export.folder import save_model
from skilltrain.templates import RerankerTemplate
from skilltrain.training.publish import check_round_trip, export_run, push_model, save_trained
from small_library import skilltrain
from test_export_run import DATA, DEV, add_checkpoint, config_of, write_run

REPO = "our-team/sr-emb"


@pytest.fixture
def hub(monkeypatch):
    """A Hub whose token the environment holds."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


@pytest.fixture
def trained(tmp_path, model_folders):
    """The folder of a finished training."""
    config = config_of(tmp_path, model_folders["bert"])
    add_checkpoint(config, 4)
    write_run(config, finished=True, summary=DATA | DEV)
    save_trained(config, config.out / "checkpoints" / "step-4", config.out, DATA | DEV)
    return config.out


def test_a_model_arrives_whole_in_a_private_repository(hub, trained):
    found = push_model(trained, Published(REPO, "apache-2.0"))
    repository = hub.repositories[REPO]
    assert repository.private and repository.commits == 1 and found["url"].endswith(REPO)
    assert {name: len(content) for name, content in repository.files.items()} == found["files"]
    for name in ("model.safetensors", "1_Pooling/config.json", "tokenizer.json"):
        assert repository.files[name] == (trained / name).read_bytes()
    card = repository.files["README.md"].decode()
    assert card == found["card"] and f'SentenceTransformer("{REPO}")' in card and "license: apache-2.0" in card
    assert not any("checkpoints" in name or name in ("run.json", "recipe.yaml") for name in repository.files)


def test_a_second_push_leaves_nothing_of_the_first(hub, trained, tmp_path):
    export_run(trained, tmp_path / "exported", published=Published(REPO))
    hub.repositories[REPO] = Repository(files={"skilltrain.json": b"{}", "model-00001-of-00002.safetensors": b"old"})
    found = push_model(tmp_path / "exported", Published(REPO))
    assert hub.repositories[REPO].files.keys() == found["files"].keys()


def test_a_public_repository_is_made_only_when_asked_for(hub, trained):
    hub.repositories[REPO] = Repository(private=False)
    with pytest.raises(SkilltrainError, match=r"our-team/sr-emb: the repository is public \(add --public"):
        push_model(trained, Published(REPO))
    assert hub.repositories[REPO].commits == 0
    push_model(trained, Published("our-team/open"), public=True)
    assert not hub.repositories["our-team/open"].private


def test_a_dry_run_shows_files_and_card_and_asks_no_server(hub, trained):
    outcome = skilltrain("push", trained, "--repo", REPO, "--dry-run")
    assert outcome.code == 0 and hub.log == [] and f"{REPO}: would be pushed; nothing was sent" in outcome.out
    size = (trained / "model.safetensors").stat().st_size
    assert f"model.safetensors: {size:,} bytes\n" in outcome.out and "## Limits" in outcome.out
    assert set(json.loads(skilltrain("push", trained, "--repo", REPO, "--dry-run", "--json").out)) == {
        "url",
        "files",
        "card",
    }


def half_written(run):
    (run / "tokenizer.json").unlink()


def unfinished(run):
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"finished": False}))


def secret_in_tokenizer(run):
    file = run / "tokenizer_config.json"
    key = "AKIA" + "QX7ZP2LMVT9RDK4W"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"note": key}))


def lacking_a_weight(run):
    weights = load_file(run / "model.safetensors")
    del weights["embeddings.LayerNorm.weight"]
    save_file(weights, run / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (half_written, r"tokenizer\.json: a file of the model is missing"),
        (unfinished, r"this training has not finished \(continue it with --resume"),
        (secret_in_tokenizer, r"tokenizer_config\.json: holds what looks like a secret: AKIAQX7Z… \(20 characters\)"),
        (lacking_a_weight, r"its weights do not fit its config\.json: 1 are missing"),
        (lambda run: shutil.rmtree(run), r"run/skilltrain\.json: no such file"),
    ],
    ids=["half-written", "unfinished", "secret", "weights", "nothing"],
)
def test_what_is_refused_before_anything_is_sent(hub, trained, damage, message):
    damage(trained)
    with pytest.raises(SkilltrainError, match=message):
        push_model(trained, Published(REPO))
    assert hub.log == []


def test_other_scores_in_plain_sentence_transformers_are_refused(tmp_path, open_encoder_of, open_reranker_of):
    encoder = open_encoder_of("bert", max_tokens=32, query_max_tokens=24)
    save_model(encoder, tmp_path / "encoder", base="b")
    check_round_trip(tmp_path / "encoder")
    pooling = tmp_path / "encoder" / "1_Pooling" / "config.json"
    pooling.write_text(pooling.read_text().replace('"pooling_mode": "mean"', '"pooling_mode": "cls"'))
    with pytest.raises(SkilltrainError, match=r"gives other scores: they differ by up to \d"):
        check_round_trip(tmp_path / "encoder")
    cosine = open_reranker_of("bert", template=RerankerTemplate(form="cosine_pair"))
    save_model(cosine, tmp_path / "cosine", base="b")
    with pytest.raises(SkilltrainError, match="plain sentence-transformers cannot open it"):
        check_round_trip(tmp_path / "cosine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token": "another"},
            r"cannot upload: .*Invalid credentials.* \(set HF_TOKEN to a token that may write there",
        ),
        ({"create": 403}, r"cannot upload: .*rights to create a model.* \(set HF_TOKEN to a token"),
        ({"files": {"pytorch_model.bin": b"x"}}, r"the repository is taken: it holds something else .*another --repo"),
        ({"offline": True}, r"cannot upload: .*offline"),
    ],
    ids=["token without rights", "namespace of others", "taken name", "offline"],
)
def test_what_the_hub_refuses_is_one_line(hub, trained, monkeypatch, change, message):
    monkeypatch.setenv("HF_TOKEN", change.get("token", TOKEN))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", change.get("offline", False))
    hub.status_of_create = change.get("create", 200)
    if "files" in change:
        hub.repositories[REPO] = Repository(files=change["files"])
    with pytest.raises(SkilltrainError, match=message):
        push_model(trained, Published(REPO))
    assert sum(one.commits for one in hub.repositories.values()) == 0
