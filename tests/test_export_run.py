"""Export of a run's model and checkpoints, and pushes of them to a Hub on loopback."""

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

from faults import raises
from hub_server import TOKEN, Repository, hub_server
from skilltrain.config import to_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published
from skilltrain.export.forms import open_model
from skilltrain.export.push import PushOptions, check_round_trip, upload
from skilltrain.formats import CHECKPOINT, RUN
from skilltrain.models.adapters import AdapterConfig
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import Reranker, RerankerConfig
from skilltrain.models.saving import copy_model, save_model
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, write_table
from skilltrain.training.export_run import export_run, push_model
from skilltrain.training.train import TrainEncoder, TrainReranker, load_model, save_trained
from skilltrain.training.training_set import ListsSource
from small_library import skilltrain, succeeds

CPU = torch.device("cpu")
REPO = "our-team/sr-emb"
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
    """Write a checkpoint as training does, with changed weights; return the model that has them."""
    model = load_model(config, CPU).eval()
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)

    folder = config.out / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    state = model.state_dict()
    name_by_address = {value.data_ptr(): name for name, value in reversed(state.items())}
    names = name_by_address.values()  # tied weights once
    weights = {f"model.{name}": state[name].contiguous() for name in names}
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


@pytest.fixture(scope="module")
def three_checkpoints(tmp_path_factory, model_folders):
    """Return the folder of three checkpoints, and models by step; step 4 is the best."""
    config = config_of(tmp_path_factory.mktemp("checkpoints"), model_folders["bert"])
    models = {step: add_checkpoint(config, step, best=4) for step in (2, 4, 10)}
    return config.out / "checkpoints", models


@pytest.fixture
def unfinished(tmp_path, model_folders, three_checkpoints):
    """Return settings, and models by step, of a run with three checkpoints; step 4 is the best."""
    folder, models = three_checkpoints
    config = config_of(tmp_path, model_folders["bert"])
    shutil.copytree(folder, config.out / "checkpoints")
    write_run(config, finished=False)
    return config, models


@pytest.fixture
def finished(unfinished):
    """Return the same of a finished run with its pool."""
    config, models = unfinished
    skills = [Skill(f"s{n}", "name", "what", "how") for n in range(3)]
    write_table(skills, SKILLS, config.data.pool)
    record = {"recipe": {"sources": ["hf:owner/skills:train", "own"]}}
    (config.data.pool / "run.json").write_text(json.dumps(record))
    write_run(config, finished=True)
    save_trained(config, config.out / "checkpoints" / "step-4", config.out, SUMMARY)
    (config.out / "train_log.jsonl").write_text("{}\n")
    return config, models


def assert_same_vectors(folder, encoder):
    plain = SentenceTransformer(str(folder), device="cpu")
    with torch.inference_mode():
        vectors = encoder(encoder.tokenize(TEXTS, 32))
    assert torch.allclose(plain.encode(TEXTS, convert_to_tensor=True), vectors, atol=1e-5)


def refuses(message, work, *arguments, **options):
    with pytest.raises(SkilltrainError, match=message):
        work(*arguments, **options)


def read_card(folder):
    return (folder / "README.md").read_text()


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# Export -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "step"), [(None, 10), ("step-2", 2), ("best", 4)])
def test_a_checkpoint_becomes_a_model(tmp_path, unfinished, checkpoint, step):
    config, models = unfinished

    outcome = export_run(config.out, tmp_path / "out", checkpoint)

    assert outcome == {
        "out": str(tmp_path / "out"),
        "stage": "train_encoder",
        "checkpoint": f"step-{step}",
    }
    assert_same_vectors(tmp_path / "out", models[step])

    card = read_card(tmp_path / "out")

    assert f"checkpoint `step-{step}`" in card
    assert "Not evaluated" in card
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_finished_run_is_copied(tmp_path, finished):
    config, models = finished
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is allowed

    outcome = export_run(config.out, out)

    assert outcome["checkpoint"] == "step-4"
    assert_same_vectors(out, models[4])

    names = files_in(out)

    assert names.isdisjoint({"run.json", "recipe.yaml", "train_log.jsonl"})
    assert "1_Pooling/config.json" in names
    for name in names:
        assert (out / name).read_bytes() == (config.out / name).read_bytes()


@pytest.mark.parametrize(
    ("checkpoint", "is_final"), [(None, True), ("step-4", True), ("step-2", False)]
)
def test_only_final_card_has_results(tmp_path, finished, checkpoint, is_final):
    config, _ = finished

    export_run(config.out, tmp_path / "out", checkpoint)

    card = read_card(tmp_path / "out")

    assert ("| MRR@10 | 0.500 | 0.250 to 0.750 | 8 |" in card) is is_final
    assert ("last loss" in card) is is_final


@pytest.fixture(params=["bert", "qwen3", "bert_reranker", "qwen3_reranker"])
def adapter_run(request, tmp_path, model_folders):
    """Return base model, settings and model of a run that trains an adapter."""
    base = model_folders[request.param]
    is_reranker = "reranker" in request.param
    config = config_of(tmp_path, base, is_reranker, adapter=AdapterConfig(rank=2, dropout=0.1))
    return base, config, add_checkpoint(config, 3)


def outputs_of(model):
    with torch.inference_mode():
        if isinstance(model, Reranker):
            skill = Skill("s", "pods", "deploy pods", "to find the task")
            return model(model.tokenize("deploy", [skill]))
        return model(model.tokenize(TEXTS, 32))


def test_an_adapter_is_merged(tmp_path, adapter_run):
    _, config, model = adapter_run

    export_run(config.out, tmp_path / "merged")

    check_round_trip(tmp_path / "merged")
    merged = open_model(tmp_path / "merged")

    torch.testing.assert_close(outputs_of(merged), outputs_of(model), atol=1e-5, rtol=0)


def test_an_adapter_opens_in_peft(tmp_path, adapter_run):
    base, config, model = adapter_run
    model_type: Any = AutoModel
    network = model.network if isinstance(model, Reranker) else model.backbone
    if isinstance(model, Reranker):
        is_yes_no = model.yes_no_ids is not None
        model_type = AutoModelForCausalLM if is_yes_no else AutoModelForSequenceClassification

    outcome = export_run(config.out, tmp_path / "adapter", adapter_only=True)

    assert outcome["checkpoint"] == "step-3"

    peft = PeftModel.from_pretrained(model_type.from_pretrained(base), str(tmp_path / "adapter"))
    ids = torch.tensor([[2, 9, 30, 12, 3]])
    with torch.inference_mode():
        output = peft.eval()(input_ids=ids)[0]
        torch.testing.assert_close(output, network(input_ids=ids)[0], atol=1e-5, rtol=0)


def test_adapter_folder_is_no_model(tmp_path, adapter_run):
    _, config, _ = adapter_run

    export_run(config.out, tmp_path / "adapter", adapter_only=True)

    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())

    assert settings["target_modules"] == sorted(settings["target_modules"])
    with raises("not-a-model"):
        resolve_model(str(tmp_path / "adapter"))


def write_report(folder, source):
    """Write the report of two systems, the second of which uses the encoder in `source`."""
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


def test_card_shows_publication(tmp_path, finished):
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
    assert f'SentenceTransformer("{REPO}")' in card
    assert f'--encoder "{REPO}"\n' in card
    assert '"."' not in card
    assert "| our requests | bm25 | Hit@1 | 0.512 | 0.400 to 0.620 | 40 |" in card
    assert "| our requests | **hybrid \\| ours** | Hit@1 | 0.512 | 0.400 to 0.620 | 40 |" in card


def test_commands_pass_base_model_to_card(tmp_path, finished):
    run = finished[0].out

    succeeds("export", run, "--out", tmp_path / "out", "--base-model", "owner/base")

    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["base_model"] == "owner/base"
    assert "| architecture | BertModel, " in card


def test_dry_run_names_the_right_license(finished):
    arguments = ("--repo", REPO, "--license", "Apache 2.0", "--dry-run")

    outcome = skilltrain("push", finished[0].out, *arguments)

    assert outcome.code == 2
    assert "Apache 2.0: is no licence id of the Hub (the nearest id is apache-2.0;" in (
        outcome.error_line
    )


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
def test_an_impossible_export_is_refused(tmp_path, finished, arguments, message):
    run = finished[0].out
    if "reports" in arguments:
        report = write_report(tmp_path / "report", tmp_path / arguments["reports"])
        published = Published(reports=[report])
        arguments = {"published": published, "checkpoint": arguments.get("checkpoint")}

    refuses(message, export_run, run, tmp_path / "out", **arguments)

    assert not (tmp_path / "out").exists()


def test_other_folders_are_no_runs(tmp_path, model_folders):
    with raises("no-run"):
        export_run(tmp_path / "nowhere", tmp_path / "out")
    with raises("no-run"):
        export_run(model_folders["bert"], tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_run_without_checkpoint_is_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"])
    write_run(config, finished=False)

    with raises("no-checkpoint"):
        export_run(config.out, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_run_without_adapter_is_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"])
    write_run(config, finished=False)

    with raises("conflicting-settings"):
        export_run(config.out, tmp_path / "out", adapter_only=True)

    assert not (tmp_path / "out").exists()


def test_run_of_another_stage_is_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"])
    write_run(config, finished=False)
    (config.out / "recipe.yaml").write_text("stage: mine\n")

    with raises("wrong-stage"):
        export_run(config.out, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_weights_of_another_model_are_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"])
    add_checkpoint(config, 3)
    write_run(config_of(tmp_path, model_folders["qwen3"]), finished=False)

    with raises("changed-model"):
        export_run(config.out, tmp_path / "out")

    assert not (tmp_path / "out").exists()


def test_removed_names_say_their_replacement(tmp_path):
    for arguments, advice in (
        (("--interpolate", "0.7"), "No such option: --interpolate (removed: choose a checkpoint"),
        (("--form", "openvino"), "(removed: use onnx)"),
    ):
        outcome = skilltrain("export", tmp_path, "--out", tmp_path / "out", *arguments)

        assert outcome.code == 2
        assert advice in outcome.error_line


@pytest.mark.parametrize("text", ["{}", "[1]", '{"files": 5}'])
def test_model_without_list_of_files_is_refused(tmp_path, text):
    (tmp_path / "skilltrain.json").write_text(text)

    with raises("not-a-model"):
        copy_model(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("name", ["out", "out/mine.txt"])
def test_existing_files_are_not_overwritten(tmp_path, unfinished, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("kept")

    with raises("output-exists"):
        export_run(unfinished[0].out, tmp_path / name)

    assert files_in(tmp_path / "out") == {"mine.txt"}
    assert not (tmp_path / ".out.partial").exists()


# Push ---------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Start a Hub. The environment has its token."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_server() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        yield running


def test_push_uploads_whole_model(hub, finished):
    run = finished[0].out

    outcome = push_model(run, Published(REPO))

    repository = hub.repositories[REPO]

    assert repository.private
    assert repository.commits == 1
    assert outcome["url"].endswith(REPO)

    sizes = {name: len(content) for name, content in repository.files.items()}

    assert sizes == outcome["files"]
    for name in ("model.safetensors", "1_Pooling/config.json", "tokenizer.json"):
        assert repository.files[name] == (run / name).read_bytes()


def test_a_push_uploads_no_logs(hub, finished):
    push_model(finished[0].out, Published(REPO))

    names = hub.repositories[REPO].files.keys()

    assert names.isdisjoint({"run.json", "recipe.yaml"})
    assert not any("checkpoints" in name for name in names)


def test_pushed_card_names_repository(hub, finished):
    outcome = push_model(finished[0].out, Published(REPO, "apache-2.0"))

    card = hub.repositories[REPO].files["README.md"].decode()

    assert card == outcome["card"]
    assert f'SentenceTransformer("{REPO}")' in card
    assert "license: apache-2.0" in card


def test_a_push_deletes_older_files(hub, finished, tmp_path):
    exported = tmp_path / "exported"
    export_run(finished[0].out, exported, published=Published(REPO), form="multi_vector")
    old_files = {"skilltrain.json": b"{}", "model-00001-of-00002.safetensors": b"old"}
    hub.repositories[REPO] = Repository(files=old_files)

    outcome = push_model(exported, Published(REPO))

    assert hub.repositories[REPO].files.keys() == outcome["files"].keys()
    assert "MultiVectorEncoder(" in outcome["card"]


def test_export_has_its_form_already(hub, finished, tmp_path):
    export_run(finished[0].out, tmp_path / "exported")

    with raises("conflicting-settings"):
        push_model(tmp_path / "exported", Published(REPO), form="onnx")


def test_a_refused_commit_changes_nothing(hub, tmp_path):
    # upload_folder would put so many files into several commits.
    paths = {f"part_{number}.json": tmp_path / f"part_{number}.json" for number in range(30)}
    for path in paths.values():
        path.write_text("{}")
    old_files = {"skilltrain.json": b"{}", "model.safetensors": b"old"}
    hub.repositories[REPO] = Repository(files=dict(old_files))
    hub.status_of_commit = 400

    with raises("upload-failed"):
        upload(paths, REPO, PushOptions())

    assert hub.repositories[REPO].files == old_files
    assert sum("/commit/" in line for line in hub.log) == 1


def test_public_repository_needs_flag(hub, finished):
    hub.repositories[REPO] = Repository(private=False)

    with raises("repository-visibility"):
        push_model(finished[0].out, Published(REPO))

    assert hub.repositories[REPO].commits == 0


def test_flag_creates_public_repository(hub, finished):
    push_model(finished[0].out, Published(REPO), options=PushOptions(public=True))

    assert not hub.repositories[REPO].private


def test_private_repository_is_not_published(hub, finished):
    hub.repositories[REPO] = Repository(private=True)

    with raises("repository-visibility"):
        push_model(finished[0].out, Published(REPO), options=PushOptions(public=True))

    assert hub.repositories[REPO].commits == 0


README_ONLY = {"README.md": b"mine", ".gitattributes": b"*.bin"}


def test_repository_with_readme_is_kept(hub, finished):
    hub.repositories[REPO] = Repository(files=dict(README_ONLY))

    with raises("repository-taken"):
        push_model(finished[0].out, Published(REPO))

    assert hub.repositories[REPO].files["README.md"] == b"mine"


def test_a_flag_replaces_the_readme(hub, finished):
    hub.repositories[REPO] = Repository(files=dict(README_ONLY))

    outcome = push_model(finished[0].out, Published(REPO), options=PushOptions(into_existing=True))

    files = hub.repositories[REPO].files

    assert files["README.md"].decode() == outcome["card"]
    assert files[".gitattributes"] == b"*.bin"
    assert "model.safetensors" in files


def test_empty_repository_needs_no_flag(hub, finished):
    # A push whose commit failed leaves one behind.
    hub.repositories[REPO] = Repository(files={".gitattributes": b""})

    push_model(finished[0].out, Published(REPO))

    assert hub.repositories[REPO].commits == 1


def test_pushed_export_names_repository(hub, finished, tmp_path):
    export_run(finished[0].out, tmp_path / "exported")

    card = push_model(tmp_path / "exported", Published(REPO))["card"]

    assert f'SentenceTransformer("{REPO}")' in card
    assert f'--encoder "{REPO}"' in card
    assert '"."' not in card


@pytest.mark.parametrize("path", ["/api/models/", "/api/repos/create", "/preupload/", "/commit/"])
def test_silent_hub_ends_push(hub, finished, monkeypatch, path):
    monkeypatch.setattr("skilltrain.export.push._HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    hub.path_without_answer = path

    with raises("upload-failed"):
        push_model(finished[0].out, Published(REPO))


@pytest.mark.parametrize("status", [400, 401, 403])
def test_an_echoed_token_is_masked(hub, finished, capfd, status):
    hub.status_of_create = status

    outcome = skilltrain("push", finished[0].out, "--repo", REPO)

    assert outcome.code == 2
    assert "Bearer [key]" in outcome.error_line
    assert TOKEN not in outcome.out + outcome.err + "".join(capfd.readouterr())


def test_echoed_login_token_is_masked(hub, finished, monkeypatch, tmp_path):
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN")
    hub.status_of_create = 403

    with pytest.raises(SkilltrainError, match=r"Bearer \[key\]") as caught:
        push_model(finished[0].out, Published(REPO))

    assert TOKEN not in "".join(traceback.format_exception(caught.value))  # as --debug shows it


def test_dry_run_checks_name(hub, finished):
    outcome = skilltrain("push", finished[0].out, "--repo", "owner/x..y", "--dry-run")

    assert outcome.code == 2
    assert "owner/x..y: is no name of a model on the Hub" in outcome.error_line


def test_dry_run_of_push_shows_files(hub, finished):
    run = finished[0].out

    printed = succeeds("push", run, "--repo", REPO, "--dry-run").out

    size = (run / "model.safetensors").stat().st_size

    assert f"{REPO}: would be pushed; nothing was sent" in printed
    assert f"model.safetensors: {size:,} bytes\n" in printed
    assert "## Limits" in printed
    assert hub.log == []


def test_dry_run_of_push_prints_json(hub, finished):
    printed = skilltrain("push", finished[0].out, "--repo", REPO, "--dry-run", "--json").out

    assert set(json.loads(printed)) == {"url", "files", "card"}
    assert hub.log == []


def add_note(text):
    def change(run):
        file = run / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"note": text}))

    return change


def remove_a_weight(run):
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
        (
            add_note("aws_secret_access_key = k7Qz/9vTbX2m+LpR4" + "wNcY8sJdF3hGa6ZuE1tVoBi"),
            r"holds what looks like a secret: k7Qz/9vT… \(40 characters\)",
        ),
        (
            add_note("https://host.dev/v1?api_key=q8Zt3LmX7" + "vKw2RbY"),
            r"holds what looks like a secret: q8Zt3LmX… \(16 characters\)",
        ),
        (
            add_note("https://q8Zt3LmX7" + "vKw2RbY@host.dev/v1"),
            r"holds what looks like a secret: q8Zt3LmX… \(16 characters\)",
        ),
        (remove_a_weight, r"its weights do not fit its config\.json: 1 are missing"),
        (shutil.rmtree, r"run: no such folder"),
        (
            lambda run: (run / "config.json").unlink(),
            r"run: holds no model to push: no config\.json",
        ),
    ],
)
def test_broken_model_is_not_sent(hub, finished, damage, message):
    damage(finished[0].out)

    refuses(message, push_model, finished[0].out, Published(REPO))

    assert hub.log == []


def test_other_scores_in_plain_sentence_transformers_are_refused(tmp_path, open_encoder_of):
    folder = tmp_path / "encoder"
    save_model(open_encoder_of("bert", max_tokens=32, query_max_tokens=24), folder, base="b")
    check_round_trip(folder)
    pooling = folder / "1_Pooling" / "config.json"
    text = pooling.read_text()

    pooling.write_text(text.replace('"pooling_mode": "mean"', '"pooling_mode": "cls"'))

    with raises("not-portable"):
        check_round_trip(folder)


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
def test_fault_of_hub_is_named(hub, finished, monkeypatch, change, message):
    monkeypatch.setenv("HF_TOKEN", change.get("token", TOKEN))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", change.get("offline", False))
    hub.status_of_create = change.get("create", 200)
    if "files" in change:
        hub.repositories[REPO] = Repository(files=change["files"])

    refuses(message, push_model, finished[0].out, Published(REPO))

    assert sum(repository.commits for repository in hub.repositories.values()) == 0
