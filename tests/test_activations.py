"""What a forward pass keeps, counted without computing; that layers are computed twice is in test_micro_batches.py."""

import copy

import pytest
import torch
from transformers import MPNetConfig, MPNetModel

from skilltrain.errors import SkilltrainError
from skilltrain.losses import InfoNCE, ListwiseCE
from skilltrain.models.activations import checkpoint_layers, layer_bytes
from skilltrain.models.adapters import AdapterConfig, add_adapter
from skilltrain.templates import EncoderTemplate
from skilltrain.training.steps import EncoderStep, RerankerStep, StepSettings
from skilltrain.training.training_plan import planned_activations
from test_plan import NAME_ONLY, lists_by_hand
from training_data import training_set


def kept_in_truth(network, num_tokens, dtype):
    """Bytes of all that autograd keeps in a forward pass of one text."""
    kept = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor
    )
    with hooks, torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        network(input_ids=torch.zeros(1, num_tokens, dtype=torch.long))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["bert_dropout", "qwen3"])
@pytest.mark.parametrize("adapter", [None, AdapterConfig(rank=4, dropout=0.1)])
def test_the_bytes_of_a_layer_are_those_that_autograd_keeps(open_encoder_of, name, dtype, adapter):
    network = open_encoder_of(name).backbone
    if adapter:
        add_adapter(network, adapter)
    found = layer_bytes(network, dtype)
    assert not network.training and layer_bytes(copy.deepcopy(network).to("meta"), dtype) == found
    network.train()
    expected = (kept_in_truth(network, 128, dtype) - kept_in_truth(network, 64, dtype)) / 64 / 2
    assert found == pytest.approx(expected, rel=0.02)


def test_the_largest_batch_by_hand(open_encoder_of):
    encoder = open_encoder_of("bert", max_tokens=12, template=EncoderTemplate(skill=NAME_ONLY))
    data, of_layer = lists_by_hand(), layer_bytes(encoder.backbone, torch.float32)
    # Queries of 4 and 6 tokens; skills of 3, 5, 12 and 12: five of them padded to 12, the last alone.
    for recompute, expected in ((False, 63 * 2 * of_layer), (True, 63 * 2 * 32 * 4 + 60 * of_layer)):
        step = EncoderStep(encoder, InfoNCE(), data, StepSettings(64, recompute))
        assert step.slots(data.lists) == [60, 3]
        assert planned_activations(step, [data.lists[:1], data.lists], torch.float32) == expected


@pytest.mark.parametrize("name", ["bert_reranker", "qwen3_reranker"])
def test_a_rerankers_micro_batches_are_those_it_runs(open_reranker_of, name):
    step = RerankerStep(open_reranker_of(name), ListwiseCE(), training_set(5), StepSettings(300))
    step(step.data.lists)
    assert sum(step.slots(step.data.lists)) == step.count.slots
    assert planned_activations(step, [step.data.lists], torch.float32) > 0


def test_a_network_that_cannot_recompute_is_refused():
    network = MPNetModel(MPNetConfig(vocab_size=10, hidden_size=8, num_hidden_layers=1, num_attention_heads=1))
    with pytest.raises(SkilltrainError, match="MPNetModel cannot recompute its layers"):
        checkpoint_layers(network)
