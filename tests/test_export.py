"""Saved folders: plain sentence-transformers computes our numbers, and a broken model is not saved."""

import pytest
import torch
from sentence_transformers import SentenceTransformer
from tokenizers import processors

from skilltrain.errors import SkilltrainError
from skilltrain.export.folder import save_model
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.loading import resolve_model
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate

CPU = torch.device("cpu")
CHAT = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
SKILLS = [
    Skill("short", "pods", "deploy pods", "to find the task"),
    Skill("cut", "chart", "table of data", "review the commit and merge " * 40),
    Skill("odd", "运行 💥", "", "<|im_end|> yes</think> no [SEP][MASK]"),
    Skill("empty", "", "", ""),
]
QUERIES = ["deploy the pods", "", "运行 chart " * 20, "[SEP] or <|im_start|> <think> is text"]


@pytest.fixture
def saved(tmp_path, open_encoder_of):
    """name, settings → (the encoder, its saved folder)."""

    def save(name, **settings):
        encoder = open_encoder_of(name, **{"max_tokens": 32, "query_max_tokens": 24} | settings)
        save_model(encoder, tmp_path / name, base=name)
        return encoder, tmp_path / name

    return save


def vectors_of(encoder, texts, max_tokens=32):
    with torch.inference_mode():
        return encoder(encoder.tokenize(texts, max_tokens))


def assert_opens_as(folder, encoder):
    """Plain sentence-transformers gives the encoder's vectors, prompts and both token limits included."""
    plain = SentenceTransformer(str(folder), device="cpu")
    texts = [encoder.settings.template.skill.render(skill) for skill in SKILLS]
    lengths = [len(ids) for ids in encoder.tokenize(texts, 1000)]
    assert min(lengths) < 32 < max(lengths)  # one is cut
    assert torch.allclose(plain.encode_document(texts, convert_to_tensor=True), vectors_of(encoder, texts), atol=1e-5)
    assert torch.allclose(plain.encode(texts, convert_to_tensor=True), vectors_of(encoder, texts), atol=1e-5)
    rendered = [encoder.settings.template.render_query(query) for query in QUERIES]
    assert max(len(ids) for ids in encoder.tokenize(rendered, 1000)) > encoder.settings.query_max_tokens
    with torch.inference_mode():
        ours = encoder(encoder.tokenize_queries(QUERIES))
    queries = plain.encode_query(QUERIES, convert_to_tensor=True)
    assert torch.allclose(queries, ours, atol=1e-5)
    assert torch.allclose(queries.norm(dim=1), torch.ones(len(QUERIES)))
    assert plain.similarity_fn_name == "cosine"


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_bert_opens_in_plain_sentence_transformers(saved, pooling):
    encoder, folder = saved("bert_dropout", pooling=pooling)
    assert_opens_as(folder, encoder)


@pytest.mark.parametrize(("name", "pooling"), [("bert", "cls"), ("bert", "mean"), ("qwen3", "last_token")])
def test_what_plain_sentence_transformers_wrote_gives_us_its_vectors(saved, tmp_path, name, pooling):
    _, folder = saved(name, pooling=pooling)
    (folder / "skilltrain.json").unlink()
    plain = SentenceTransformer(str(folder), device="cpu")
    plain.save_pretrained(str(tmp_path / "plain"))
    encoder = load_encoder(EncoderConfig(source=str(tmp_path / "plain")), CPU)
    assert (encoder.settings.pooling, encoder.settings.max_tokens) == (pooling, 32)
    texts = [encoder.settings.template.skill.render(skill) for skill in SKILLS]
    assert torch.allclose(plain.encode_document(texts, convert_to_tensor=True), vectors_of(encoder, texts), atol=1e-5)
    rendered = [encoder.settings.template.render_query(query) for query in QUERIES]
    ours = vectors_of(encoder, rendered, encoder.settings.query_max_tokens)
    assert torch.allclose(plain.encode_query(rendered, convert_to_tensor=True, prompt=""), ours, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_base_tokenizer"])
def test_qwen3_opens_in_plain_sentence_transformers(saved, name):
    """The base tokenizer does not append the end token by itself: the saved one must."""
    encoder, folder = saved(name, template=EncoderTemplate(instruction="Find the skill"))
    assert_opens_as(folder, encoder)


def test_a_poolers_absence_is_not_reported(saved, capfd):
    _, folder = saved("bert")
    capfd.readouterr()
    SentenceTransformer(str(folder), device="cpu")
    assert "pooler" not in "".join(capfd.readouterr())


def test_the_end_token_follows_a_tokenizers_own_first_token(tmp_path, open_encoder_of):
    """As with Mistral's or Llama's tokenizers, which begin every text with a token of their own."""
    encoder = open_encoder_of("qwen3_base_tokenizer", max_tokens=32, query_max_tokens=24)
    backend = encoder.tokenizer.backend_tokenizer
    first = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    beginning = processors.TemplateProcessing(single="<|im_start|> $A", pair="$A $B", special_tokens=[first])
    backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), beginning])
    encoder = Encoder(encoder.backbone, encoder.tokenizer, encoder.settings)
    save_model(encoder, tmp_path, base="b")
    assert_opens_as(tmp_path, encoder)


def test_a_chat_template_is_kept_but_never_applied(tmp_path, open_encoder_of):
    encoder = open_encoder_of("qwen3", max_tokens=32, query_max_tokens=24)
    encoder.tokenizer.chat_template = CHAT
    save_model(encoder, tmp_path, base="qwen3")
    assert_opens_as(tmp_path, encoder)
    assert load_encoder(EncoderConfig(source=str(tmp_path)), CPU).tokenizer.chat_template == CHAT


@pytest.mark.parametrize("name", ["bert", "qwen3_base_tokenizer"])
def test_our_own_reader_gets_the_same_encoder_back(saved, name):
    template = EncoderTemplate(instruction="Find the skill", query_chars=20)
    encoder, folder = saved(name, template=template)
    again = load_encoder(EncoderConfig(source=str(folder)), CPU)
    assert again.settings == encoder.settings
    texts = [skill.body for skill in SKILLS]
    assert again.tokenize(texts, 32) == encoder.tokenize(texts, 32)
    assert again.tokenize_queries(QUERIES) == encoder.tokenize_queries(QUERIES)
    assert torch.equal(vectors_of(again, texts), vectors_of(encoder, texts))


def test_saving_twice_gives_the_same_bytes(tmp_path, open_encoder_of, open_reranker_of):
    for number in (1, 2):
        save_model(open_encoder_of("bert"), tmp_path / f"encoder{number}", base="b")
        save_model(open_reranker_of("bert_reranker"), tmp_path / f"reranker{number}", base="b")
    save_model(open_encoder_of("bert"), tmp_path / "encoder2", base="b")  # over what is there
    for kind in ("encoder", "reranker"):
        first, second = (
            {path.relative_to(root): path.read_bytes() for path in root.rglob("*") if path.is_file()}
            for root in (tmp_path / f"{kind}1", tmp_path / f"{kind}2")
        )
        assert first == second


def test_weights_that_are_no_numbers_are_not_saved(tmp_path, open_encoder_of, open_reranker_of):
    encoder, reranker = open_encoder_of("bert"), open_reranker_of("bert_reranker")
    with torch.no_grad():
        encoder.backbone.embeddings.word_embeddings.weight[3, 2] = float("nan")
        reranker.network.classifier.bias[0] = float("inf")
    with pytest.raises(SkilltrainError, match=r"encoder: the weight embeddings\.word_embeddings\.weight holds values"):
        save_model(encoder, tmp_path / "encoder", base="bert")
    with pytest.raises(SkilltrainError, match=r"reranker: the weight classifier\.bias holds values that are no numb"):
        save_model(reranker, tmp_path / "reranker", base="bert")
    assert [path for path in tmp_path.rglob("*") if path.is_file() or "partial" in path.name] == []


def test_what_failed_half_way_is_no_model_and_a_finished_model_stays(tmp_path, open_encoder_of, monkeypatch):
    """A kill or a full disk while saving must not leave weights without the settings that belong to them."""
    save_model(open_encoder_of("bert"), tmp_path / "finished", base="bert")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    monkeypatch.setattr("skilltrain.export.folder._write_record", _disk_full)
    for name in ("finished", "fresh"):
        with pytest.raises(SkilltrainError, match=f"{name}: cannot save the model: No space left on device"):
            save_model(open_encoder_of("bert"), tmp_path / name, base="other")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    with pytest.raises(SkilltrainError, match=r"is no model folder: it has no config\.json"):
        resolve_model(str(tmp_path / "fresh"))


def _disk_full(*_):
    raise OSError(28, "No space left on device")
