"""BERT's relatives: as many tokens as they have positions, no more segments than they know, no unused pooler."""

import pytest
import torch
from transformers import (
    AlbertConfig,
    AlbertModel,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    CamembertConfig,
    CamembertModel,
    ElectraConfig,
    ElectraModel,
    LongformerConfig,
    MPNetConfig,
    MPNetForSequenceClassification,
    MPNetModel,
    RobertaConfig,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.loading import num_positions
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Query, Skill
from skilltrain.routing.field_attention import field_attention, token_fields
from tiny_models import bert_tokenizer

CPU = torch.device("cpu")
SHORT = {"max_tokens": 32, "query_max_tokens": 32}
PAD, POSITIONS = 1, 66
ENCODERS = {
    "roberta": (RobertaModel, RobertaConfig, 64),
    "xlm-roberta": (XLMRobertaModel, XLMRobertaConfig, 64),
    "camembert": (CamembertModel, CamembertConfig, 64),
    "mpnet": (MPNetModel, MPNetConfig, 64),
    "albert": (AlbertModel, AlbertConfig, 66),
    "electra": (ElectraModel, ElectraConfig, 66),
}
RERANKERS = {
    "roberta": (RobertaForSequenceClassification, RobertaConfig),
    "xlm-roberta": (XLMRobertaForSequenceClassification, XLMRobertaConfig),
    "mpnet": (MPNetForSequenceClassification, MPNetConfig),
}
SKILLS = [Skill("a", "pdf", "extract text", "the report " * 3), Skill("b", "chart", "", "table " * 60)]


def tokenizer():
    """The tiny BERT tokenizer with the padding under RoBERTa's number."""
    found = bert_tokenizer()
    found.pad_token = found.convert_ids_to_tokens(PAD)
    return found


def save(folder, model_class, config_class):
    """A model of one layer and 66 positions; one segment, where its kind has segments, as the published ones."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = config_class(
        vocab_size=len(tokenizer()), max_position_embeddings=POSITIONS, pad_token_id=PAD, bos_token_id=2,
        eos_token_id=3, type_vocab_size=2 if config_class in (AlbertConfig, ElectraConfig) else 1, num_labels=1,
        initializer_range=0.3, **sizes,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_position_can_be_used_and_not_one_more(tmp_path, name):
    model_class, config_class, expected = ENCODERS[name]
    folder = save(tmp_path, model_class, config_class)
    encoder = load_encoder(EncoderConfig(source=folder, max_tokens=expected, query_max_tokens=expected), CPU)
    ids = encoder.tokenize(["pods " * 100, "chart"], expected)
    assert len(ids[0]) == expected
    with torch.inference_mode():
        vectors = encoder(ids)
        assert torch.allclose(encoder(encoder.embed(ids)), vectors, atol=1e-5)
        with pytest.raises((IndexError, RuntimeError)):
            encoder([[ids[0][0], *ids[0]]])
    for key in ("max_tokens", "query_max_tokens"):
        with pytest.raises(SkilltrainError, match=f"max_tokens exceeds the model's {expected} positions"):
            load_encoder(EncoderConfig(source=folder, **{key: expected + 1}), CPU)
    defaults = load_encoder(EncoderConfig(source=folder), CPU).settings
    assert (defaults.max_tokens, defaults.query_max_tokens) == (expected, expected)


def test_positions_of_published_shapes():
    assert num_positions(BertConfig(max_position_embeddings=512)) == 512
    assert num_positions(XLMRobertaConfig(max_position_embeddings=8194)) == 8192  # bge-reranker-v2-m3
    assert num_positions(MPNetConfig(max_position_embeddings=514)) == 512
    assert num_positions(LongformerConfig(max_position_embeddings=4098)) == 4096
    assert num_positions(AutoConfig.for_model("xlnet")) is None


@pytest.mark.parametrize("name", ENCODERS)
def test_without_its_pooler_every_weight_gets_a_gradient_and_the_vectors_stay(tmp_path, name):
    """DDP stops at its second step over a weight that gets none, as a pooler's would."""
    model_class, config_class, _ = ENCODERS[name]
    folder = save(tmp_path, model_class, config_class)
    encoder = load_encoder(EncoderConfig(source=folder, pooling="cls", **SHORT), CPU)
    assert [key for key, _ in encoder.named_parameters() if "pooler" in key] == []
    (ids,) = encoder.tokenize(["review the merge commit"], 32)
    vectors = encoder([ids])
    with torch.inference_mode():
        hidden = AutoModel.from_pretrained(folder).eval()(torch.tensor([ids])).last_hidden_state[:, 0]
        assert torch.allclose(vectors, torch.nn.functional.normalize(hidden, dim=-1), atol=1e-6)
    vectors[:, 0].sum().backward()
    assert [key for key, weight in encoder.named_parameters() if weight.grad is None] == []


@pytest.mark.parametrize("name", RERANKERS)
def test_a_reranker_of_one_segment_scores_as_plain_transformers_code(tmp_path, name):
    folder = save(tmp_path, *RERANKERS[name])
    reranker = load_reranker(RerankerConfig(source=folder), CPU)
    assert reranker.settings.max_tokens == 64
    pairs = reranker.tokenize("merge pdf", SKILLS)
    assert max(map(len, pairs)) == 64
    network = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        expected = torch.cat([network(torch.tensor([pair.ids])).logits[:, 0] for pair in pairs])
        assert torch.allclose(reranker(pairs), expected, atol=1e-5)
        assert torch.allclose(reranker(reranker.embed(pairs)), expected, atol=1e-5)
    with pytest.raises(SkilltrainError, match="max_tokens exceeds the model's 64 positions"):
        load_reranker(RerankerConfig(source=folder, max_tokens=65), CPU)


def test_attention_of_a_reranker_of_one_segment_is_read_and_of_mpnet_refused(tmp_path):
    folder = save(tmp_path / "xlm-roberta", *RERANKERS["xlm-roberta"])
    reranker = load_reranker(RerankerConfig(source=folder), CPU)
    found = field_attention(reranker, [(Query("q", "merge pdf", "", "", ""), SKILLS[0])], "x")
    (pair,) = reranker.tokenize("merge pdf", SKILLS[:1])
    network = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        (layer,) = network(torch.tensor([pair.ids]), output_attentions=True).attentions
    sums = layer[0, :, 0].mean(0)[pair.second_start :].numpy()
    fields = token_fields(reranker, SKILLS[0])
    sums = sums[: len(fields)] @ fields
    shares = tuple(found["overall"].values())
    assert shares == pytest.approx(sums / sums.sum(), abs=1e-5)
    reranker = load_reranker(RerankerConfig(source=save(tmp_path / "mpnet", *RERANKERS["mpnet"])), CPU)
    with pytest.raises(SkilltrainError, match="MPNetForSequenceClassification can be read in 0 of its 1 layers only"):
        field_attention(reranker, [(Query("q", "merge pdf", "", "", ""), SKILLS[0])], "x")
