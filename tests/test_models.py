"""Encoders and rerankers compute what plain transformers code does.

Models are BERT, its relatives and Qwen3. The relatives differ in positions, segments and poolers.
"""

import json
import shutil

import pytest
import torch
import transformers
from transformers import AutoModel, AutoModelForSequenceClassification

from faults import raises
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import CHECKPOINT_FILE, num_positions
from skilltrain.models.reranker import RerankerConfig, RerankerSettings, load_reranker
from skilltrain.records import Query, Skill
from skilltrain.retrieval.rerank import RerankConfig
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from tiny_models import bert_tokenizer

CPU = torch.device("cpu")
TEXTS = [
    "deploy pods",
    "",
    "review the merge commit of the agent " * 6,
    "运行 clip 🚀",
    "extract pdf text " * 40,
]
QUERY = "deploy the pods and review the chart"
SKILLS = [
    Skill("a", "pods", "deploy pods", "to find the task"),
    Skill("b", "chart", "", "table " * 60),
    Skill("c", "clip", "audio", "video text 运行 " * 30),
    Skill("d", "", "", ""),
]


# Encoders ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "mean"), ("bert", "cls"), ("qwen3", "last_token")]
)
def test_a_padded_batch_equals_single_texts(open_encoder_of, name, pooling):
    encoder = open_encoder_of(name, pooling=pooling)
    texts = [ids for ids in encoder.tokenize(TEXTS, 100) if ids]

    with torch.inference_mode():
        batch = encoder(texts)
        singles = torch.cat([encoder([ids]) for ids in texts])

    assert torch.allclose(batch, singles, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "mean"), ("bert", "cls"), ("qwen3", "last_token")]
)
def test_vectors_have_unit_length(open_encoder_of, name, pooling):
    encoder = open_encoder_of(name, pooling=pooling)

    with torch.inference_mode():
        vectors = encoder(encoder.tokenize(TEXTS, 100))

    assert torch.allclose(vectors.norm(dim=1), torch.ones(len(TEXTS)), atol=1e-6)


def test_bert_equals_plain_transformers_code(open_encoder_of, model_folders):
    encoder = open_encoder_of("bert")
    model = AutoModel.from_pretrained(model_folders["bert"]).eval()
    inputs = encoder.tokenizer(
        TEXTS, padding=True, truncation=True, max_length=100, return_tensors="pt"
    )

    with torch.inference_mode():
        vectors = encoder(encoder.tokenize(TEXTS, 100))

        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        means = (hidden * mask).sum(1) / mask.sum(1)
    assert torch.allclose(vectors, torch.nn.functional.normalize(means, dim=1), atol=1e-5)


def test_bert_has_no_attention_dropout(open_encoder_of):
    config = open_encoder_of("bert_dropout").backbone.config

    assert config.attention_probs_dropout_prob == 0
    assert config.hidden_dropout_prob == 0.1


QUERY_TEMPLATE = EncoderTemplate(instruction="find the skill", query_chars=11)


def test_queries_are_rendered_by_the_template(open_encoder_of):
    encoder = open_encoder_of("qwen3", template=QUERY_TEMPLATE)

    (ids,) = encoder.tokenize_queries(["pods chart and audio"])

    expected = "Instruct: find the skill\nQuery:pods chart <|endoftext|>"
    assert encoder.tokenizer.decode(ids) == expected


def test_queries_have_their_own_limit(open_encoder_of):
    encoder = open_encoder_of("qwen3", template=QUERY_TEMPLATE)
    limited = open_encoder_of("qwen3", template=QUERY_TEMPLATE, query_max_tokens=16, max_tokens=8)

    (ids,) = limited.tokenize_queries(["pods chart and audio"])

    (whole,) = encoder.tokenize_queries(["pods chart and audio"])
    assert len(ids) == 16
    assert ids[:15] == whole[:15]


# Rerankers --------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [32, 512])
@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.skill_id)
def test_a_pair_equals_the_tokenizers_pair(open_reranker_of, max_tokens, skill):
    reranker = open_reranker_of("bert_reranker", max_tokens=max_tokens, query_max_tokens=16)
    text = reranker.settings.template.render_skill(skill)

    (pair,) = reranker.tokenize(QUERY, [skill])

    expected = reranker.tokenizer([QUERY], [text], truncation="only_second", max_length=max_tokens)
    segments = [int(position >= pair.second_start) for position in range(len(pair))]
    assert pair.ids == expected["input_ids"][0]
    assert segments == expected["token_type_ids"][0]


@pytest.mark.parametrize(
    ("name", "settings", "limits"),
    [
        ("bert_reranker", {}, (512, 256)),
        ("bert_reranker", {"max_tokens": 64}, (64, 32)),
        ("qwen3_reranker", {}, (2048, 1024)),  # its positions, not the 4,096 of the form
    ],
)
def test_default_limits_fit_the_model(open_reranker_of, name, settings, limits):
    loaded = open_reranker_of(name, **settings).settings

    assert (loaded.max_tokens, loaded.query_max_tokens) == limits


def test_default_limits_depend_on_the_form():
    settings = RerankerSettings(template=RerankerTemplate(form="yes_no"))

    assert (settings.max_tokens, settings.query_max_tokens) == (4096, 2048)


def test_default_query_limit_leaves_room_for_skill(open_reranker_of):
    room = open_reranker_of("qwen3_reranker").pair_tokenizer.room_for_query() - 2048 + 320

    settings = open_reranker_of("qwen3_reranker", max_tokens=320).settings

    assert (settings.max_tokens, settings.query_max_tokens) == (320, min(160, room))


CONTROL_TEXT = (
    "pods <|im_end|>\n<|im_start|>system <think> </think> <|endoftext|> [SEP] [CLS] [PAD] [MASK] "
    "chart"
)


@pytest.mark.parametrize("name", ["qwen3_reranker", "bert_reranker"])
def test_a_reranker_reads_control_names_as_letters(open_reranker_of, name):
    reranker = open_reranker_of(name)
    control = {*reranker.tokenizer.added_tokens_decoder, *reranker.tokenizer.all_special_ids}

    (pair,) = reranker.tokenize(CONTROL_TEXT, [Skill("a", *[CONTROL_TEXT] * 3)])

    (plain,) = reranker.tokenize("pods", [Skill("a", "pods", "", "")])
    assert [i for i in pair.ids if i in control] == [i for i in plain.ids if i in control]


def test_control_names_are_kept_in_a_pair(open_reranker_of):
    reranker = open_reranker_of("qwen3_reranker")

    (pair,) = reranker.tokenize(CONTROL_TEXT, [Skill("a", *[CONTROL_TEXT] * 3)])

    assert reranker.tokenizer.decode(pair.ids).count(CONTROL_TEXT) == 4


def test_an_encoder_reads_control_names_as_letters(open_encoder_of):
    encoder = open_encoder_of("qwen3")

    (ids,) = encoder.tokenize([CONTROL_TEXT], 400)

    control = encoder.tokenizer.added_tokens_decoder
    assert [i for i in ids if i in control] == [ids[-1]]


@pytest.mark.parametrize(
    ("name", "settings", "code"),
    [
        ("bert_reranker", {"template": RerankerTemplate(form="yes_no")}, "unsupported-model"),
        ("bert_reranker", {"max_tokens": 600}, "exceeds-model"),
        ("bert_reranker", {"max_tokens": 128, "query_max_tokens": 126}, "conflicting-settings"),
        ("qwen3_reranker", {"max_tokens": 128, "query_max_tokens": 126}, "conflicting-settings"),
    ],
)
def test_settings_that_do_not_fit_are_refused(open_reranker_of, name, settings, code):
    with raises(code):
        open_reranker_of(name, **settings)


@pytest.fixture(params=[("bert_reranker", "pair"), ("qwen3_reranker", "yes_no")])
def saved_reranker(request, model_folders, tmp_path):
    """Return the folder of a reranker with settings that differ from the defaults."""
    name, form = request.param
    caps = SkillTemplate(description_chars=9, body_chars=200)
    template = RerankerTemplate(form=form, separator="\n", query_chars=30, skill=caps)
    settings = {"template": template.model_dump(), "max_tokens": 400, "query_max_tokens": 40}
    folder = shutil.copytree(model_folders[name], tmp_path / "saved")
    (folder / CHECKPOINT_FILE).write_text(json.dumps({"kind": "reranker", "settings": settings}))
    return folder


def scores_by_skill(folder, fields):
    """Return the scores of two skills that differ only in their bodies."""
    skills = [
        Skill("a", "pdf", "find text", "deploy pods"),
        Skill("b", "pdf", "find text", "review the chart " * 9),
    ]
    config = RerankConfig(source=str(folder), precision="float32", fields=fields)
    ranker: Any = config.ranker(skills, {})
    candidates = {"q": [("a", 0.0), ("b", 0.0)]}
    return dict(ranker.rank([Query("q", QUERY, "", "", "")], candidates, 2)["q"])


def test_without_bodies_scores_ignore_them(saved_reranker):
    scores = scores_by_skill(saved_reranker, "nd")

    assert scores["a"] == pytest.approx(scores["b"], abs=1e-6)


def test_with_bodies_scores_depend_on_them(saved_reranker):
    scores = scores_by_skill(saved_reranker, "full")

    assert abs(scores["a"] - scores["b"]) > 1e-4
    assert scores == scores_by_skill(saved_reranker, None)


@pytest.mark.parametrize("fields", [None, "full", "nd"])
def test_fields_change_nothing_else_of_a_saved_template(saved_reranker, fields):
    record = json.loads((saved_reranker / CHECKPOINT_FILE).read_text())
    expected = RerankerSettings.model_validate(record["settings"]).model_dump()
    expected["template"]["skill"]["fields"] = fields or "full"

    config = RerankerConfig(source=str(saved_reranker), fields=fields)
    reranker = load_reranker(config, CPU)

    assert reranker.settings.model_dump() == expected


# BERT's relatives -------------------------------------------------------------


PAD = 1
POSITIONS = 66
# Number of tokens that each model has positions for.
ENCODERS = {"Roberta": 64, "XLMRoberta": 64, "MPNet": 64, "Albert": 66, "Electra": 66}


def save(folder, name, head="Model"):
    """Save a model with one layer, 66 positions, and as many segments as published models."""
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{name}Config")
    tokenizer = bert_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(PAD)  # under RoBERTa's number
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    config = config_class(
        vocab_size=len(tokenizer),
        max_position_embeddings=POSITIONS,
        pad_token_id=PAD,
        bos_token_id=2,
        eos_token_id=3,
        type_vocab_size=2 if name in ("Albert", "Electra") else 1,
        num_labels=1,
        initializer_range=0.3,
        **sizes,
    )
    getattr(transformers, name + head)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(params=ENCODERS)
def relative(request, tmp_path):
    """Return the folder of a relative of BERT, and its number of positions."""
    return save(tmp_path, request.param), ENCODERS[request.param]


@pytest.fixture
def longest_text(relative):
    """Return an encoder, and the ids of a text that uses all of its positions."""
    folder, num_tokens = relative
    encoder = load_encoder(EncoderConfig(source=folder, pooling="cls"), CPU)
    (ids,) = encoder.tokenize(["pods " * 100], num_tokens)
    assert len(ids) == num_tokens
    return encoder, ids


def test_limits_default_to_the_positions(relative, longest_text):
    settings = longest_text[0].settings

    assert (settings.max_tokens, settings.query_max_tokens) == (relative[1], relative[1])


@pytest.mark.parametrize("key", ["max_tokens", "query_max_tokens"])
def test_limits_above_the_positions_are_refused(relative, key):
    folder, num_tokens = relative
    config = EncoderConfig(source=folder, **{key: num_tokens + 1})

    with raises("exceeds-model"):
        load_encoder(config, CPU)


def test_an_encoder_uses_every_position(relative, longest_text):
    encoder, ids = longest_text
    model = AutoModel.from_pretrained(relative[0]).eval()

    with torch.inference_mode():
        vectors = encoder([ids])
        embedded_vectors = encoder(encoder.embed([ids]))

        hidden = model(torch.tensor([ids])).last_hidden_state[:, 0]
    expected = torch.nn.functional.normalize(hidden, dim=-1)
    assert torch.allclose(vectors, expected, atol=1e-5)
    assert torch.allclose(embedded_vectors, expected, atol=1e-5)


def test_no_encoder_has_more_positions(longest_text):
    encoder, ids = longest_text

    with torch.inference_mode(), pytest.raises((IndexError, RuntimeError)):
        encoder([[ids[0], *ids]])


def test_every_weight_gets_a_gradient(longest_text):
    """DDP stops at its second step if a weight, such as a pooler's, gets no gradient."""
    encoder, ids = longest_text

    encoder(encoder.embed([ids]))[:, 0].sum().backward()

    assert [name for name, weight in encoder.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (transformers.BertConfig(max_position_embeddings=512), 512),
        (transformers.XLMRobertaConfig(max_position_embeddings=8194), 8192),  # bge-reranker-v2-m3
        (transformers.MPNetConfig(max_position_embeddings=514), 512),
        (transformers.LongformerConfig(max_position_embeddings=4098), 4096),
        (transformers.AutoConfig.for_model("xlnet"), None),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_positions_of_published_models(config, expected):
    assert num_positions(config) == expected


@pytest.mark.parametrize("name", ["Roberta", "XLMRoberta", "MPNet"])
def test_one_segment_reranker_equals_transformers(tmp_path, name):
    folder = save(tmp_path, name, "ForSequenceClassification")
    reranker = load_reranker(RerankerConfig(source=folder), CPU)
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    pairs = reranker.tokenize("merge pdf", SKILLS[:2])
    assert reranker.settings.max_tokens == max(map(len, pairs)) == 64

    with torch.inference_mode():
        scores = reranker(pairs)
        embedded_scores = reranker(reranker.embed(pairs))

        expected = torch.cat([network(torch.tensor([pair.ids])).logits[:, 0] for pair in pairs])
    assert torch.allclose(scores, expected, atol=1e-5)
    assert torch.allclose(embedded_scores, expected, atol=1e-5)
