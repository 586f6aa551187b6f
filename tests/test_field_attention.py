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
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.papers.skillrouter.field_attention import FIELDS, field_attention, token_fields
from skilltrain.records import Query, Skill
from skilltrain.templates import RerankerTemplate, SkillTemplate
from tiny_models import bert_tokenizer

CPU = torch.device("cpu")


def asked(text):
    return Query(f"q: {text}", text, "", "", "")


PAIRS = [
    (
        asked("deploy the pods and review the chart"),
        Skill("a", "pods", "deploy pods", "to find the task " * 5),
    ),
    (asked("translate audio"), Skill("b", "chart 运行", "", "table " * 60)),
    (asked("extract text"), Skill("c", "clip", "audio report", "video text 🚀 " * 30)),
]


QUERY, SKILL = PAIRS[0]


@pytest.fixture(params=["qwen3_reranker", "bert_reranker"])
def opened(request, model_folders):
    """(a reranker, the same network as transformers' eager attention runs it, place of the scoring position)."""
    source, causal = str(model_folders[request.param]), request.param == "qwen3_reranker"
    auto = AutoModelForCausalLM if causal else AutoModelForSequenceClassification
    eager = auto.from_pretrained(source, attn_implementation="eager").eval()
    return load_reranker(RerankerConfig(source=source), CPU), eager, -1 if causal else 0


def eager_rows(eager, pair, place):
    """Attention of the scoring position over heads, from the whole matrices: [layer, token]."""
    options = {}
    if place == 0:
        options["token_type_ids"] = torch.tensor(
            [[int(i >= pair.second_start) for i in range(len(pair))]]
        )
    with torch.inference_mode():
        attentions = eager(torch.tensor([pair.ids]), output_attentions=True, **options).attentions
    return torch.stack([layer[0, :, place].mean(0) for layer in attentions]).double()


def test_shares_are_those_of_the_eager_attention_matrices(opened):
    reranker, eager, place = opened
    expected = []
    for query, skill in PAIRS:
        (pair,) = reranker.tokenize(query.text, [skill])
        fields = token_fields(reranker, skill)
        sums = (
            eager_rows(eager, pair, place)[:, pair.second_start :][:, : len(fields)].numpy()
            @ fields
        )
        expected.append(sums / sums.sum(1, keepdims=True))
    implementation, (pair,) = (
        reranker.network.config._attn_implementation,
        reranker.tokenize(QUERY.text, [SKILL]),
    )
    with torch.inference_mode():
        before = reranker([pair])
        found = field_attention(reranker, PAIRS, "tiny")

        assert torch.equal(reranker([pair]), before)
        with raises("nothing-to-analyse"):
            field_attention(reranker, [*PAIRS, (QUERY, Skill("empty", " ", "", "\n"))], "tiny")
        assert torch.equal(reranker([pair]), before)

    assert reranker.network.config._attn_implementation == implementation
    assert (found["model"], len(found["pairs"])) == ("tiny", 3)
    assert table(found["layers"]) == pytest.approx(np.mean(expected, 0), abs=1e-5)
    assert table([found["overall"]])[0] == pytest.approx(np.mean(expected, (0, 1)), abs=1e-5)
    # Of two layers a quarter is none: all are in the middle.
    assert found["groups"] == {"middle": found["overall"]}
    assert [(pair["query_id"], pair["skill_id"]) for pair in found["pairs"]] == [
        (q.query_id, s.skill_id) for q, s in PAIRS
    ]
    assert table([pair["overall"] for pair in found["pairs"]]) == pytest.approx(
        np.mean(expected, 1), abs=1e-5
    )
    for shares in (*found["layers"], found["overall"], found["tokens"]):
        assert sum(shares.values()) == pytest.approx(1)


def table(shares):
    return np.array([[one[field] for field in FIELDS] for one in shares])


def test_a_cut_body_counts_for_what_is_left_of_it(open_reranker_of):
    reranker = open_reranker_of("bert_reranker", max_tokens=32, query_max_tokens=8)
    skill = Skill("a", "deploy pods", "find the chart", "text " * 90)

    # [CLS] pods [SEP] … [SEP] leaves 28: two of the name, |, three of the description, |, and 21 of the body's 90
    found = field_attention(reranker, [(asked("pods"), skill)], "cut")

    assert table([found["tokens"]])[0] == pytest.approx([2 / 26, 3 / 26, 21 / 26])
    assert [pair["num_cut"] for pair in found["pairs"]] == [69]


def owners(reranker, skill):
    """(token's text, its field or -) of a skill's part."""
    fields = token_fields(reranker, skill)
    assert fields.sum(1).max() <= 1
    names = [FIELDS[row.argmax()] if row.any() else "-" for row in fields]
    tokens = reranker.tokenizer.convert_ids_to_tokens(reranker.pair_tokenizer.skill_ids([skill])[0])
    return list(zip(tokens, names, strict=True))


def test_each_token_belongs_to_the_field_it_came_from(open_reranker_of):
    n, d, b = FIELDS
    found = owners(
        open_reranker_of("bert_reranker"), Skill("a", " Deploy pods\n", "find | it", "the <m>")
    )

    assert found == [
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

    found = owners(
        open_reranker_of("qwen3_reranker"), Skill("a", "pods 运行", "é", "🚀 chart")
    )  # by bytes

    assert "".join(text for text, field in found if field == "-") == "<Document>:" + "Ġ|Ġ" + "Ġ|Ġ"
    assert [sum(owner == field for _, owner in found) for field in FIELDS] == [1 + 1 + 6, 2, 4 + 1]
    assert (
        next(text for text, owner in found if owner == n) == "Ġpods"
    )  # the space before it is no field's
    assert found[-1] == ("Ġchart", b)


def test_a_skill_without_description_and_a_template_without_body(open_reranker_of):
    skill, full = (
        Skill("a", "pods", "  ", "chart text"),
        Skill("a", "pods", "deploy chart text", "body"),
    )

    assert [field for _, field in owners(open_reranker_of("bert_reranker"), skill)] == [
        "name",
        "-",
        "body",
        "body",
    ]

    template = RerankerTemplate(skill=SkillTemplate(fields="nd"))
    nd = open_reranker_of("bert_reranker", template=template)
    found = field_attention(nd, [(asked("pods"), full)], "nd")["overall"]

    assert found["body"] == 0
    assert found["name"] > 0
    assert found["description"] > 0
    assert field_attention(nd, [(asked("pods"), skill)], "nd")["overall"] == {
        "name": 1,
        "description": 0,
        "body": 0,
    }


def saved(folder, model_class, config_class, num_layers):
    torch.manual_seed(1)
    tokenizer = bert_tokenizer()
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "initializer_range": 0.3,
    }
    config = config_class(
        vocab_size=len(tokenizer), num_hidden_layers=num_layers, num_labels=1, **sizes
    )
    model_class(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_reranker(RerankerConfig(source=str(folder)), CPU)


def test_layers_are_grouped_in_a_quarter_a_half_and_a_quarter(tmp_path):
    """Of 28 layers 0–6, 7–20 and 21–27 (SkillRouter, appendix F); of eight 0–1, 2–5 and 6–7."""
    found = field_attention(
        saved(tmp_path, BertForSequenceClassification, BertConfig, 8), PAIRS[:1], "eight"
    )
    layers, groups = table(found["layers"]), found["groups"]

    expected = {
        "early": layers[:2].mean(0),
        "middle": layers[2:6].mean(0),
        "late": layers[6:].mean(0),
    }

    assert [*groups] == [*expected]
    assert table(groups.values()) == pytest.approx(np.array([*expected.values()]))


def test_what_cannot_be_read_is_refused_in_one_line(open_reranker_of, tmp_path):
    reranker, spoiled, mean = (open_reranker_of("bert_reranker") for _ in range(3))
    torch.nn.init.constant_(
        spoiled.network.bert.encoder.layer[1].attention.self.key.weight, torch.nan
    )
    mean.network.config.classifier_pooling = "mean"

    mpnet = saved(tmp_path, MPNetForSequenceClassification, MPNetConfig, 3)

    for model, pairs, code in (
        (reranker, [], "nothing-to-analyse"),
        (spoiled, PAIRS, "nothing-to-analyse"),
        (mean, PAIRS, "unsupported-model"),
        (mpnet, PAIRS, "unsupported-model"),
    ):
        with raises(code):
            field_attention(model, pairs, "x")
