import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.losses import InfoNCE, ScoredBatch
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.micro_batches import micro_batches, pad
from tiny_models import map_micro_batches

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(lengths, st.integers(1, 1000))
def test_every_text_once_and_the_budget_is_kept(lengths, budget):
    groups = micro_batches(lengths, budget)
    assert sorted(position for group in groups for position in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[position] for position in group) * len(group) <= budget
    order = [lengths[position] for group in groups for position in group]
    assert order == sorted(order, reverse=True)


def test_groups_by_hand():
    # Budget 10: the 9 alone, then 5 and 4 (padded 10), then 2, 2, 1 (padded 6).
    assert micro_batches([2, 9, 5, 1, 4, 2], 10) == [[1], [2, 4], [0, 5, 3]]
    assert micro_batches([50, 3], 10) == [[0], [1]]


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), min_size=1, max_size=20), st.integers(1, 40))
def test_results_come_in_the_order_of_the_texts(texts, budget):
    seen = []

    def total(batch):
        seen.append(len(batch))
        return torch.tensor([[float(sum(text)), float(len(text))] for text in batch])

    result = map_micro_batches(total, texts, budget)
    assert result.tolist() == [[sum(text), len(text)] for text in texts]
    assert sum(seen) == len(texts)


def test_padding_stands_on_the_right():
    ids, mask = pad([[5, 6, 7], [8]], 0, torch.device("cpu"))
    assert ids.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0]]


TEXTS = ["deploy pods", "chart", "review the merge commit " * 8, "audio video clip " * 5, "extract pdf text", "task"]


def loss_and_gradients(encoder, texts, budget):
    """Loss and gradients of an InfoNCE over texts 0-2 as queries and 3-5 as skills."""
    encoder.zero_grad()
    vectors = map_micro_batches(encoder, encoder.tokenize(texts, 128), budget)
    scores = vectors[:3] @ vectors[3:].T
    loss = InfoNCE()(ScoredBatch(scores, torch.eye(3).to(scores), torch.ones(3, 3, dtype=torch.bool)))
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in encoder.parameters()]


def test_every_layer_is_computed_again_with_the_same_dropout(open_encoder_of):
    results, calls = [], []
    for recompute in (False, True):
        encoder = open_encoder_of("bert_dropout").double().train()
        for layer in encoder.backbone.encoder.layer:
            layer.attention.register_forward_hook(lambda *_, recompute=recompute: calls.append(recompute))
        if recompute:
            checkpoint_layers(encoder.backbone)
        torch.manual_seed(3)
        results.append(loss_and_gradients(encoder, TEXTS, 40))
    (loss, gradients), (again, repeated) = results
    assert calls.count(True) == 2 * calls.count(False) > 0
    assert loss == pytest.approx(again, abs=1e-12)
    assert max((a - b).abs().max().item() for a, b in zip(gradients, repeated, strict=True)) < 1e-9
