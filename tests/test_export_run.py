"""Exporting a run: the finished model, or any checkpoint, with adapters merged; one clear line for every fault."""

import json
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from skilltrain.config import to_yaml
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published
from skilltrain.export.forms import open_model
from skilltrain.models.adapters import AdapterConfig
from skilltrain.models.encoder import EncoderConfig
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import Reranker, RerankerConfig
from skilltrain.records import Skill
from skilltrain.tables import SKILLS, rows_of, write_table
from skilltrain.templates import RerankerTemplate
from skilltrain.training.publish import check_round_trip, export_adapter, export_run, save_trained
from skilltrain.training.settings import TrainEncoderConfig, TrainRerankerConfig, load_model
from skilltrain.training.training_set import ListsSource

CPU = torch.device("cpu")
TEXTS = ["deploy pods", "", "review the commit and merge " * 20]
DATA = {"num_lists": 7, "num_steps": 4, "seconds": 1.5, "last_loss": 0.25, "checkpoint": "step-4"}
DEV = {"dev": {"MRR@10": {"mean": 0.5, "low": 0.25, "high": 0.75, "n": 8}}}


def config_of(folder, source, adapter=None, reranker=False):
    data = ListsSource(pool=folder / "pool", lists=folder / "lists")
    if reranker:
        model = RerankerConfig(source=str(source), max_tokens=400, query_max_tokens=100)
        return TrainRerankerConfig(stage="train_reranker", model=model, data=data, adapter=adapter, out=folder / "run")
    model = EncoderConfig(source=str(source), max_tokens=32, query_max_tokens=32)
    return TrainEncoderConfig(stage="train_encoder", model=model, data=data, adapter=adapter, out=folder / "run")


def add_checkpoint(config, step, best=0):
    """A checkpoint as training leaves it, its weights a little off the start; the model that holds them."""
    model = load_model(config, CPU).eval()
    torch.manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    folder = config.out / "checkpoints" / f"step-{step}"
    folder.mkdir(parents=True)
    seen = {value.data_ptr(): name for name, value in reversed(model.state_dict().items())}  # tied weights once
    weights = {f"model.{name}": model.state_dict()[name].contiguous() for name in seen.values()}
    save_file(weights, folder / "model.safetensors")
    position = {"step": step, "loss": 0.1, "best": {"step": best}}
    (folder / "state.json").write_text(json.dumps({"written_by": "whole models on cpu", "position": position}))
    return model


def write_run(config, finished, summary):
    config.out.mkdir(parents=True, exist_ok=True)
    (config.out / "recipe.yaml").write_text(to_yaml(config))
    record = {"skilltrain": "0", "recipe": {}, "inputs": {}, "finished": finished}
    (config.out / "run.json").write_text(json.dumps(record | ({"summary": summary} if finished else {})))


def assert_same_vectors(folder, encoder):
    plain = SentenceTransformer(str(folder), device="cpu")
    with torch.inference_mode():
        ours = encoder(encoder.tokenize(TEXTS, 32))
    assert torch.allclose(plain.encode(TEXTS, convert_to_tensor=True), ours, atol=1e-5)


@pytest.fixture
def unfinished(tmp_path, model_folders):
    """(settings, models by step) of a run with three checkpoints, the second of them the best."""
    config = config_of(tmp_path, model_folders["bert"])
    models = {step: add_checkpoint(config, step, best=4) for step in (2, 4, 10)}
    write_run(config, finished=False, summary={})
    return config, models


@pytest.mark.parametrize(("checkpoint", "step"), [(None, 10), ("step-2", 2), ("best", 4)])
def test_any_checkpoint_of_an_unfinished_run_becomes_a_model(tmp_path, unfinished, checkpoint, step):
    config, models = unfinished
    found = export_run(config.out, tmp_path / "out", checkpoint)
    assert found == {"out": str(tmp_path / "out"), "stage": "train_encoder", "checkpoint": f"step-{step}"}
    assert_same_vectors(tmp_path / "out", models[step])
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"checkpoint `step-{step}`" in card and "Not evaluated" in card
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize("name", ["bert", "qwen3", "bert_reranker", "qwen3_reranker"])
@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=2)], ids=["all weights", "LoRA"])
def test_what_was_trained_is_what_others_open(tmp_path, model_folders, name, adapter):
    """Also with an adapter, which is merged."""
    config = config_of(tmp_path, model_folders[name], adapter, "reranker" in name)
    model = add_checkpoint(config, 3)
    write_run(config, finished=False, summary={})
    export_run(config.out, tmp_path / "out")
    check_round_trip(tmp_path / "out")
    found, skill = open_model(tmp_path / "out"), Skill("s", "pods", "deploy pods", "to find the task")
    with torch.inference_mode():
        if isinstance(model, Reranker):
            ours, theirs = (one(one.tokenize("deploy", [skill])) for one in (model, found))
        else:
            ours, theirs = (one(one.tokenize(TEXTS, 32)) for one in (model, found))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["bert", "qwen3", "bert_reranker", "qwen3_reranker"])
def test_an_adapter_alone_is_read_by_peft(tmp_path, model_folders, name):
    config = config_of(tmp_path, model_folders[name], AdapterConfig(rank=2, dropout=0.1), "reranker" in name)
    model = add_checkpoint(config, 3)
    write_run(config, finished=False, summary={})
    assert export_adapter(config.out, tmp_path / "out")["checkpoint"] == "step-3"
    kind: Any = AutoModel
    if "reranker" in name:
        kind = AutoModelForCausalLM if "qwen3" in name else AutoModelForSequenceClassification
    peft = PeftModel.from_pretrained(kind.from_pretrained(model_folders[name]), str(tmp_path / "out")).eval()
    ids = torch.tensor([[2, 9, 30, 12, 3]])
    ours = model.network if isinstance(model, Reranker) else model.backbone
    with torch.inference_mode():
        torch.testing.assert_close(peft(input_ids=ids)[0], ours(input_ids=ids)[0], atol=1e-5, rtol=0)
    with pytest.raises(SkilltrainError, match="holds an adapter, not a model of its own"):
        resolve_model(str(tmp_path / "out"))


def test_a_run_without_an_adapter_has_none_to_export(tmp_path, unfinished):
    with pytest.raises(SkilltrainError, match=r"trained all weights, no adapter .export without --adapter"):
        export_adapter(unfinished[0].out, tmp_path / "out")


def test_a_finished_run_is_copied_without_its_logs(tmp_path, unfinished):
    config, models = unfinished
    save_trained(config, config.out / "checkpoints" / "step-4", config.out, DATA | DEV)
    write_run(config, finished=True, summary=DATA | DEV)
    (config.out / "train_log.jsonl").write_text("{}\n")
    (tmp_path / "out").mkdir()  # an empty folder is no obstacle
    assert export_run(config.out, tmp_path / "out")["checkpoint"] == "step-4"
    assert_same_vectors(tmp_path / "out", models[4])
    copied = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert copied.isdisjoint({"run.json", "recipe.yaml", "train_log.jsonl"}) and "1_Pooling/config.json" in copied
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (config.out / name).read_bytes()


def test_a_checkpoints_card_has_only_the_figures_that_are_its_own(tmp_path, unfinished):
    config, _ = unfinished
    write_run(config, finished=True, summary=DATA | DEV)
    export_run(config.out, tmp_path / "chosen", "step-4")
    export_run(config.out, tmp_path / "other", "step-2")
    chosen, other = ((tmp_path / name / "README.md").read_text() for name in ("chosen", "other"))
    assert "| MRR@10 | 0.500 | 0.250 to 0.750 | 8 |" in chosen and "last loss" in chosen
    assert "MRR@10 |" not in other and "last loss" not in other


@pytest.mark.parametrize("checkpoint", ["step-3", "../step-2"])
def test_an_unknown_checkpoint_is_refused(tmp_path, unfinished, checkpoint):
    with pytest.raises(SkilltrainError, match=rf"checkpoints: no checkpoint '{checkpoint}'; there are step-2, step-4"):
        export_run(unfinished[0].out, tmp_path / "out", checkpoint)
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_is_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"])
    with pytest.raises(SkilltrainError, match=r"nowhere: no such folder \(give the folder that a training wrote to"):
        export_run(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(SkilltrainError, match=r"holds no run: it has no run\.json"):
        export_run(model_folders["bert"], tmp_path / "out")
    write_run(config, finished=False, summary={})
    with pytest.raises(SkilltrainError, match=r"checkpoints: holds no checkpoint"):
        export_run(config.out, tmp_path / "out")
    (config.out / "recipe.yaml").write_text("stage: mine\n")
    with pytest.raises(SkilltrainError, match="is a run of stage mine, which trains no model"):
        export_run(config.out, tmp_path / "out")


def test_a_folder_that_holds_something_is_left_alone(tmp_path, unfinished):
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("kept")
    with pytest.raises(SkilltrainError, match=r"out: the output exists, and is no empty folder \(choose another --out"):
        export_run(unfinished[0].out, out)
    with pytest.raises(SkilltrainError, match=r"mine\.txt: the output exists, and is no empty folder"):
        export_run(unfinished[0].out, out / "mine.txt")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_weights_between_base_and_trained(tmp_path, unfinished, share):
    config, models = unfinished
    write_run(config, finished=True, summary=DATA | DEV)
    found = export_run(config.out, tmp_path / "out", interpolate=share)
    assert found["checkpoint"] == "step-4"  # what the run ended with
    base, trained = load_model(config, CPU).state_dict(), models[4].state_dict()
    mixed = load_model(config_of(tmp_path, tmp_path / "out"), CPU).state_dict()
    for name, value in mixed.items():
        assert torch.allclose(value, (1 - share) * base[name] + share * trained[name], atol=1e-6)
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{1 - share:g} x those of the base + {share:g} x those of its checkpoint `step-4` (WiSE-FT)" in card
    assert "MRR@10 |" not in card  # the run's figures are not these weights'
    assert json.loads((tmp_path / "out" / "skilltrain.json").read_text())["interpolate"] == share


def test_tied_weights_are_mixed_once(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["qwen3_reranker"], reranker=True)
    base, trained = load_model(config, CPU).direction(), add_checkpoint(config, 3).direction()
    write_run(config, finished=False, summary={})
    export_run(config.out, tmp_path / "out", interpolate=0.5)
    out = config.model.model_copy(update={"source": str(tmp_path / "out")})
    mixed = load_model(config.model_copy(update={"model": out}), CPU).direction()
    assert torch.allclose(mixed, (base + trained) / 2, atol=1e-6)


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_outside_0_to_1_is_refused(tmp_path, unfinished, share):
    with pytest.raises(SkilltrainError, match=rf"--interpolate: must be a share from 0 .* to 1 .*, found {share}"):
        export_run(unfinished[0].out, tmp_path / "out", interpolate=share)


def test_an_adapter_cannot_be_interpolated(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"], adapter=AdapterConfig(rank=2))
    add_checkpoint(config, 3)
    write_run(config, finished=False, summary={})
    with pytest.raises(SkilltrainError, match=r"run: trained an adapter \(LoRA\), and only runs that trained all"):
        export_run(config.out, tmp_path / "out", interpolate=0.5)


def test_a_base_of_another_architecture_or_shape_is_refused(tmp_path, model_folders):
    config = config_of(tmp_path, model_folders["bert"], reranker=True)  # a new head on an encoder
    config = config.model_copy(update={"model": config.model.model_copy(update={"template": RerankerTemplate()})})
    add_checkpoint(config, 3)
    write_run(config, finished=False, summary={})
    with pytest.raises(SkilltrainError, match=r"bert: its base has another architecture.*: its weights lack the head"):
        export_run(config.out, tmp_path / "out", interpolate=0.5)
    other = config_of(tmp_path, model_folders["qwen3"])
    write_run(other, finished=False, summary={})
    with pytest.raises(SkilltrainError, match=r"step-3: the checkpoint does not fit the recipe's model"):
        export_run(other.out, tmp_path / "out", interpolate=0.5)
    assert not (tmp_path / "out").exists()


MEANS = {"Hit@1": {"mean": 0.5125, "low": 0.4, "high": 0.62, "n": 40}}


def write_report(folder, source):
    """What `evaluate` leaves of two systems, the second with the encoder in `source`."""
    dense = {"name": "hybrid | ours", "rankers": [{"kind": "fuse", "of": [{"kind": "dense", "source": str(source)}]}]}
    folder.mkdir()
    systems = [{"name": "bm25", "rankers": [{"kind": "lexical"}]}, dense]
    (folder / "run.json").write_text(json.dumps({"recipe": {"systems": systems}}))
    rows = [{"name": system["name"], "metrics": MEANS} for system in systems]
    (folder / "metrics.json").write_text(json.dumps({"benchmark": "our requests", "systems": rows}))
    return folder


@pytest.fixture
def finished(tmp_path, model_folders):
    """Settings of a finished run, whose pool is half English, half Chinese and comes from the Hub."""
    config = config_of(tmp_path, model_folders["bert"])
    add_checkpoint(config, 4)
    write_run(config, finished=True, summary=DATA | DEV)
    save_trained(config, config.out / "checkpoints" / "step-4", config.out, DATA | DEV)
    skills = [Skill(f"s{n}", "name", "what", "how", lang="en" if n else "zh") for n in range(3)]
    write_table(rows_of(skills), SKILLS, config.data.pool)
    (config.data.pool / "run.json").write_text(json.dumps({"recipe": {"sources": ["hf:owner/skills:train", "own"]}}))
    return config


def test_the_card_of_an_export_can_be_published(tmp_path, finished):
    report = write_report(tmp_path / "report", finished.out)
    published = Published("our-team/sr-emb", "apache-2.0", [report])
    export_run(finished.out, tmp_path / "out", published=published)
    card = (tmp_path / "out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert (front["license"], front["language"], front["datasets"]) == ("apache-2.0", ["en", "zh"], ["owner/skills"])
    figures = {one["dataset"]["name"]: one["metrics"][0]["value"] for one in front["model-index"][0]["results"]}
    assert figures == {"development queries": 0.5, "our requests": 0.5125}
    assert 'SentenceTransformer("our-team/sr-emb")' in card and "--encoder our-team/sr-emb\n" in card
    assert '"."' not in card
    assert "On 40 queries of the benchmark “our requests”" in card and "| bm25 | 0.512 [0.40, 0.62] |" in card
    assert "| **hybrid \\| ours** | 0.512 [0.40, 0.62] |" in card
    assert "## Limits" in card.partition("our requests")[2]
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_results_are_of_the_model_that_is_exported(tmp_path, finished):
    other = Published(reports=[write_report(tmp_path / "report", tmp_path / "another")])
    with pytest.raises(SkilltrainError, match="no system of this report uses"):
        export_run(finished.out, tmp_path / "out", published=other)
    with pytest.raises(SkilltrainError, match="a report is of the model that the run ended with"):
        export_run(finished.out, tmp_path / "out", "step-4", published=other)
    with pytest.raises(SkilltrainError, match="write OWNER/NAME"):
        export_run(finished.out, tmp_path / "out", published=Published(repo="sr-emb"))
    assert not (tmp_path / "out").exists()
