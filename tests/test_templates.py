import os
from pathlib import Path

import pytest

from skilltrain.records import Skill
from skilltrain.templates import (
    QWEN3_RERANKER_PREFIX,
    QWEN3_RERANKER_SUFFIX,
    EncoderTemplate,
    RerankerTemplate,
    SkillTemplate,
)

SKILL = Skill("s", "pod-debug", "Finds why a pod fails", "# Steps\nLook at events")


def test_a_skill_is_name_description_body_within_their_caps():
    assert SkillTemplate().render(SKILL) == "pod-debug | Finds why a pod fails | # Steps\nLook at events"
    assert SkillTemplate(description_chars=5, body_chars=7).render(SKILL) == "pod-debug | Finds | # Steps"
    assert SkillTemplate(fields="nd").render(SKILL) == "pod-debug | Finds why a pod fails"


def test_empty_fields_leave_no_separator():
    assert SkillTemplate().render(Skill("s", "n", " ", "")) == "n"
    assert SkillTemplate(description_chars=0).render(Skill("s", "n", "d", "b")) == "n | b"
    assert SkillTemplate().render(Skill("s", "", "", "")) == ""


def test_caps_count_characters():
    skill = Skill("s", "n", "说" * 400, "明" * 3000)
    assert SkillTemplate().render(skill) == "n | " + "说" * 300 + " | " + "明" * 2500


def test_the_encoder_sees_no_space_after_query():
    template = EncoderTemplate(instruction="Find skills", query_chars=6)
    assert template.render_query("deploy pods") == "Instruct: Find skills\nQuery:deploy"
    assert EncoderTemplate().render_query("deploy pods") == "deploy pods"


@pytest.mark.parametrize("separator", ["\n", "\n\n"])
def test_the_yes_no_form(separator):
    template = RerankerTemplate(form="yes_no", instruction="Judge it", separator=separator, query_chars=6)
    text = template.render_query("deploy pods") + template.render_skill(SKILL)
    parts = ["<Instruct>: Judge it", "<Query>: deploy", "<Document>: " + SkillTemplate().render(SKILL)]
    assert text == separator.join(parts)


def test_the_pair_form_adds_nothing():
    assert RerankerTemplate().render_query("deploy pods") == "deploy pods"
    assert RerankerTemplate().render_skill(Skill("s", "n", "d" * 600, "b" * 3000)) == f"n | {'d' * 500} | {'b' * 2000}"


def qwen3_tokenizer():
    """The real Qwen3 tokenizer, which is no part of the project: SKILLTRAIN_QWEN3_TOKENIZER, or ../shared/data."""
    beside = Path(__file__).parents[2] / "shared" / "data" / "qwen3-tokenizer"
    folder = Path(os.environ.get("SKILLTRAIN_QWEN3_TOKENIZER", beside))
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("no Qwen3 tokenizer here; set SKILLTRAIN_QWEN3_TOKENIZER to its folder")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def qwen3():
    return qwen3_tokenizer()


def test_qwen3_reranker_ids(qwen3):
    from skilltrain.models.reranker import Reranker, RerankerSettings, yes_no_ids

    prefix = qwen3.encode(QWEN3_RERANKER_PREFIX, add_special_tokens=False)
    suffix = qwen3.encode(QWEN3_RERANKER_SUFFIX, add_special_tokens=False)
    assert len(prefix) == 39
    assert suffix == [151645, 198, 151644, 77091, 198, 151667, 271, 151668, 271]
    assert yes_no_ids(qwen3) == (9693, 2152)
    template = RerankerTemplate(form="yes_no")
    reranker = Reranker(None, qwen3, RerankerSettings(max_tokens=120, template=template))
    (pair,) = reranker.tokenize("deploy pods", [SKILL])
    body = template.render_query("deploy pods") + template.render_skill(SKILL)
    assert pair.ids == qwen3.encode(QWEN3_RERANKER_PREFIX + body + QWEN3_RERANKER_SUFFIX, add_special_tokens=False)
    (long,) = reranker.tokenize("deploy pods", [Skill("s", "n", "d", "word " * 400)])
    assert (
        len(long) == 120 and long.ids[-9:] == suffix and long.ids[: pair.second_start] == pair.ids[: pair.second_start]
    )


@pytest.mark.parametrize("appends_end", [False, True])
def test_qwen3_embedding_texts_end_with_endoftext_once(qwen3, appends_end):
    from tokenizers.processors import TemplateProcessing

    from skilltrain.models.encoder import Encoder, EncoderSettings

    if appends_end:  # as Qwen3-Embedding's own tokenizer does
        qwen3.backend_tokenizer.post_processor = TemplateProcessing(
            single="$A <|endoftext|>", pair="$A $B <|endoftext|>", special_tokens=[("<|endoftext|>", 151643)]
        )
    encoder = Encoder(None, qwen3, EncoderSettings(pooling="last_token"))
    texts = encoder.tokenize(["", "deploy pods", "word " * 100, "运行 skill 🚀" * 20], 16)
    assert [text.count(151643) for text in texts] == [1] * 4 and [text[-1] for text in texts] == [151643] * 4
    assert [len(text) for text in texts] == [1, 3, 16, 16]
