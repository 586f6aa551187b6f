"""Adapters: only they train, merging changes no score, and a saved model shows no trace of them."""

import importlib.util

import pytest
import torch
from transformers import AutoModel, Qwen3Config, Qwen3Model

from skilltrain.errors import SkilltrainError
from skilltrain.export.folder import save_model
from skilltrain.models.adapters import AdapterConfig, add_adapter, is_adapted, merge_adapter, quantizing_options
from skilltrain.models.encoder import Encoder, EncoderConfig, load_encoder
from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate
from tiny_models import qwen3_tokenizer

SMALL = AdapterConfig(rank=4, alpha=8)
TEXTS = ["deploy pods", "extract text from pdf files", "translate the report and review it with care"]
SKILLS = [Skill(f"s{i}", f"chart {i}", text, text * i) for i, text in enumerate(TEXTS)]
RERANKERS = {"pair": "bert_reranker", "cosine_pair": "bert", "yes_no": "qwen3_reranker"}
KINDS = ["bert", "qwen3", *RERANKERS]


@pytest.fixture
def opened(open_encoder_of, open_reranker_of):
    """The name of an encoder or the form of a reranker, settings → a tiny one."""

    def load(kind, **settings):
        if kind not in RERANKERS:
            return open_encoder_of(kind, **settings)
        return open_reranker_of(RERANKERS[kind], template=RerankerTemplate(form=kind), **settings)

    return load


def outputs(model):
    """Vectors of the queries TEXTS, or scores of SKILLS for one query."""
    if isinstance(model, Encoder):
        return model(model.tokenize_queries(TEXTS))
    return model(model.tokenize("review a commit", SKILLS))


def train_a_little(model, outputs):
    """Three optimiser steps towards some target, on what can be trained."""
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    target = torch.randn_like(outputs(model))
    for _ in range(3):
        (outputs(model) - target).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_trained_merged_saved_and_read_again(opened, kind, tmp_path):
    """Only the adapter changes, and merged the model computes the same."""
    model = opened(kind)
    network = model.network
    with torch.no_grad():
        plain_names, before = set(network.state_dict()), outputs(model)
    add_adapter(network, SMALL)
    assert is_adapted(network)
    frozen = {name: p.clone() for name, p in network.named_parameters() if not p.requires_grad}
    with torch.no_grad():
        assert torch.equal(outputs(model), before)  # B starts at zero
    train_a_little(model, outputs)
    assert all(torch.equal(p, frozen[name]) for name, p in network.named_parameters() if name in frozen)
    with torch.no_grad():
        trained = outputs(model)
        assert (trained - before).abs().max() > 1e-3
        assert merge_adapter(network) is network
        assert (outputs(model) - trained).abs().max() <= 2e-6 * max(1, float(trained.abs().max()))
    assert not is_adapted(network) and set(network.state_dict()) == plain_names
    save_model(model, tmp_path, "base")
    source, cpu = str(tmp_path), torch.device("cpu")
    again = load_reranker(RerankerConfig(source=source), cpu) if kind in RERANKERS else None
    with torch.no_grad():
        found = outputs(again or load_encoder(EncoderConfig(source=source), cpu))
        torch.testing.assert_close(found, trained, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_base_has_a_float32_adapter(opened, kind):
    model = opened(kind, precision="bfloat16")
    add_adapter(model.network, SMALL)
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
    train_a_little(model, outputs)
    with torch.no_grad():
        trained = outputs(model)
        merge_adapter(model.network)
        torch.testing.assert_close(outputs(model), trained, atol=0.2, rtol=5e-2)
    if kind not in RERANKERS:
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("form", RERANKERS)
def test_only_adapter_and_head_train(opened, form):
    network = opened(form).network
    add_adapter(network, SMALL)
    trained = {name for name, p in network.named_parameters() if p.requires_grad}
    heads = {name for name in trained if ".lora_" not in name}
    bert_head = {f"{part}.{kind}" for part in ("classifier", "bert.pooler.dense") for kind in ("weight", "bias")}
    assert heads == (bert_head if form == "pair" else set())
    assert len(trained) > len(heads)


def test_trained_parameters_are_few_and_counted_by_hand(open_encoder_of):
    backbone = open_encoder_of("bert").backbone
    add_adapter(backbone, AdapterConfig(rank=2, targets=("attention.self.query", "intermediate.dense")))
    trained = {name: p.numel() for name, p in backbone.named_parameters() if p.requires_grad}
    # Two layers; the query layer is 32 to 32, the intermediate layer 32 to 64: rank (in + out) each.
    assert sum(trained.values()) == 2 * (2 * (32 + 32) + 2 * (32 + 64))
    assert {name.partition(".lora_")[0].rpartition(".")[2] for name in trained} == {"query", "dense"}


def test_head_of_two_rows_stays_whole(open_reranker_of):
    """The yes and no rows are read from the frozen head, tied to the embeddings, which no adapter may wrap."""
    network = open_reranker_of("qwen3_reranker").network
    add_adapter(network, SMALL)
    head = network.get_output_embeddings()
    assert type(head) is torch.nn.Linear
    assert not head.weight.requires_grad
    assert network.get_decoder() is network.model
    assert type(network).__name__ == "Qwen3ForCausalLM"


def test_unmerged_model_is_not_saved(open_encoder_of, tmp_path):
    encoder = open_encoder_of("bert")
    add_adapter(encoder.backbone, SMALL)
    with pytest.raises(SkilltrainError, match="not merged"):
        save_model(encoder, tmp_path, "base")


def test_bad_input_is_named(open_encoder_of):
    backbone = open_encoder_of("qwen3").backbone
    with pytest.raises(SkilltrainError, match=r"ends with 'query'.*q_proj, k_proj, .*down_proj"):
        add_adapter(backbone, AdapterConfig(targets=("q_proj", "query")))
    with pytest.raises(SkilltrainError, match="ends with 'proj'"):  # a whole name, not a part of one
        add_adapter(backbone, AdapterConfig(targets=("proj",)))
    with pytest.raises(SkilltrainError, match="ends with 'embed_tokens'"):
        add_adapter(backbone, AdapterConfig(targets=("embed_tokens",)))
    assert not is_adapted(backbone)
    with pytest.raises(SkilltrainError, match="no adapter to merge"):
        merge_adapter(backbone)
    add_adapter(backbone, SMALL)
    with pytest.raises(SkilltrainError, match="already has an adapter"):
        add_adapter(backbone, SMALL)


def test_four_bits_without_bitsandbytes(monkeypatch):
    assert quantizing_options(None) == quantizing_options(SMALL) == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SkilltrainError, match=r"pip install 'skilltrain\[qlora\]'"):
        quantizing_options(AdapterConfig(quantize="nf4"))


class TestFourBits:
    """QLoRA, on the CPU; it is trained, merged and saved in test_loop_qlora.py."""

    ADAPTER = AdapterConfig(rank=4, alpha=8, quantize="nf4")

    @pytest.fixture(autouse=True)
    def _bitsandbytes(self):
        pytest.importorskip("bitsandbytes")

    def save(self, folder, width):
        """A Qwen3 whose layers are `width` wide."""
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=len(qwen3_tokenizer(True)), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, intermediate_size=128, max_position_embeddings=256,
            initializer_range=0.1,
        )  # fmt: skip
        Qwen3Model(config).save_pretrained(folder)
        return folder

    def load(self, folder):
        """The model with 4-bit weights."""
        return AutoModel.from_pretrained(folder, dtype=torch.float32, **quantizing_options(self.ADAPTER)).eval()

    def test_quantized_layers_without_an_adapter_become_plain_too(self, tmp_path):
        network = self.load(self.save(tmp_path, 64))
        add_adapter(network, self.ADAPTER.model_copy(update={"targets": ("q_proj",)}))
        merge_adapter(network)
        assert {type(m).__name__ for m in network.modules() if "Linear" in type(m).__name__} == {"Linear"}

    def test_a_width_that_the_cpu_kernel_gets_wrong_is_refused(self, tmp_path):
        network = self.load(self.save(tmp_path, 96))
        with pytest.raises(SkilltrainError, match=r"layers.0.self_attn.q_proj is 96 wide"):
            add_adapter(network, self.ADAPTER)
