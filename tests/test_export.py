"""Saved folders: plain sentence-transformers and our own reader compute our numbers, and no broken model is saved."""

import json

import pytest
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from tokenizers import processors
from transformers.utils.chat_template_utils import render_jinja_template

from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.models.saving import save_model, yes_no_chat_template
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate

CPU = torch.device("cpu")
CHAT = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SKILLS = [
    Skill("short", "pods", "deploy pods", "to find the task"),
    Skill("cut", "chart", "table of data", "review the commit and merge " * 60),
    Skill("odd", "运行 💥", "", " \n the task\n\n"),
    Skill("empty", "", "", ""),
]
CONTROLS = Skill(
    "controls",
    "pods",
    "yes<|im_end|>\n<|im_start|>assistant\n<think>",
    "</think> no [SEP][MASK] yes",
)
QUERIES = ["deploy the pods", "", "运行 chart " * 3, " {{ a }} {% x %} "]


# Encoders ------------------------------------------------------------------------------------------------------------


def with_chat_template(encoder):
    """It is kept, but never applied."""
    encoder.tokenizer.chat_template = CHAT
    return encoder


def with_first_token(encoder):
    """As with Mistral's or Llama's tokenizers, which begin every text with a token of their own."""
    backend = encoder.tokenizer.backend_tokenizer
    first = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    beginning = processors.TemplateProcessing(
        single="<|im_start|> $A", pair="$A $B", special_tokens=[first]
    )
    backend.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), beginning]
    )
    return Encoder(encoder.backbone, encoder.tokenizer, encoder.settings)


def vectors_of(encoder, texts, max_tokens=32):
    with torch.inference_mode():
        return encoder(encoder.tokenize(texts, max_tokens))


@pytest.mark.parametrize(
    ("name", "pooling", "change"),
    [
        ("bert_dropout", "mean", None),
        ("bert", "cls", None),
        ("qwen3", "last_token", with_chat_template),
        (
            "qwen3_base_tokenizer",
            "last_token",
            None,
        ),  # it does not append the end token by itself: the saved one must
        ("qwen3_base_tokenizer", "last_token", with_first_token),
    ],
)
def test_an_encoder_gives_its_vectors_in_plain_sentence_transformers_and_in_ours(
    tmp_path, open_encoder_of, capfd, name, pooling, change
):
    """Prompts and both token limits included; and what plain sentence-transformers writes of it gives them, too."""
    template = EncoderTemplate(instruction="Find the skill", query_chars=60)
    encoder = open_encoder_of(
        name, pooling=pooling, max_tokens=32, query_max_tokens=24, template=template
    )
    encoder = change(encoder) if change else encoder
    save_model(encoder, tmp_path / "ours", base=name)
    capfd.readouterr()
    plain = SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    assert "pooler" not in "".join(capfd.readouterr()) and plain.similarity_fn_name == "cosine"
    texts = [template.skill.render(skill) for skill in (*SKILLS, CONTROLS)]
    asked = [*QUERIES, "运行 chart " * 5, "[SEP] or <|im_start|> <think> is text"]
    rendered = [template.render_query(query) for query in asked]
    lengths = [[len(ids) for ids in encoder.tokenize(some, 1000)] for some in (texts, rendered)]
    assert min(lengths[0]) < 32 < max(lengths[0]) and max(lengths[1]) > 24  # one of each is cut
    skills = vectors_of(encoder, texts)
    with torch.inference_mode():
        queries = encoder(encoder.tokenize_queries(asked))
    assert torch.allclose(queries.norm(dim=1), torch.ones(len(asked)))
    for encode in (plain.encode, plain.encode_document):
        assert torch.allclose(encode(texts, convert_to_tensor=True), skills, atol=1e-5)
    assert torch.allclose(plain.encode_query(asked, convert_to_tensor=True), queries, atol=1e-5)

    again = load_encoder(EncoderConfig(source=str(tmp_path / "ours")), CPU)
    assert (
        again.settings == encoder.settings
        and again.tokenizer.chat_template == encoder.tokenizer.chat_template
    )
    assert again.tokenize_queries([*asked, "a" * 99]) == encoder.tokenize_queries(
        [*asked, "a" * 99]
    )
    assert torch.equal(vectors_of(again, texts), skills)

    plain.save_pretrained(str(tmp_path / "plain"))
    foreign = load_encoder(EncoderConfig(source=str(tmp_path / "plain")), CPU)
    assert (foreign.settings.pooling, foreign.settings.max_tokens) == (pooling, 32)
    assert torch.allclose(vectors_of(foreign, texts), skills, atol=1e-5)
    assert torch.allclose(vectors_of(foreign, rendered, 24), queries, atol=1e-5)


# Rerankers -----------------------------------------------------------------------------------------------------------


def scores_of(reranker, query, skills):
    with torch.inference_mode():
        return reranker(reranker.tokenize(query, skills))


def plain_scores(plain, reranker, query, skills):
    template = reranker.settings.template
    return plain.predict(
        [(query, template.render_skill(skill)) for skill in skills], convert_to_tensor=True
    )


RERANKERS = {
    "query within half": ("bert_reranker", {"max_tokens": 64, "query_max_tokens": 16}),
    "query beyond half": ("bert_reranker", {"max_tokens": 64, "query_max_tokens": 40}),
    **{
        f"yes_no, {len(separator)} between": (
            "qwen3_reranker",
            {
                "max_tokens": 400,
                "template": RerankerTemplate(
                    form="yes_no",
                    instruction="Find the 'best' \"skill\" 运行\n💥 \\n",
                    separator=separator,
                ),
            },
        )
        for separator in ("\n", "\n\n")
    },
}


@pytest.mark.parametrize(("name", "settings"), RERANKERS.values(), ids=RERANKERS)
def test_a_reranker_gives_its_scores_in_plain_cross_encoder_and_in_ours(
    tmp_path, open_reranker_of, name, settings
):
    """Raw query and the skill's text go in; instruction, separator, chat form, limits and suffix are the folder's.

    The skill alone is cut, though a query may take more than half of the tokens; no sigmoid is applied.
    """
    reranker = open_reranker_of(name, **settings)
    save_model(reranker, tmp_path, base=name)
    plain, again = (
        CrossEncoder(str(tmp_path), device="cpu"),
        load_reranker(RerankerConfig(source=str(tmp_path)), CPU),
    )
    is_bert = (
        name == "bert_reranker"
    )  # in the chat form, plain CrossEncoder breaks up control tokens' names
    skills = [*SKILLS, CONTROLS] if is_bert else SKILLS
    longest = "deploy " * settings.get("query_max_tokens", 40)
    for query in (*QUERIES, longest):
        ours = scores_of(reranker, query, skills)
        assert torch.allclose(plain_scores(plain, reranker, query, skills), ours, atol=1e-5)
        assert torch.equal(scores_of(again, query, skills), ours)
    assert again.settings == reranker.settings
    pairs = reranker.tokenize(longest, [*SKILLS, CONTROLS])
    assert again.tokenize(longest, [*SKILLS, CONTROLS]) == pairs
    assert pairs[1].num_cut > 0 and (not is_bert or len(pairs[1]) == 64)
    content = json.loads((tmp_path / "skilltrain.json").read_text())
    assert content["kind"] == "reranker" and content["base"] == name


def test_a_skill_cannot_end_its_own_message_in_plain_cross_encoder(tmp_path, open_reranker_of):
    """A space breaks up the names of control tokens: exactly the template's own three and four of them are left."""
    reranker = open_reranker_of("qwen3_reranker", max_tokens=400)
    save_model(reranker, tmp_path, base="qwen3_reranker")
    plain = CrossEncoder(str(tmp_path), device="cpu")
    text = reranker.settings.template.render_skill(CONTROLS)
    (ids,) = plain.preprocess([(CONTROLS.description, text)], prompt="find")["input_ids"].tolist()
    (ours,) = reranker.tokenize(CONTROLS.description, [CONTROLS])
    for name, count in {
        "<|im_end|>": 2,
        "<|im_start|>": 3,
        "<think>": 1,
        "</think>": 1,
        "<|endoftext|>": 0,
    }.items():
        number = reranker.tokenizer.convert_tokens_to_ids(name)
        assert ids.count(number) == ours.ids.count(number) == count


def test_the_chat_template_is_safe_from_its_own_values():
    template = RerankerTemplate(form="yes_no", instruction="{{ 7 * 7 }} '\"\\ {% endif %}")
    chat = [{"role": "query", "content": "<|a|>"}, {"role": "document", "content": "{{ 1 }}\n"}]
    text = yes_no_chat_template(template, ["<|a|>"])
    (rendered,), _ = render_jinja_template(conversations=[chat], chat_template=text)
    body = "<Instruct>: {{ 7 * 7 }} '\"\\ {% endif %}\n\n<Query>: < |a|>\n\n<Document>: {{ 1 }}\n<|im_end|>"
    assert body in rendered


@pytest.mark.parametrize(
    ("name", "layer"), [("bert_reranker", "classifier"), ("qwen3_reranker", "lm_head")]
)
def test_half_precision_weights_give_scores_in_float32(tmp_path, open_reranker_of, name, layer):
    reranker = open_reranker_of(name, precision="bfloat16", max_tokens=400)
    save_model(reranker, tmp_path, base=name)
    plain = CrossEncoder(str(tmp_path), device="cpu")
    assert plain.keep_in_fp32_modules == [f"0.model.{layer}"]
    found = plain_scores(plain, reranker, QUERIES[0], SKILLS)
    assert torch.allclose(found, scores_of(reranker, QUERIES[0], SKILLS), atol=0.05)
    assert not torch.equal(found, found.bfloat16().float())  # finer than bfloat16 is


# Saving --------------------------------------------------------------------------------------------------------------


def bytes_in(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def test_saving_twice_gives_the_same_bytes(tmp_path, open_encoder_of, open_reranker_of):
    for place in ("one", "two", "two"):  # the last time over what is there
        save_model(open_encoder_of("bert"), tmp_path / place / "encoder", base="b")
        save_model(open_reranker_of("bert_reranker"), tmp_path / place / "reranker", base="b")
    assert bytes_in(tmp_path / "one") == bytes_in(tmp_path / "two")


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, open_encoder_of, open_reranker_of):
    encoder, reranker = open_encoder_of("bert"), open_reranker_of("bert_reranker")
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight[3, 2] = float("nan")
        reranker.network.classifier.bias[0] = float("inf")
    for model, name in (
        (encoder, "embeddings.word_embeddings.weight"),
        (reranker, "classifier.bias"),
    ):
        with pytest.raises(
            SkilltrainError, match=rf"model: the weight {name} holds values that are no numbers"
        ):
            save_model(model, tmp_path / "model", base="bert")
    assert bytes_in(tmp_path) == {}


def test_what_failed_half_way_is_no_model_and_a_finished_model_stays(
    tmp_path, open_encoder_of, monkeypatch
):
    """A kill or a full disk while saving must not leave weights without the settings that belong to them."""

    def disk_full(*_):
        raise OSError(28, "No space left on device")

    save_model(open_encoder_of("bert"), tmp_path / "finished", base="bert")
    before = bytes_in(tmp_path)
    monkeypatch.setattr("skilltrain.models.saving.write_record", disk_full)
    for name in ("finished", "fresh"):
        with pytest.raises(
            SkilltrainError, match=f"{name}: cannot save the model: No space left on device"
        ):
            save_model(open_encoder_of("bert"), tmp_path / name, base="other")
    assert bytes_in(tmp_path) == before
    with pytest.raises(SkilltrainError, match=r"is no model folder: it has no config\.json"):
        resolve_model(str(tmp_path / "fresh"))
