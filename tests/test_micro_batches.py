"""Micro-batches: groups of texts within a token budget."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.micro_batches import micro_batches, run_micro_batches

some_texts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=40)


@given(some_texts, st.integers(1, 100))
def test_micro_batches_keep_to_budget(texts, budget):
    lengths = [*map(len, texts)]

    groups = micro_batches(lengths, budget)

    grouped_lengths = [[lengths[position] for position in group] for group in groups]
    assert [*chain(*grouped_lengths)] == sorted(lengths, reverse=True)
    for group in grouped_lengths:
        assert len(group) == 1 or max(group) * len(group) <= budget


@given(some_texts, st.integers(1, 100))
def test_results_are_in_order_of_texts(texts, budget):
    batch_sizes = []

    def total(batch):
        batch_sizes.append(len(batch))
        return torch.tensor([[float(sum(text)), float(len(text))] for text in batch])

    results = run_micro_batches(total, texts, micro_batches([*map(len, texts)], budget))

    assert results.tolist() == [[sum(text), len(text)] for text in texts]
    assert sum(batch_sizes) == len(texts)


def test_groups_by_hand():
    # Budget 10: the 9 alone, then 5 and 4 (padded 10), then 2, 2, 1 (padded 6).
    assert micro_batches([2, 9, 5, 1, 4, 2], 10) == [[1], [2, 4], [0, 5, 3]]
    assert micro_batches([50, 3], 10) == [[0], [1]]


def run_backward(encoder, recompute):
    """Return the loss, the gradients and the number of times that a layer ran."""
    calls = []
    for layer in encoder.backbone.encoder.layer:
        layer.attention.register_forward_hook(lambda *_: calls.append(1))
    if recompute:
        checkpoint_layers(encoder.backbone)
    torch.manual_seed(3)
    texts = encoder.tokenize(
        ["deploy pods", "chart", "review the merge commit " * 8, "audio video clip " * 5], 128
    )
    loss = run_micro_batches(encoder, texts, micro_batches([*map(len, texts)], 40))[:, :5].sum()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in encoder.parameters()]
    return loss.item(), gradients, len(calls)


def test_recomputed_layers_have_same_dropout(open_encoder_of):
    plain = open_encoder_of("bert_dropout").double().train()
    expected_loss, expected_gradients, num_calls = run_backward(plain, recompute=False)

    recomputing = open_encoder_of("bert_dropout").double().train()
    loss, gradients, num_repeated_calls = run_backward(recomputing, recompute=True)

    assert num_repeated_calls == 2 * num_calls > 0
    assert loss == pytest.approx(expected_loss, abs=1e-12)
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert (gradient - expected).abs().max() < 1e-9
