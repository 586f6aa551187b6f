"""A run's model or any of its checkpoints as a folder, and pushed to a Hub on loopback: one clear line for every fault.

What arrives is whole, opens elsewhere with the same scores, and tells only figures that are its own.
"""

import json
import shutil
import traceback
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import constants
from peft import PeftModel
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from hub_server import TOKEN, Repository, hub_server
from skilltrain.config import to_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published
from skilltrain.export.forms import open_model
from skilltrain.export.push import check_round_trip, upload
from skilltrain.formats import CHECKPOINT, RUN
from skilltrain.models.adapters import AdapterConfig
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import Reranker, RerankerConfig
from skilltrain.models.saving import save_model
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, write_table
from skilltrain.training.export_run import export_run, push_model
from skilltrain.training.train import TrainEncoder, TrainReranker, load_model, save_trained
from skilltrain.training.training_set import ListsSource
from small_library import skilltrain, succeeds

CPU, REPO = torch.device("cpu"), "our-team/sr-emb"
TEXTS = ["deploy pods", "", "review the commit and merge " * 20]
SUMMARY = {
    "num_lists": 7,
    "num_steps": 4,
    "seconds": 1.5,
    "last_loss": 0.25,
    "checkpoint": "step-4",
    "dev": {"MRR@10": {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}},
}


def config_of(folder, source, reranker=False, **more):
    more |= {
        "data": ListsSource(pool=folder / "pool", lists=folder / "lists"),
        "out": folder / "run",
    }
    if reranker:
        model = RerankerConfig(
            source=str(source), max_tokens=400, query_max_tokens=100, **more.pop("model", {})
        )
        return TrainReranker(stage="train_reranker", model=model, **more)
    model = EncoderConfig(source=str(source), max_tokens=32, query_max_tokens=32)
    return TrainEncoder(stage="train_encoder", model=model, **more)


def add_checkpoint(config, step, best=0) -> Any:
    """A checkpoint of a run as training leaves it, its weights a little off the start; the model that holds them."""
    model = load_model(config, CPU).eval()
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = config.out / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    seen = {
        value.data_ptr(): name for name, value in reversed(model.state_dict().items())
    }  # tied weights once
    weights = {f"model.{name}": model.state_dict()[name].contiguous() for name in seen.values()}
    save_file(weights, folder / "model.safetensors")
    position = {"step": step, "loss": 0.1, "best": {"step": best}}
    state = {"format": CHECKPOINT.number, "written_by": "whole models on cpu", "position": position}
    (folder / "state.json").write_text(json.dumps(state))
    write_run(config, finished=False)
    return model


def write_run(config, finished):
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "recipe.yaml").write_text(to_yaml(config))
    record = {
        "format": RUN.number,
        "recipe": {},
        "inputs": {},
        "finished": finished,
        "summary": SUMMARY,
    }
    (config.out / "run.json").write_text(json.dumps(record))


@pytest.fixture
def unfinished(tmp_path, model_folders):
    """(settings, models by step) of a run with three checkpoints, the second of them the best."""
    config = config_of(tmp_path, model_folders["bert"])
    return config, {step: add_checkpoint(config, step, best=4) for step in (2, 4, 10)}


@pytest.fixture
def finished(unfinished):
    """The same of a finished run, whose pool is half English, half Chinese and comes from the Hub."""
    config, models = unfinished
    skills = [Skill(f"s{n}", "name", "what", "how", lang="en" if n else "zh") for n in range(3)]
    write_table(skills, SKILLS, config.data.pool)
    (config.data.pool / "run.json").write_text(
        json.dumps({"recipe": {"sources": ["hf:owner/skills:train", "own"]}})
    )
    write_run(config, finished=True)
    save_trained(config, config.out / "checkpoints" / "step-4", config.out, SUMMARY)
    (config.out / "train_log.jsonl").write_text("{}\n")
    return config, models


def assert_same_vectors(folder, encoder):
    plain = SentenceTransformer(str(folder), device="cpu")
    with torch.inference_mode():
        ours = encoder(encoder.tokenize(TEXTS, 32))
    assert torch.allclose(plain.encode(TEXTS, convert_to_tensor=True), ours, atol=1e-5)


def refuses(message, work, *given, **named):
    with pytest.raises(SkilltrainError, match=message):
        work(*given, **named)


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Export --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "step"), [(None, 10), ("step-2", 2), ("best", 4)])
def test_any_checkpoint_of_an_unfinished_run_becomes_a_model(
    tmp_path, unfinished, checkpoint, step
):
    config, models = unfinished
    found = export_run(config.out, tmp_path / "out", checkpoint)
    assert found == {
        "out": str(tmp_path / "out"),
        "stage": "train_encoder",
        "checkpoint": f"step-{step}",
    }
    assert_same_vectors(tmp_path / "out", models[step])
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"checkpoint `step-{step}`" in card and "Not evaluated" in card
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_finished_run_is_copied_without_its_logs_and_only_its_own_card_has_its_figures(
    tmp_path, finished
):
    config, models = finished
    (tmp_path / "out").mkdir()  # an empty folder is no obstacle
    assert export_run(config.out, tmp_path / "out")["checkpoint"] == "step-4"
    assert_same_vectors(tmp_path / "out", models[4])
    copied = files_in(tmp_path / "out")
    assert (
        copied.isdisjoint({"run.json", "recipe.yaml", "train_log.jsonl"})
        and "1_Pooling/config.json" in copied
    )
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (config.out / name).read_bytes()
    export_run(config.out, tmp_path / "chosen", "step-4")
    export_run(config.out, tmp_path / "other", "step-2")
    cards = [(tmp_path / name / "README.md").read_text() for name in ("out", "chosen", "other")]
    figures = ("| MRR@10 | 0.500 | 0.250 to 0.750 | 8 |", "last loss")
    assert [[figure in card for figure in figures] for card in cards] == [
        [True, True],
        [True, True],
        [False, False],
    ]


@pytest.mark.parametrize("name", ["bert", "qwen3", "bert_reranker", "qwen3_reranker"])
def test_an_adapter_is_merged_or_read_by_peft(tmp_path, model_folders, name):
    config = config_of(
        tmp_path,
        model_folders[name],
        "reranker" in name,
        adapter=AdapterConfig(rank=2, dropout=0.1),
    )
    model, skill = add_checkpoint(config, 3), Skill("s", "pods", "deploy pods", "to find the task")
    export_run(config.out, tmp_path / "merged")
    check_round_trip(tmp_path / "merged")
    with torch.inference_mode():
        ours, theirs = (
            one(
                one.tokenize("deploy", [skill])
                if isinstance(one, Reranker)
                else one.tokenize(TEXTS, 32)
            )
            for one in (model, open_model(tmp_path / "merged"))
        )
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)

    summary = export_run(config.out, tmp_path / "adapter", adapter_only=True)
    assert summary["checkpoint"] == "step-3"
    targets = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())[
        "target_modules"
    ]
    assert targets == sorted(targets)
    kind: Any = AutoModel
    if "reranker" in name:
        kind = AutoModelForCausalLM if "qwen3" in name else AutoModelForSequenceClassification
    peft = PeftModel.from_pretrained(
        kind.from_pretrained(model_folders[name]), str(tmp_path / "adapter")
    ).eval()
    ids, network = (
        torch.tensor([[2, 9, 30, 12, 3]]),
        model.network if "reranker" in name else model.backbone,
    )
    with torch.inference_mode():
        torch.testing.assert_close(
            peft(input_ids=ids)[0], network(input_ids=ids)[0], atol=1e-5, rtol=0
        )
    refuses("holds an adapter, not a model of its own", resolve_model, str(tmp_path / "adapter"))


def write_report(folder, source):
    """What `evaluate` leaves of two systems, the second with the encoder in `source`."""
    dense = {
        "name": "hybrid | ours",
        "rankers": [{"kind": "fuse", "of": [{"kind": "dense", "source": str(source)}]}],
    }
    folder.mkdir()
    systems = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}, dense]
    inputs = {"systems.1.rankers.0.of.0.source": "sha256"}
    (folder / "run.json").write_text(json.dumps({"recipe": {"systems": systems}, "inputs": inputs}))
    means = {"Hit@1": {"mean": 0.5125, "low": 0.4, "high": 0.62, "n": 40}}
    rows = [{"name": system["name"], "metrics": means} for system in systems]
    (folder / "metrics.json").write_text(json.dumps({"benchmark": "our requests", "systems": rows}))
    return folder


def test_card_shows_licence_repository_and_reports(tmp_path, finished):
    run = finished[0].out
    published = Published(REPO, "apache-2.0", [write_report(tmp_path / "report", run)])

    export_run(run, tmp_path / "out", published=published)

    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front["license"] == "apache-2.0"
    values = {
        result["dataset"]["name"]: result["metrics"][0]["value"]
        for result in front["model-index"][0]["results"]
    }
    assert values == {"development queries": 0.5, "our requests": 0.5125}
    assert f'SentenceTransformer("{REPO}")' in card and f'--encoder "{REPO}"\n' in card
    assert '"."' not in card
    assert "| our requests | bm25 | Hit@1 | 0.512 | 0.400 to 0.620 | 40 |" in card
    assert "| our requests | **hybrid \\| ours** | Hit@1 | 0.512 | 0.400 to 0.620 | 40 |" in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(
            (
                {"checkpoint": name},
                rf"checkpoints: no checkpoint '{name}'; there are step-2, step-4",
            )
            for name in ("step-3", "../step-2")
        ),
        ({"reports": "another"}, "no system of this report uses"),
        (
            {"reports": "run", "checkpoint": "step-4"},
            "a report is about the final model of a finished run",
        ),
    ],
)
def test_what_a_run_cannot_give_is_refused(tmp_path, finished, arguments, message):
    run = finished[0].out
    if source := arguments.get("reports"):
        report = write_report(tmp_path / "report", tmp_path / source)
        arguments = {
            "published": Published(reports=[report]),
            "checkpoint": arguments.get("checkpoint"),
        }
    refuses(message, export_run, run, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_of_this_kind_is_refused(tmp_path, model_folders):
    config, out = config_of(tmp_path, model_folders["bert"]), tmp_path / "out"
    refuses(
        r"nowhere: holds no training run: no run\.json \(give the folder that a training wrote to",
        export_run,
        tmp_path / "nowhere",
        out,
    )
    refuses(r"holds no training run: no run\.json", export_run, model_folders["bert"], out)
    write_run(config, finished=False)
    refuses(r"checkpoints: holds no checkpoint", export_run, config.out, out)
    refuses(
        r"trained all weights, no adapter .export without --adapter",
        export_run,
        config.out,
        out,
        adapter_only=True,
    )
    (config.out / "recipe.yaml").write_text("stage: mine\n")
    refuses("is a run of stage mine, which trains no model", export_run, config.out, out)
    config = config_of(tmp_path, model_folders["bert"])
    add_checkpoint(config, 3)
    write_run(config_of(tmp_path, model_folders["qwen3"]), finished=False)
    refuses(r"step-3: the checkpoint does not fit the recipe's model", export_run, config.out, out)
    assert not out.exists()


def test_removed_names_say_their_replacement(tmp_path):
    for arguments, advice in (
        (("--interpolate", "0.7"), "No such option: --interpolate (removed: choose a checkpoint"),
        (("--form", "openvino"), "(removed: use onnx)"),
    ):
        outcome = skilltrain("export", tmp_path, "--out", tmp_path / "out", *arguments)

        assert outcome.code == 2 and advice in outcome.error_line


def test_a_folder_that_holds_something_is_left_alone(tmp_path, unfinished):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")
    for name in ("out", "out/mine.txt"):
        with pytest.raises(SkilltrainError, match=rf"{name}: exists, and is no empty folder"):
            export_run(unfinished[0].out, tmp_path / name)
    assert files_in(tmp_path / "out") == {"mine.txt"} and not (tmp_path / ".out.partial").exists()


# Push ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """A Hub whose token the environment holds."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def test_a_model_arrives_whole_in_a_private_repository(hub, finished):
    run = finished[0].out
    found = push_model(run, Published(REPO, "apache-2.0"))
    repository = hub.repositories[REPO]
    assert repository.private and repository.commits == 1 and found["url"].endswith(REPO)
    assert {name: len(content) for name, content in repository.files.items()} == found["files"]
    for name in ("model.safetensors", "1_Pooling/config.json", "tokenizer.json"):
        assert repository.files[name] == (run / name).read_bytes()
    card = repository.files["README.md"].decode()
    assert (
        card == found["card"]
        and f'SentenceTransformer("{REPO}")' in card
        and "license: apache-2.0" in card
    )
    assert not any(
        "checkpoints" in name or name in ("run.json", "recipe.yaml") for name in repository.files
    )


def test_a_second_push_leaves_nothing_of_the_first(hub, finished, tmp_path):
    export_run(
        finished[0].out, tmp_path / "exported", published=Published(REPO), form="multi_vector"
    )
    hub.repositories[REPO] = Repository(
        files={"skilltrain.json": b"{}", "model-00001-of-00002.safetensors": b"old"}
    )
    found = push_model(tmp_path / "exported", Published(REPO))
    assert (
        hub.repositories[REPO].files.keys() == found["files"].keys()
        and "MultiVectorEncoder(" in found["card"]
    )
    refuses("is pushed as it is", push_model, tmp_path / "exported", Published(REPO), form="onnx")


def test_a_refused_commit_leaves_the_repository_as_it_was(hub, tmp_path):
    """With more files than the Hub's own upload of a folder puts into a commit."""
    names = [f"part_{number}.json" for number in range(30)]
    for name in names:
        (tmp_path / name).write_text("{}")
    old = {"skilltrain.json": b"{}", "model.safetensors": b"old"}
    hub.repositories[REPO], hub.status_of_commit = Repository(files=dict(old)), 400
    paths = {name: tmp_path / name for name in names}
    refuses("nothing is half-written", upload, paths, REPO, False, False)
    assert hub.repositories[REPO].files == old and sum("/commit/" in line for line in hub.log) == 1


def test_a_public_repository_is_written_only_when_asked_for(hub, finished):
    hub.repositories[REPO] = Repository(private=False)
    refuses(
        r"our-team/sr-emb: the repository is public \(add --public",
        push_model,
        finished[0].out,
        Published(REPO),
    )
    assert hub.repositories[REPO].commits == 0
    push_model(finished[0].out, Published("our-team/open"), public=True)
    assert not hub.repositories["our-team/open"].private


def test_a_private_repository_is_not_published(hub, finished):
    hub.repositories[REPO] = Repository(private=True)

    refuses(
        r"our-team/sr-emb: the repository is private, and stays so \(make it public on its page",
        push_model,
        finished[0].out,
        Published(REPO),
        public=True,
    )

    assert hub.repositories[REPO].commits == 0


def test_a_repository_with_a_readme_is_replaced_with_a_flag(hub, finished):
    hub.repositories[REPO] = Repository(files={"README.md": b"mine", ".gitattributes": b"*.bin"})
    refuses(
        r"exists and holds a README\.md \(add --into-existing",
        push_model,
        finished[0].out,
        Published(REPO),
    )
    assert hub.repositories[REPO].files["README.md"] == b"mine"

    outcome = push_model(finished[0].out, Published(REPO), into_existing=True)

    files = hub.repositories[REPO].files
    assert files["README.md"].decode() == outcome["card"]
    assert files[".gitattributes"] == b"*.bin" and "model.safetensors" in files


def test_an_empty_repository_needs_no_flag(hub, finished):
    """A push whose commit failed leaves one behind."""
    hub.repositories[REPO] = Repository(files={".gitattributes": b""})

    push_model(finished[0].out, Published(REPO))

    assert hub.repositories[REPO].commits == 1


def test_a_pushed_export_names_the_repository(hub, finished, tmp_path):
    export_run(finished[0].out, tmp_path / "exported")

    card = push_model(tmp_path / "exported", Published(REPO))["card"]

    assert f'SentenceTransformer("{REPO}")' in card and f'--encoder "{REPO}"' in card
    assert '"."' not in card


@pytest.mark.parametrize("path", ["/api/models/", "/api/repos/create", "/preupload/", "/commit/"])
def test_a_silent_hub_ends_the_push(hub, finished, monkeypatch, path):
    monkeypatch.setattr("skilltrain.export.push._HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.path_without_answer = path

    refuses(r"cannot upload: .*timed out", push_model, finished[0].out, Published(REPO))


@pytest.mark.parametrize("status", [400, 401, 403])
def test_an_echoed_token_is_masked(hub, finished, capfd, status):
    hub.status_of_create = status

    outcome = skilltrain("push", finished[0].out, "--repo", REPO)

    assert outcome.code == 2 and "Bearer [key]" in outcome.error_line
    assert TOKEN not in outcome.out + outcome.err + "".join(capfd.readouterr())


def test_an_echoed_token_of_hf_auth_login_is_masked(hub, finished, monkeypatch, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN")
    hub.status_of_create = 403

    with pytest.raises(SkilltrainError, match=r"Bearer \[key\]") as caught:
        push_model(finished[0].out, Published(REPO))

    assert TOKEN not in "".join(traceback.format_exception(caught.value))  # as --debug shows it


def test_a_name_that_the_hub_refuses_ends_the_dry_run(hub, finished):
    outcome = skilltrain("push", finished[0].out, "--repo", "owner/x..y", "--dry-run")

    assert (
        outcome.code == 2 and "owner/x..y: is no name of a model on the Hub" in outcome.error_line
    )


def test_a_dry_run_shows_files_and_card_and_asks_no_server(hub, finished):
    command = ("push", finished[0].out, "--repo", REPO, "--dry-run")
    shown, size = succeeds(*command).out, (finished[0].out / "model.safetensors").stat().st_size
    assert f"{REPO}: would be pushed; nothing was sent" in shown
    assert f"model.safetensors: {size:,} bytes\n" in shown and "## Limits" in shown
    assert (
        set(json.loads(skilltrain(*command, "--json").out)) == {"url", "files", "card"}
        and hub.log == []
    )


def add_note(text):
    def change(run):
        file = run / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"note": text}))

    return change


def take_a_weight(run):
    weights = load_file(run / "model.safetensors")
    del weights["embeddings.LayerNorm.weight"]
    save_file(weights, run / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda run: (run / "tokenizer.json").unlink(),
            r"tokenizer\.json: a file of the model is missing",
        ),
        (
            lambda run: (run / "run.json").write_text('{"finished": false}'),
            r"has not finished \(continue",
        ),
        (
            add_note("AKIA" + "QX7ZP2LMVT9RDK4W"),
            r"tokenizer_config\.json: holds what looks like a secret: AKIAQX7Z… \(20 characters\)",
        ),
        (
            add_note("https://ada:open" + "sesame@host/x"),
            r"tokenizer_config\.json: holds what looks like a secret: https://… \(",
        ),
        (take_a_weight, r"its weights do not fit its config\.json: 1 are missing"),
        (shutil.rmtree, r"run: holds no model to push: no skilltrain\.json"),
        (
            lambda run: (run / "config.json").unlink(),
            r"run: holds no model to push: no config\.json",
        ),
    ],
)
def test_what_is_refused_before_anything_is_sent(hub, finished, damage, message):
    damage(finished[0].out)
    refuses(message, push_model, finished[0].out, Published(REPO))
    assert hub.log == []


def test_other_scores_in_plain_sentence_transformers_are_refused(tmp_path, open_encoder_of):
    save_model(
        open_encoder_of("bert", max_tokens=32, query_max_tokens=24), tmp_path / "encoder", base="b"
    )
    check_round_trip(tmp_path / "encoder")
    pooling = tmp_path / "encoder" / "1_Pooling" / "config.json"
    pooling.write_text(
        pooling.read_text().replace('"pooling_mode": "mean"', '"pooling_mode": "cls"')
    )
    refuses(r"gives other scores in .*: they differ by \d", check_round_trip, tmp_path / "encoder")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"token": "another"},
            r"cannot upload: .*Invalid credentials.* \(HF_TOKEN must be a token that may write",
        ),
        (
            {"create": 403},
            r"cannot upload: .*rights to create a model.* \(HF_TOKEN must be a token",
        ),
        (
            {"files": {"pytorch_model.bin": b"x", "README.md": b"x"}},
            r"the repository is taken: it holds something else .*another --repo",
        ),
        ({"offline": True}, r"cannot upload: .*offline"),
    ],
)
def test_what_the_hub_refuses_is_one_line(hub, finished, monkeypatch, change, message):
    monkeypatch.setenv("HF_TOKEN", change.get("token", TOKEN))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", change.get("offline", False))
    hub.status_of_create = change.get("create", 200)
    if "files" in change:
        hub.repositories[REPO] = Repository(files=change["files"])
    refuses(message, push_model, finished[0].out, Published(REPO))
    assert sum(one.commits for one in hub.repositories.values()) == 0
