"""Attention of rerankers to the fields of a skill."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
)

from faults import raises
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.papers.skillrouter.field_attention import (
    FIELDS,
    field_attention,
    pair_statistics,
    token_fields,
)
from skilltrain.records import Query, Skill
from skilltrain.templates import RerankerTemplate, SkillTemplate
from tiny_models import bert_tokenizer

CPU = torch.device("cpu")


def query_of(text):
    return Query(f"q: {text}", text, "", "", "")


PAIRS = [
    (
        query_of("deploy the pods and review the chart"),
        Skill("a", "pods", "deploy pods", "to find the task " * 5),
    ),
    (query_of("translate audio"), Skill("b", "chart 运行", "", "table " * 60)),
    (query_of("extract text"), Skill("c", "clip", "audio report", "video text 🚀 " * 30)),
]


QUERY, SKILL = PAIRS[0]


@dataclass(frozen=True)
class OpenedModel:
    """A reranker and the same network with transformers' eager attention.

    `position` is the position that the score is read from.
    """

    reranker: Reranker
    eager: torch.nn.Module
    position: int


@pytest.fixture(params=["qwen3_reranker", "bert_reranker"])
def opened(request, model_folders):
    source = str(model_folders[request.param])
    reranker = load_reranker(RerankerConfig(source=source), CPU)
    is_causal = request.param == "qwen3_reranker"
    auto = AutoModelForCausalLM if is_causal else AutoModelForSequenceClassification
    eager = auto.from_pretrained(source, attn_implementation="eager").eval()
    return OpenedModel(reranker, eager, -1 if is_causal else 0)


def eager_rows(opened, pair):
    """Return the attention of the scoring position, averaged over heads: [layer, token]."""
    options = {}
    if opened.position == 0:
        type_ids = [int(i >= pair.second_start) for i in range(len(pair))]
        options["token_type_ids"] = torch.tensor([type_ids])

    with torch.inference_mode():
        output = opened.eager(torch.tensor([pair.ids]), output_attentions=True, **options)

    # Each layer is [batch, head, from, to].
    rows = [layer[0, :, opened.position].mean(0) for layer in output.attentions]
    return torch.stack(rows).double()


def expected_shares(opened, query, skill):
    """Return the share of each field in the attention to the skill: [layer, field]."""
    (pair,) = opened.reranker.tokenize(query.text, [skill])
    fields = token_fields(opened.reranker, skill)  # [token, field]
    skill_rows = eager_rows(opened, pair)[:, pair.second_start :]
    sums = skill_rows[:, : len(fields)].numpy() @ fields
    return sums / sums.sum(1, keepdims=True)


@pytest.fixture
def attention(opened):
    return field_attention(opened.reranker, PAIRS, "tiny")


def test_shares_equal_eager_attention(opened, attention):
    # [pair, layer, field]
    expected = np.stack([expected_shares(opened, query, skill) for query, skill in PAIRS])

    by_layer = table(attention["layers"])
    (overall,) = table([attention["overall"]])
    by_pair = table([pair["overall"] for pair in attention["pairs"]])

    assert by_layer == pytest.approx(expected.mean(0), abs=1e-5)
    assert overall == pytest.approx(expected.mean((0, 1)), abs=1e-5)
    assert by_pair == pytest.approx(expected.mean(1), abs=1e-5)


def test_statistics_over_pairs_by_hand():
    # Name, description and body of three pairs in the last of two layers.
    last = np.array([[0.1, 0.1, 0.8], [0.5, 0.1, 0.4], [0.2, 0.2, 0.6]])
    first = np.array([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    tokens = np.array([[0.2, 0.1, 0.7], [0.4, 0.1, 0.5], [0.3, 0.1, 0.6]])

    statistics = pair_statistics(np.stack([first, last], axis=1), tokens, [300, 100, 200])

    assert statistics["num_body_above_tokens"] == 1  # .8 > .7, .4 < .5, .6 = .6
    assert statistics["body_length_r"] == pytest.approx(1)
    # The bodies' shares over both layers are .9, .7 and .8.
    assert statistics["sd"]["body"] == pytest.approx((0.02 / 3) ** 0.5)


def test_equal_lengths_have_no_correlation():
    shares = np.array([[[0.1, 0.1, 0.8]], [[0.5, 0.1, 0.4]]])

    assert pair_statistics(shares, shares[:, 0], [100, 100])["body_length_r"] is None


def test_attention_varies_over_pairs(attention):
    pairs = attention["pairs"]
    overall = [pair["overall"]["body"] for pair in pairs]
    last = [pair["last_layer"]["body"] for pair in pairs]

    statistics = attention["over_pairs"]

    above = [pair["last_layer"]["body"] > pair["tokens"]["body"] for pair in pairs]
    assert statistics["sd"]["body"] == pytest.approx(np.std(overall))
    assert statistics["num_body_above_tokens"] == sum(above)
    assert np.mean(last) == pytest.approx(attention["layers"][-1]["body"])
    assert -1 <= statistics["body_length_r"] <= 1


def test_shares_sum_to_1(attention):
    for shares in (*attention["layers"], attention["overall"], attention["tokens"]):
        assert sum(shares.values()) == pytest.approx(1)


def test_attention_names_pairs(attention):
    pairs = [(pair["query_id"], pair["skill_id"]) for pair in attention["pairs"]]

    assert attention["model"] == "tiny"
    assert pairs == [(query.query_id, skill.skill_id) for query, skill in PAIRS]


def test_two_layers_are_one_group(attention):
    # A quarter of two layers is none: all are in the middle.
    assert attention["groups"] == {"middle": attention["overall"]}


@pytest.mark.parametrize("fails", [False, True])
def test_attention_leaves_model_unchanged(opened, fails):
    reranker = opened.reranker
    implementation = reranker.network.config._attn_implementation
    (pair,) = reranker.tokenize(QUERY.text, [SKILL])
    with torch.inference_mode():
        score = reranker([pair])

    if fails:
        with raises("nothing-to-analyse"):
            field_attention(reranker, [*PAIRS, (QUERY, Skill("empty", " ", "", "\n"))], "tiny")
    else:
        field_attention(reranker, PAIRS, "tiny")

    with torch.inference_mode():
        assert torch.equal(reranker([pair]), score)
    assert reranker.network.config._attn_implementation == implementation


def table(rows):
    """Return shares by field as an array: [row, field]."""
    return np.array([list(map(row.get, FIELDS)) for row in rows])


def test_cut_body_counts_its_remaining_tokens(open_reranker_of):
    reranker = open_reranker_of("bert_reranker", max_tokens=32, query_max_tokens=8)
    skill = Skill("a", "deploy pods", "find the chart", "text " * 90)

    attention = field_attention(reranker, [(query_of("pods"), skill)], "cut")

    # [CLS] pods [SEP] … [SEP] leaves 28 tokens: 2 of the name, |, 3 of the description, |, and 21
    # of the 90 of the body.
    (shares,) = table([attention["tokens"]])
    assert shares == pytest.approx([2 / 26, 3 / 26, 21 / 26])
    assert [pair["num_cut"] for pair in attention["pairs"]] == [69]


def fields_by_token(reranker, skill):
    """Return the text and the field of each token of a skill; the field is - for separators."""
    fields = token_fields(reranker, skill)
    assert fields.sum(1).max() <= 1
    names = [FIELDS[row.argmax()] if row.any() else "-" for row in fields]
    tokens = reranker.tokenizer.convert_ids_to_tokens(reranker.pair_tokenizer.skill_ids([skill])[0])
    return list(zip(tokens, names, strict=True))


def test_word_pieces_belong_to_their_field(open_reranker_of):
    n, d, b = FIELDS
    skill = Skill("a", " Deploy pods\n", "find | it", "the <m>")

    owners = fields_by_token(open_reranker_of("bert_reranker"), skill)

    assert owners == [
        ("deploy", n),
        ("pods", n),
        ("|", "-"),
        ("find", d),
        ("|", d),
        ("i", d),
        ("##t", d),
        ("|", "-"),
        ("the", b),
        ("<", b),
        ("m", b),
        (">", b),
    ]


def test_bytes_belong_to_their_field(open_reranker_of):
    name, _, body = FIELDS
    skill = Skill("a", "pods 运行", "é", "🚀 chart")

    owners = fields_by_token(open_reranker_of("qwen3_reranker"), skill)

    assert "".join(text for text, field in owners if field == "-") == "<Document>:Ġ|ĠĠ|Ġ"
    num_tokens = Counter(field for _, field in owners)
    assert [num_tokens[field] for field in FIELDS] == [1 + 1 + 6, 2, 4 + 1]
    # The space before the name belongs to no field.
    assert next(text for text, field in owners if field == name) == "Ġpods"
    assert owners[-1] == ("Ġchart", body)


def test_labels_belong_to_no_field(open_reranker_of):
    template = RerankerTemplate(skill=SkillTemplate(labelled=True, separator=" | "))
    reranker = open_reranker_of("bert_reranker", template=template)

    owners = fields_by_token(reranker, Skill("a", "pods", "find", "chart"))

    field_of = {text: field for text, field in owners if field != "-"}
    assert field_of == {"pods": "name", "find": "description", "chart": "body"}


def test_missing_description_has_no_tokens(open_reranker_of):
    skill = Skill("a", "pods", "  ", "chart text")

    owners = fields_by_token(open_reranker_of("bert_reranker"), skill)

    assert [field for _, field in owners] == ["name", "-", "body", "body"]


@pytest.fixture
def nd_reranker(open_reranker_of):
    """A reranker whose template has no body."""
    template = RerankerTemplate(skill=SkillTemplate(fields="nd"))
    return open_reranker_of("bert_reranker", template=template)


def test_template_without_body_gives_it_no_share(nd_reranker):
    skill = Skill("a", "pods", "deploy chart text", "body")

    shares = field_attention(nd_reranker, [(query_of("pods"), skill)], "nd")["overall"]

    assert shares["body"] == 0
    assert shares["name"] > 0
    assert shares["description"] > 0


def test_only_field_has_whole_attention(nd_reranker):
    skill = Skill("a", "pods", "  ", "chart text")

    shares = field_attention(nd_reranker, [(query_of("pods"), skill)], "nd")["overall"]

    assert shares == {"name": 1, "description": 0, "body": 0}


def save_reranker(folder, model_class, config_class, num_layers):
    """Save a random classification model and open it as a reranker."""
    torch.manual_seed(1)
    tokenizer = bert_tokenizer()
    config = config_class(
        vocab_size=len(tokenizer),
        num_hidden_layers=num_layers,
        num_labels=1,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=64,
        initializer_range=0.3,
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_reranker(RerankerConfig(source=str(folder)), CPU)


def test_groups_are_quarter_half_quarter(tmp_path):
    """Of 28 layers 0–6, 7–20 and 21–27 (SkillRouter, appendix F); of eight 0–1, 2–5 and 6–7."""
    reranker = save_reranker(tmp_path, BertForSequenceClassification, BertConfig, 8)

    attention = field_attention(reranker, PAIRS[:1], "eight")

    layers = table(attention["layers"])
    assert list(attention["groups"]) == ["early", "middle", "late"]
    expected = [layers[:2].mean(0), layers[2:6].mean(0), layers[6:].mean(0)]
    assert table(attention["groups"].values()) == pytest.approx(np.stack(expected))


def test_no_pairs_are_refused(open_reranker_of):
    with raises("nothing-to-analyse"):
        field_attention(open_reranker_of("bert_reranker"), [], "x")


def test_attention_without_numbers_is_refused(open_reranker_of):
    reranker = open_reranker_of("bert_reranker")
    key = reranker.network.bert.encoder.layer[1].attention.self.key
    torch.nn.init.constant_(key.weight, torch.nan)

    with raises("nothing-to-analyse"):
        field_attention(reranker, PAIRS, "x")


def test_mean_pooling_is_refused(open_reranker_of):
    reranker = open_reranker_of("bert_reranker")
    reranker.network.config.classifier_pooling = "mean"

    with raises("unsupported-model"):
        field_attention(reranker, PAIRS, "x")


def test_unknown_attention_is_refused(tmp_path):
    mpnet = save_reranker(tmp_path, MPNetForSequenceClassification, MPNetConfig, 3)

    with raises("unsupported-model"):
        field_attention(mpnet, PAIRS, "x")
