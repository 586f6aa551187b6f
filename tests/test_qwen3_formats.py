"""Qwen3's two formats, id by id: with the real tokenizer where it is at hand, and with a small one of its kind."""

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
    """Made once a test file: the real tokenizer takes half a second to copy."""
    separator = chosen.pop("separator", "\n\n")
    settings = RerankerSettings(
        template=RerankerTemplate(form="yes_no", separator=separator), **chosen
    )
    return PairTokenizer(tokenizer, settings)


def official_ids(tokenizer, template, query, skill, max_tokens):
    """Prefix, body and suffix tokenised one by one, as Qwen3-Reranker's and SkillRouter's code do; the body is cut."""
    prefix, body, suffix = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (
            QWEN3_RERANKER_PREFIX,
            f"<Instruct>: {template.instruction}{template.separator}<Query>: {query[: template.query_chars]}"
            f"{template.separator}<Document>: {template.render_skill(skill)}",
            QWEN3_RERANKER_SUFFIX,
        )
    )
    return prefix + body[: max_tokens - len(prefix) - len(suffix)] + suffix


def test_the_frame_of_the_real_tokenizer_which_cuts_no_query_of_the_papers():
    tokenizer = real_qwen3_tokenizer()
    frame = pair_tokenizer(tokenizer)
    assert (len(frame.before), frame.after, frame.between) == (REAL["prefix"], REAL["suffix"], [])
    assert yes_no_ids(tokenizer) == (9693, 2152)
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (REAL["end"], 151645)
    scripts = ("运行技能，部署容器。", "a b ", "1 ", "é", "Ж ", "การ", "كتاب ", "🚀")
    assert all(
        len(ids) <= 2048 for ids in frame.text.ids([(letters * 1500)[:1500] for letters in scripts])
    )


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_pairs_are_the_official_ids(tokenizer, separator):
    for max_tokens in (4096, 700):
        pairs = pair_tokenizer(tokenizer, separator=separator, max_tokens=max_tokens)
        parts = pairs.skill_ids(SKILLS)
        for query in TEXTS:
            for skill, part in zip(SKILLS, parts, strict=True):
                pair = pairs.join(pairs.query_ids(query), part)
                assert pair.ids == official_ids(tokenizer, pairs.template, query, skill, max_tokens)
                assert (
                    len(pair) + pair.num_cut
                    == len(pairs.join(pairs.query_ids(query), part[:1])) + len(part) - 1
                )


odd_letters = st.sampled_from(
    [*"ab .,:<>|\n\r\t", "\u0301", "\u00a0", "\u2028", "é", "运", "🚀", "٣"]
)
odd = st.text(odd_letters, max_size=12)


@settings(max_examples=60)
@given(odd, odd, st.sampled_from(["\n", "\n\n"]))
@example("ends in a line break\r\n", "\u0301x", "\n")
@example("ends in spaces   ", "", "\n\n")
def test_parts_tokenised_alone_are_the_ids_of_the_whole(tokenizer, query, body, separator):
    skill = Skill("s", body, "", body + " end")
    pairs = pair_tokenizer(tokenizer, separator=separator)
    joined = pairs.join(pairs.query_ids(query), pairs.skill_ids([skill])[0])
    assert joined.ids == official_ids(tokenizer, pairs.template, query, skill, 4096)


@settings(max_examples=40)
@given(st.text(odd_letters, max_size=60), st.sampled_from([8, 9, 20]))
@example("👩‍👩‍👧" * 9, 8)
@example("deploy   \n\n pods " * 9, 9)
@example(":\xa0\u2028a\u0301", 8)
def test_a_cut_query_keeps_its_frame(tokenizer, query, limit):
    pairs = pair_tokenizer(tokenizer, query_max_tokens=limit)
    ids, template = pairs.query_ids(query), pairs.template
    text = unicodedata.normalize("NFC", tokenizer.decode(ids))
    assert text.startswith(template.query_prompt()) and text.endswith(template.query_end())
    kept = text.removeprefix(template.query_prompt()).removesuffix(template.query_end())
    # No half of a character; a letter may lose its accent where the tokenizer has it as a character of its own.
    beginnings = {unicodedata.normalize("NFC", query[:end]) for end in range(len(query) + 1)}
    assert unicodedata.normalize("NFC", query).startswith(kept) or kept in beginnings
    assert (
        len(ids) <= len(pairs.query_ids("")) + limit + 1
    )  # without a query, the space and the separator are one token
    if len(pair_tokenizer(tokenizer).query_ids(query)) <= len(pairs.query_ids("")) + limit - 2:
        assert kept == unicodedata.normalize("NFC", query)


def test_control_strings_become_letters(tokenizer):
    names = [token.content for token in tokenizer.added_tokens_decoder.values()]
    text = TextTokenizer(tokenizer)
    for name in [*names, "".join(names)]:
        (ids,) = text.ids([f"a {name} b"])
        assert (
            not {*ids} & {*tokenizer.added_tokens_decoder}
            and tokenizer.decode(ids) == f"a {name} b"
        )
    plain = [one for one in TEXTS if not any(name in one for name in names)]
    assert text.ids(plain) == tokenizer(plain, add_special_tokens=False)["input_ids"]


def test_a_unigram_vocabulary_does_not_leak_its_control_tokens():
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
    assert (
        1
        in tokenizer("pods </s> a", add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
    )
    text = TextTokenizer(tokenizer)
    assert text.ids(["pods </s> a", "pods Q a"]) == [[4, 3, 3, 9], [4, 3, 2, 3, 9]]
    assert text.framed_ids(["pods </s> a"], 9) == [[0, 4, 3, 3, 9, 1]]
    assert text.ids_and_spans("pods </s> a")[0] == [4, 3, 3, 9]


@pytest.mark.parametrize("appends_end", [False, True])
def test_texts_of_the_encoder_end_with_one_end_token(tokenizer, appends_end):
    own = as_embedding_tokenizer(tokenizer) if appends_end else tokenizer
    end = own.convert_tokens_to_ids("<|endoftext|>")
    encoder = Encoder(nn.Identity(), own, EncoderSettings(pooling="last_token"))
    texts = [*TEXTS, "<|endoftext|>", "stop <|endoftext|>"]
    for max_tokens in (16, 1000):
        for text, ids in zip(texts, encoder.tokenize(texts, max_tokens), strict=True):
            assert ids[-1] == end and ids.count(end) == 1 and len(ids) <= max_tokens
            if "endoftext" not in text:
                assert (
                    ids[:-1]
                    == tokenizer(text, add_special_tokens=False)["input_ids"][: max_tokens - 1]
                )


def test_queries_of_the_encoder_have_the_official_form(tokenizer):
    template = EncoderTemplate(instruction="Find the skill")
    encoder = Encoder(
        nn.Identity(), tokenizer, EncoderSettings(pooling="last_token", template=template)
    )
    (ids,) = encoder.tokenize_queries(["deploy pods"])
    assert ids == tokenizer.encode("Instruct: Find the skill\nQuery:deploy pods<|endoftext|>")
    assert encoder.tokenize([SKILLS[0].body], 99) == [tokenizer.encode("deploy pods<|endoftext|>")]


def test_vectors_equal_plain_code_with_left_padding(open_encoder_of):
    """Qwen3-Embedding's model card: pad on the left, take the last position, divide by the norm."""
    encoder = open_encoder_of("qwen3")
    settings = {"padding": True, "padding_side": "left", "truncation": True, "max_length": 100}
    inputs = encoder.tokenizer(TEXTS, return_tensors="pt", **settings)
    last, is_seen = inputs["input_ids"][:, -1], inputs["attention_mask"][:, -1]
    assert (last == encoder.tokenizer.pad_token_id).all() and is_seen.all()
    with torch.inference_mode():
        expected = torch.nn.functional.normalize(
            encoder.backbone(**inputs).last_hidden_state[:, -1], dim=1
        )
        assert torch.allclose(encoder(encoder.tokenize(TEXTS, 100)), expected, atol=1e-5)


def test_scores_equal_plain_code_with_left_padding(open_reranker_of):
    """Qwen3-Reranker's model card: pad on the left, compare the logits of yes and no at the last position."""
    reranker = open_reranker_of("qwen3_reranker", max_tokens=600)
    model = AutoModelForCausalLM.from_pretrained(reranker.network.name_or_path).eval()
    ids = [
        official_ids(reranker.tokenizer, reranker.settings.template, TEXTS[0], skill, 600)
        for skill in SKILLS
    ]
    inputs = reranker.tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt")
    yes, no = yes_no_ids(reranker.tokenizer)
    with torch.inference_mode():
        logits = model(**inputs, logits_to_keep=1).logits[:, -1]
        expected = logits[:, yes] - logits[:, no]
        ours = reranker(reranker.tokenize(TEXTS[0], SKILLS))
    assert torch.allclose(ours, expected, atol=1e-5 * max(1, float(expected.abs().max())))
