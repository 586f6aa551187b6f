import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from skilltrain.errors import SkilltrainError
from skilltrain.models.encoder import EncoderConfig, load_encoder
from skilltrain.models.pooling import pool
from skilltrain.templates import EncoderTemplate

CPU = torch.device("cpu")
TEXTS = [
    "deploy pods",
    "",
    "review the merge commit of the agent " * 6,
    "chart",
    "运行 clip 🚀",
    "extract pdf text " * 40,
]


def test_pooling_by_hand():
    hidden = torch.tensor([[[1.0, 2.0], [3.0, 4.0], [9.0, 9.0]], [[1.0, 0.0], [2.0, 0.0], [6.0, 3.0]]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert pool(hidden, mask, "cls").tolist() == [[1, 2], [1, 0]]
    assert pool(hidden, mask, "last_token").tolist() == [[3, 4], [6, 3]]
    assert pool(hidden, mask, "mean").tolist() == [[2, 3], [3, 1]]


@pytest.mark.parametrize(
    ("name", "pooling"), [("bert", "mean"), ("bert", "cls"), ("qwen3", "last_token"), ("qwen3", "mean")]
)
def test_a_padded_batch_equals_one_text_at_a_time(open_encoder_of, name, pooling):
    encoder = open_encoder_of(name, pooling=pooling)
    ids = encoder.tokenize(TEXTS, 100)
    with torch.inference_mode():
        together = encoder(ids)
        alone = torch.cat([encoder([text]) for text in ids if text])
    assert torch.allclose(together[[i for i, text in enumerate(ids) if text]], alone, atol=1e-5)
    assert torch.allclose(together.norm(dim=1), torch.ones(len(TEXTS)), atol=1e-6)


def test_bert_equals_plain_transformers_code(open_encoder_of, model_folders):
    encoder, model = open_encoder_of("bert"), AutoModel.from_pretrained(model_folders["bert"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(model_folders["bert"])
    inputs = tokenizer(TEXTS, padding=True, truncation=True, max_length=100, return_tensors="pt")
    with torch.inference_mode():
        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        expected = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
        assert torch.allclose(encoder(encoder.tokenize(TEXTS, 100)), expected, atol=1e-5)


def test_mean_pooling_keeps_what_the_tokenizer_gives(open_encoder_of):
    encoder = open_encoder_of("bert")
    assert encoder.tokenize(["deploy pods"], 8) == [encoder.tokenizer("deploy pods")["input_ids"]]
    (cut,) = encoder.tokenize(["pods " * 20], 8)
    assert len(cut) == 8 and cut[-1] == encoder.tokenizer.sep_token_id


def test_queries_are_rendered_with_their_own_limit(open_encoder_of):
    template = EncoderTemplate(instruction="find the skill", query_chars=11)
    encoder = open_encoder_of("qwen3", template=template, query_max_tokens=16, max_tokens=8)
    assert encoder.tokenizer.decode(encoder.tokenize_queries(["pods chart and audio"])[0]).startswith("Instruct: find")
    encoder = open_encoder_of("qwen3", template=template)
    rendered = "Instruct: find the skill\nQuery:pods chart <|endoftext|>"
    assert encoder.tokenizer.decode(encoder.tokenize_queries(["pods chart and audio"])[0]) == rendered


def test_attention_dropout_is_off_and_the_pooler_is_gone(open_encoder_of):
    backbone = open_encoder_of("bert_dropout").backbone
    assert backbone.config.attention_probs_dropout_prob == 0 and backbone.config.hidden_dropout_prob == 0.1
    assert backbone.pooler is None and not backbone.training


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "no such model"),
        ("./nothing", "no such model"),
        ("package:no_such_package_here", "no installed package holds this model"),
        ("package:not a name", "no installed package holds this model"),
        ("one_word", "no such model"),
    ],
)
def test_a_model_that_is_not_there_is_one_clear_line(source, message):
    with pytest.raises(SkilltrainError, match=message) as error:
        load_encoder(EncoderConfig(source=source), CPU)
    assert error.value.where == source


def test_a_folder_that_is_no_encoder_is_refused(tmp_path, model_folders):
    with pytest.raises(SkilltrainError, match=r"is no model folder: it has no config\.json"):
        load_encoder(EncoderConfig(source=str(tmp_path)), CPU)
    with pytest.raises(SkilltrainError, match="max_tokens exceeds the model's 512 positions"):
        load_encoder(EncoderConfig(source=str(model_folders["bert"]), max_tokens=513), CPU)
