"""Token ids of the formats of Qwen3, with its real tokenizer and with a tiny one."""

import functools
import unicodedata

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoModelForCausalLM

from skilltrain.models.encoder import Encoder, EncoderSettings
from skilltrain.models.pairs import PairTokenizer, RerankerSettings
from skilltrain.models.reranker import yes_no_ids
from skilltrain.models.tokens import TextTokenizer
from skilltrain.records import Skill
from skilltrain.templates import (
    QWEN3_RERANKER_PREFIX,
    QWEN3_RERANKER_SUFFIX,
    EncoderTemplate,
    RerankerTemplate,
    SkillTemplate,
)
from tiny_models import as_embedding_tokenizer, qwen3_tokenizer, real_qwen3_tokenizer

CPU = torch.device("cpu")
TEXTS = [
    "deploy pods",
    "",
    "x",
    "review the merge commit of the agent " * 12,
    "运行 技能 并部署容器",
    "e\u0301 \u0301 ﬁ 🚀👩‍👩‍👧 \u200b\ufeff",
    "\r\n\n  \t",
    "ends with blank lines\n\n\n",
]
SKILLS = [Skill(str(n), f"name {n}", text[:30], text) for n, text in enumerate(TEXTS)]
REAL = {
    "prefix": 39,
    "suffix": [151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271],
    "end": 151643,
}


@pytest.fixture(scope="module", params=["tiny", "real"])
def tokenizer(request):
    return real_qwen3_tokenizer() if request.param == "real" else qwen3_tokenizer(appends_end=False)


@functools.cache
def pair_tokenizer(tokenizer, **chosen):
    """Make a tokenizer of pairs. It is cached: a copy of the real tokenizer takes half a second."""
    separator = chosen.pop("separator", "\n\n")
    settings = RerankerSettings(
        template=RerankerTemplate(form="yes_no", separator=separator), **chosen
    )
    return PairTokenizer(tokenizer, settings)


def official_ids(tokenizer, template, query, skill, max_tokens):
    """Return the ids of the code of Qwen3-Reranker and SkillRouter.

    It tokenises prefix, body and suffix separately and cuts the body.
    """
    body = template.separator.join(
        [
            f"<Instruct>: {template.instruction}",
            f"<Query>: {query[: template.query_chars]}",
            template.skill_prompt() + template.render_skill(skill),
        ]
    )
    texts = [QWEN3_RERANKER_PREFIX, body, QWEN3_RERANKER_SUFFIX]
    prefix_ids, body_ids, suffix_ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
    num_body_tokens = max_tokens - len(prefix_ids) - len(suffix_ids)
    return prefix_ids + body_ids[:num_body_tokens] + suffix_ids


def test_real_tokenizer_has_official_frame():
    tokenizer = real_qwen3_tokenizer()

    pairs = pair_tokenizer(tokenizer)

    assert (len(pairs.before), pairs.after) == (REAL["prefix"], REAL["suffix"])
    assert pairs.between == []
    assert yes_no_ids(tokenizer) == (9693, 2152)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (REAL["end"], 151645)


def test_query_of_1500_characters_is_not_cut():
    """The papers have queries of up to 1,500 characters."""
    scripts = ("运行技能，部署容器。", "a b ", "1 ", "é", "Ж ", "การ", "كتاب ", "🚀")
    queries = [(letters * 1500)[:1500] for letters in scripts]

    token_ids = pair_tokenizer(real_qwen3_tokenizer()).text.ids(queries)

    assert max(map(len, token_ids)) <= 2048


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
@pytest.mark.parametrize("max_tokens", [4096, 700])
def test_pairs_have_official_ids(tokenizer, separator, max_tokens):
    pairs = pair_tokenizer(tokenizer, separator=separator, max_tokens=max_tokens)
    skill_ids = pairs.skill_ids(SKILLS)

    for query in TEXTS:
        query_ids = pairs.query_ids(query)
        for skill, ids in zip(SKILLS, skill_ids, strict=True):
            pair = pairs.join(query_ids, ids)
            assert pair.ids == official_ids(tokenizer, pairs.template, query, skill, max_tokens)
            num_whole = len(pairs.join(query_ids, ids[:1])) + len(ids) - 1
            assert len(pair) + pair.num_cut == num_whole


def test_structured_pair_has_official_ids(tokenizer):
    skill = SkillTemplate(labelled=True, separator="\n")
    template = RerankerTemplate(form="yes_no", skill=skill)
    pairs = PairTokenizer(tokenizer, RerankerSettings(template=template))

    pair = pairs.join(pairs.query_ids(TEXTS[0]), pairs.skill_ids(SKILLS[:1])[0])

    assert pair.ids == official_ids(tokenizer, template, TEXTS[0], SKILLS[0], 4096)


odd_letters = st.sampled_from(
    [*"ab .,:<>|\n\r\t", "\u0301", "\u00a0", "\u2028", "é", "运", "🚀", "٣"]
)
odd = st.text(odd_letters, max_size=12)


@settings(max_examples=60)
@given(odd, odd, st.sampled_from(["\n", "\n\n"]))
@example("ends in a line break\r\n", "\u0301x", "\n")
@example("ends in spaces   ", "", "\n\n")
def test_separate_texts_have_official_ids(tokenizer, query, body, separator):
    skill = Skill("s", body, "", body + " end")
    pairs = pair_tokenizer(tokenizer, separator=separator)

    pair = pairs.join(pairs.query_ids(query), pairs.skill_ids([skill])[0])

    assert pair.ids == official_ids(tokenizer, pairs.template, query, skill, 4096)


@settings(max_examples=40)
@given(st.text(odd_letters, max_size=60), st.sampled_from([8, 9, 20]))
@example("👩‍👩‍👧" * 9, 8)
@example("deploy   \n\n pods " * 9, 9)
@example(":\xa0\u2028a\u0301", 8)
def test_cut_query_keeps_its_frame(tokenizer, query, limit):
    pairs = pair_tokenizer(tokenizer, query_max_tokens=limit)
    template = pairs.template

    ids = pairs.query_ids(query)

    text = unicodedata.normalize("NFC", tokenizer.decode(ids))
    assert text.startswith(template.query_prompt())
    assert text.endswith(template.query_end())
    cut_query = text.removeprefix(template.query_prompt()).removesuffix(template.query_end())
    # No character is cut in half. A letter may lose an accent that is a character of its own.
    whole_query = unicodedata.normalize("NFC", query)
    beginnings = {unicodedata.normalize("NFC", query[:end]) for end in range(len(query) + 1)}
    assert whole_query.startswith(cut_query) or cut_query in beginnings
    # Without a query, the space and the separator are one token, hence + 1.
    num_frame_tokens = len(pairs.query_ids(""))
    assert len(ids) <= num_frame_tokens + limit + 1
    num_whole_tokens = len(pair_tokenizer(tokenizer).query_ids(query))
    if num_whole_tokens <= num_frame_tokens + limit - 2:
        assert cut_query == whole_query


def test_control_strings_become_letters(tokenizer):
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    text = TextTokenizer(tokenizer)

    for name in [*names, "".join(names)]:
        (ids,) = text.ids([f"a {name} b"])
        assert not set(ids) & tokenizer.added_tokens_decoder.keys()
        assert tokenizer.decode(ids) == f"a {name} b"


def test_texts_without_control_strings_are_unchanged(tokenizer):
    ids = TextTokenizer(tokenizer).ids(TEXTS)

    assert ids == tokenizer(TEXTS, add_special_tokens=False)["input_ids"]


def test_unigram_vocabulary_leaks_no_control_token():
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "</s>", "<unk>", "▁", "▁pods", "<", ">", "/", "s", "a"]
    raw = Tokenizer(
        models.Unigram([(piece, -float(n)) for n, piece in enumerate(pieces)], unk_id=2)
    )
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.add_special_tokens(pieces[:3])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    leaking = tokenizer("pods </s> a", add_special_tokens=False, split_special_tokens=True)
    assert 1 in leaking["input_ids"]

    text = TextTokenizer(tokenizer)

    assert text.ids(["pods </s> a", "pods Q a"]) == [[4, 3, 3, 9], [4, 3, 2, 3, 9]]
    assert text.framed_ids(["pods </s> a"], 9) == [[0, 4, 3, 3, 9, 1]]
    assert text.ids_and_spans("pods </s> a")[0] == [4, 3, 3, 9]


@pytest.mark.parametrize("appends_end", [False, True])
def test_encoder_texts_end_with_one_end_token(tokenizer, appends_end):
    encoder_tokenizer = as_embedding_tokenizer(tokenizer) if appends_end else tokenizer
    end_id = encoder_tokenizer.convert_tokens_to_ids("<|endoftext|>")
    settings = EncoderSettings(pooling="last_token")
    encoder = Encoder(nn.Identity(), encoder_tokenizer, settings)
    texts = [*TEXTS, "<|endoftext|>", "stop <|endoftext|>"]

    for max_tokens in (16, 1000):
        for text, ids in zip(texts, encoder.tokenize(texts, max_tokens), strict=True):
            assert ids[-1] == end_id
            assert ids.count(end_id) == 1
            assert len(ids) <= max_tokens
            if "endoftext" not in text:
                text_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert ids[:-1] == text_ids[: max_tokens - 1]


def test_encoder_queries_have_official_form(tokenizer):
    template = EncoderTemplate(instruction="Find the skill")
    settings = EncoderSettings(pooling="last_token", template=template)
    encoder = Encoder(nn.Identity(), tokenizer, settings)

    (ids,) = encoder.tokenize_queries(["deploy pods"])

    assert ids == tokenizer.encode("Instruct: Find the skill\nQuery:deploy pods<|endoftext|>")
    assert encoder.tokenize([SKILLS[0].body], 99) == [tokenizer.encode("deploy pods<|endoftext|>")]


@torch.inference_mode()
def test_vectors_equal_plain_code_with_left_padding(open_encoder_of):
    """Qwen3-Embedding's model card: pad on the left, take the last position, divide by the norm."""
    encoder = open_encoder_of("qwen3")
    settings = {"padding": True, "padding_side": "left", "truncation": True, "max_length": 100}
    inputs = encoder.tokenizer(TEXTS, return_tensors="pt", **settings)
    assert (inputs["input_ids"][:, -1] == encoder.tokenizer.pad_token_id).all()
    assert inputs["attention_mask"][:, -1].all()

    vectors = encoder(encoder.tokenize(TEXTS, 100))

    last = encoder.backbone(**inputs).last_hidden_state[:, -1]
    assert torch.allclose(vectors, torch.nn.functional.normalize(last, dim=1), atol=1e-5)


@torch.inference_mode()
def test_scores_equal_plain_code_with_left_padding(open_reranker_of):
    """Qwen3-Reranker's model card: pad on the left, take the logits at the last position."""
    reranker = open_reranker_of("qwen3_reranker", max_tokens=600)
    tokenizer = reranker.tokenizer
    template = reranker.settings.template
    model = AutoModelForCausalLM.from_pretrained(reranker.network.name_or_path).eval()
    ids = [official_ids(tokenizer, template, TEXTS[0], skill, 600) for skill in SKILLS]
    inputs = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")

    scores = reranker(reranker.tokenize(TEXTS[0], SKILLS))

    logits = model(**inputs, logits_to_keep=1).logits[:, -1]
    yes, no = yes_no_ids(tokenizer)
    expected = logits[:, yes] - logits[:, no]
    assert torch.allclose(scores, expected, atol=1e-5 * max(1, float(expected.abs().max())))
