import functools
import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from skilltrain.models import shared_prompt
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.micro_batches import model_inputs, run_micro_batches
from skilltrain.models.pairs import PairIds
from skilltrain.models.reranker import Reranker, RerankerSettings, load_reranker
from skilltrain.models.reranker import RerankerConfig as Source
from skilltrain.templates import RerankerTemplate
from tiny_models import qwen3_tokenizer, save_qwen3

CPU = torch.device("cpu")


def pairs_of(lengths, num_shared=20, seed=0):
    """Pairs of random ids that begin alike."""
    source = random.Random(seed)
    prompt = [source.randrange(300) for _ in range(num_shared)]
    return [
        PairIds(prompt + [source.randrange(300) for _ in range(length)], num_shared, 0)
        for length in lengths
    ]


PAIRS = pairs_of([7, 30, 1, 12, 30, 29, 12])


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    folder = save_qwen3(tmp_path_factory.mktemp("qwen3"), reranker=True)
    if request.param == "untied":
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(folder)
    return folder


def opened(folder):
    """The reranker, and the same network as plain transformers code reads it, both in float64."""
    reranker = load_reranker(Source(source=str(folder)), CPU).double()
    return reranker, AutoModelForCausalLM.from_pretrained(folder).double().eval()


def plain_scores(reranker, network, pairs):
    """Scores by a padded batch with all logits."""
    inputs, mask = model_inputs([pair.ids for pair in pairs], 0, CPU)
    logits = network(**inputs, attention_mask=mask).logits[
        torch.arange(len(pairs)), mask.sum(1) - 1
    ]
    yes, no = reranker.yes_no_ids
    return logits[:, yes] - logits[:, no]


def gradients(network, scores):
    network.zero_grad()
    (torch.linspace(-1, 1, len(scores), dtype=scores.dtype) * scores).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def largest_deviation(ours, theirs):
    """Of any gradient, relative to the largest entry of its tensor."""
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max() / theirs[name].abs().max() for name in ours)


@pytest.mark.parametrize(
    ("groups", "recompute"),
    [
        ([[0, 1, 2, 3, 4, 5, 6]], False),
        ([[3], [0, 6], [5, 4, 1], [2]], True),
        ([[6, 0], [], [1, 2, 3, 4, 5]], True),
    ],
)
def test_scores_and_gradients_are_those_of_the_padded_batch(folder, groups, recompute):
    reranker, network = opened(folder)
    assert reranker.is_packed
    if recompute:
        checkpoint_layers(reranker.network.train())
    scores = run_micro_batches(reranker, PAIRS, groups)
    expected = plain_scores(reranker, network, PAIRS)
    assert torch.allclose(scores, expected, rtol=0, atol=1e-12)
    ours, theirs = gradients(reranker.network, scores), gradients(network, expected)
    assert largest_deviation(ours, theirs) < 1e-7  # not less: Qwen3's norms compute in float32


def test_float32_and_bfloat16_autocast_stay_close(folder):
    reranker, network = opened(folder)
    with torch.no_grad():
        expected = plain_scores(reranker, network, PAIRS)
        assert torch.allclose(
            reranker.float()(PAIRS).double(), expected, atol=1e-5 * expected.abs().max()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = reranker(PAIRS)
        assert torch.allclose(rounded.double(), expected, atol=0.05 * expected.abs().max())
        assert rounded.dtype == torch.float32 and (rounded != rounded.bfloat16().float()).any(), (
            "not the score itself"
        )
        # Where nothing is packed, it is a network like others.
        double = reranker.double()
        assert torch.equal(plain_scores(reranker, double.network, PAIRS), expected)
        ids = torch.tensor([PAIRS[1].ids])
        assert torch.equal(double.network(ids).logits, network(ids).logits)


def causal(config_class, model_class, **options):
    """A tiny model of one of Qwen3's relatives, the same at every call."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = config_class(
        vocab_size=800, intermediate_size=64, initializer_range=0.2, **sizes, **options
    )
    return model_class(config).double().eval()


llama = functools.partial(causal, LlamaConfig, LlamaForCausalLM)
mistral = functools.partial(causal, MistralConfig, MistralForCausalLM, sliding_window=8)


@pytest.mark.parametrize(("make", "is_packed"), [(llama, True), (mistral, False)])
def test_other_causal_models_are_packed_if_they_see_all_tokens_before(make, is_packed):
    settings = RerankerSettings(template=RerankerTemplate(form="yes_no"))
    reranker = Reranker(make(), qwen3_tokenizer(appends_end=False), settings)
    assert reranker.is_packed == is_packed
    expected = plain_scores(reranker, make(), PAIRS)
    assert torch.allclose(reranker(PAIRS), expected, rtol=0, atol=1e-10)
    assert reranker.num_slots(PAIRS) == (20 + 121 if is_packed else 50 * 7)


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5)


@given(texts)
def test_every_token_stands_once_in_the_packed_row_behind_the_longest_shared_beginning(texts):
    shared = shared_prompt.num_shared(texts)
    packed = shared_prompt.PackedTexts(texts, shared, CPU)
    row = packed.join(texts)["input_ids"][0].tolist()
    assert all(len(text) > shared and text[:shared] == texts[0][:shared] for text in texts)
    assert any(
        len(text) == shared + 1 or text[: shared + 1] != texts[0][: shared + 1] for text in texts
    )
    assert len(row) == sum(map(len, texts)) - shared * (len(texts) - 1) == packed.positions.shape[1]
    used = [
        place
        for bucket in packed.buckets
        for place in bucket.tokens.flatten()[bucket.real_tokens].tolist()
    ]
    assert used == [*range(shared, len(row))]
    for text, end in zip(texts, packed.ends.tolist(), strict=True):
        first = end - len(text) + shared + 1
        assert row[:shared] + row[first : end + 1] == text
        assert packed.positions[0, first : end + 1].tolist() == [*range(shared, len(text))]


@given(texts)
def test_by_length_every_text_stands_whole_between_two_starts(texts):
    packed = shared_prompt.VarlenTexts(texts, CPU)
    row = packed.join(texts)["input_ids"][0].tolist()
    found = [row[start:stop] for start, stop in itertools.pairwise(packed.starts.tolist())]
    assert found == [texts[number] for number in packed.order]
    assert packed.lengths[0] == max(map(len, texts))


def test_groups_hold_pairs_of_one_list_within_the_budget(folder):
    reranker = load_reranker(Source(source=str(folder)), CPU)
    lists = [PAIRS, [], pairs_of([5, 200, 5], seed=1), pairs_of([3], seed=2)]
    groups = reranker.micro_batches(lists, 80)
    assert groups == [
        [1, 4],
        [5, 3, 6, 0],
        [2],
        [8],
        [7, 9],
        [10],
    ]  # 20 + 30 + 30; 20 + 29 + 12 + 12 + 7; …
    flat = [pair for pairs in lists for pair in pairs]
    assert [reranker.num_slots([flat[place] for place in group]) for group in groups] == [
        80,
        80,
        21,
        220,
        30,
        23,
    ]
    assert reranker.micro_batches([[], []], 80) == []
