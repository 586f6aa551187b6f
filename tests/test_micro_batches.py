import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.micro_batches import micro_batches, run_micro_batches

some_texts = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=30), min_size=1, max_size=40)


@given(some_texts, st.integers(1, 100))
def test_every_text_once_within_the_budget_and_in_its_order(texts, budget):
    lengths, seen = [*map(len, texts)], []
    groups = micro_batches(lengths, budget)

    for group in groups:
        assert (
            len(group) == 1 or max(lengths[position] for position in group) * len(group) <= budget
        )

    order = [lengths[position] for group in groups for position in group]

    assert order == sorted(lengths, reverse=True)

    def total(batch):
        seen.append(len(batch))
        return torch.tensor([[float(sum(text)), float(len(text))] for text in batch])

    assert run_micro_batches(total, texts, groups).tolist() == [
        [sum(text), len(text)] for text in texts
    ]
    assert sum(seen) == len(texts)


def test_groups_by_hand():
    # Budget 10: the 9 alone, then 5 and 4 (padded 10), then 2, 2, 1 (padded 6).
    assert micro_batches([2, 9, 5, 1, 4, 2], 10) == [[1], [2, 4], [0, 5, 3]]
    assert micro_batches([50, 3], 10) == [[0], [1]]


def test_every_layer_is_computed_again_with_the_same_dropout(open_encoder_of):
    results, calls = [], []
    for recompute in (False, True):
        encoder = open_encoder_of("bert_dropout").double().train()
        for layer in encoder.backbone.encoder.layer:
            layer.attention.register_forward_hook(
                lambda *_, recompute=recompute: calls.append(recompute)
            )
        if recompute:
            checkpoint_layers(encoder.backbone)
        torch.manual_seed(3)
        texts = encoder.tokenize(
            ["deploy pods", "chart", "review the merge commit " * 8, "audio video clip " * 5], 128
        )
        loss = run_micro_batches(encoder, texts, micro_batches([*map(len, texts)], 40))[:, :5].sum()
        loss.backward()
        results.append(
            (loss.item(), [parameter.grad.clone() for parameter in encoder.parameters()])
        )

    (loss, gradients), (again, repeated) = results

    assert calls.count(True) == 2 * calls.count(False) > 0
    assert loss == pytest.approx(again, abs=1e-12)
    assert max((a - b).abs().max().item() for a, b in zip(gradients, repeated, strict=True)) < 1e-9
