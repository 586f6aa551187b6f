"""Packed texts that share a prompt have the scores and gradients of a padded batch."""

import functools
import itertools
import random

import jaxtyping
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
    masking_utils,
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
    """Make pairs of random ids with a shared prompt of `num_shared` ids."""
    rng = random.Random(seed)
    prompt = [rng.randrange(300) for _ in range(num_shared)]
    pairs = []
    for length in lengths:
        continuation = [rng.randrange(300) for _ in range(length)]
        pairs.append(PairIds(prompt + continuation, num_shared, 0))
    return pairs


PAIRS = pairs_of([7, 30, 1, 12, 30, 29, 12])


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, tmp_path_factory):
    """A reranker whose output layer is or is not the embedding."""
    folder = save_qwen3(tmp_path_factory.mktemp("qwen3"), reranker=True)
    if request.param == "untied":
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(folder, tie_word_embeddings=False)
        torch.nn.init.normal_(model.lm_head.weight)
        model.save_pretrained(folder)
    return folder


def load_both(folder):
    """Load the reranker, and its network with plain transformers code, both in float64."""
    reranker = load_reranker(Source(source=str(folder)), CPU).double()
    return reranker, AutoModelForCausalLM.from_pretrained(folder).double().eval()


def plain_scores(reranker, network, pairs):
    """Score a padded batch with the logits of all positions."""
    inputs, mask = model_inputs([pair.ids for pair in pairs], 0, CPU)
    logits = network(**inputs, attention_mask=mask).logits  # (num_pairs, length, vocabulary)
    last = logits[torch.arange(len(pairs)), mask.sum(1) - 1]  # (num_pairs, vocabulary)
    yes, no = reranker.yes_no_ids
    return last[:, yes] - last[:, no]


def gradients(network, scores):
    """Return the gradient of each parameter for a weighted sum of the scores."""
    weights = torch.linspace(-1, 1, len(scores), dtype=scores.dtype)
    network.zero_grad()
    (weights * scores).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


def largest_deviation(ours, theirs):
    """Return the largest deviation of a gradient, relative to its tensor's largest entry."""
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
def test_packed_gradients_equal_padded_batch(folder, groups, recompute):
    reranker, network = load_both(folder)
    assert reranker.is_packed
    if recompute:
        checkpoint_layers(reranker.network.train())

    scores = run_micro_batches(reranker, PAIRS, groups)

    expected = plain_scores(reranker, network, PAIRS)
    assert torch.allclose(scores, expected, rtol=0, atol=1e-12)
    ours = gradients(reranker.network, scores)
    theirs = gradients(network, expected)
    assert largest_deviation(ours, theirs) < 1e-7  # norms of Qwen3 compute in float32


@torch.no_grad()
def test_float32_scores_stay_close(folder):
    reranker, network = load_both(folder)
    expected = plain_scores(reranker, network, PAIRS)

    scores = reranker.float()(PAIRS).double()

    assert torch.allclose(scores, expected, atol=1e-5 * expected.abs().max())


@torch.no_grad()
def test_autocast_scores_stay_close(folder):
    reranker, network = load_both(folder)
    expected = plain_scores(reranker, network, PAIRS)
    reranker = reranker.float()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = reranker(PAIRS)

    assert torch.allclose(scores.double(), expected, atol=0.05 * expected.abs().max())
    assert scores.dtype == torch.float32
    is_rounded = scores == scores.bfloat16().float()
    assert not is_rounded.all(), "the score itself is not rounded"


@torch.no_grad()
def test_network_without_packing_is_unchanged(folder):
    reranker, network = load_both(folder)
    ids = torch.tensor([PAIRS[1].ids])

    expected = plain_scores(reranker, network, PAIRS)

    assert torch.equal(plain_scores(reranker, reranker.network, PAIRS), expected)
    assert torch.equal(reranker.network(ids).logits, network(ids).logits)


def causal(config_class, model_class, **options):
    """Make a tiny causal model, with equal weights at every call."""
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
def test_sliding_window_prevents_packing(make, is_packed):
    settings = RerankerSettings(template=RerankerTemplate(form="yes_no"))
    reranker = Reranker(make(), qwen3_tokenizer(appends_end=False), settings)

    scores = reranker(PAIRS)

    assert reranker.is_packed == is_packed
    assert torch.allclose(scores, plain_scores(reranker, make(), PAIRS), rtol=0, atol=1e-10)
    assert reranker.num_slots(PAIRS) == (20 + 121 if is_packed else 50 * 7)


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5)


@given(texts)
def test_shared_prompt_is_longest_common_prefix(texts):
    shared = shared_prompt.num_shared(texts)

    first = texts[0]
    assert all(len(text) > shared and text[:shared] == first[:shared] for text in texts)
    # A longer prompt would leave a text without a continuation, or would not be common.
    end = shared + 1
    assert any(len(text) == end or text[:end] != first[:end] for text in texts)


@given(texts)
def test_packed_row_holds_every_token_once(texts):
    shared = shared_prompt.num_shared(texts)

    packed = shared_prompt.PackedTexts(texts, shared, CPU)

    row = packed.join(texts)["input_ids"][0].tolist()
    num_continued = sum(len(text) - shared for text in texts)
    assert len(row) == packed.position_ids.shape[1] == shared + num_continued
    bucket_tokens = []
    for bucket in packed.buckets:
        bucket_tokens += bucket.tokens.flatten()[bucket.real_tokens].tolist()
    assert bucket_tokens == [*range(shared, len(row))]
    for text, last in zip(texts, packed.ends.tolist(), strict=True):
        continuation = slice(last + 1 - (len(text) - shared), last + 1)
        assert row[:shared] + row[continuation] == text
        assert packed.position_ids[0, continuation].tolist() == [*range(shared, len(text))]


def test_continuations_are_gathered_by_index_select():
    bucket = shared_prompt.Bucket.from_lengths([3, 2], start=4, num_prompt=4, device=CPU)
    row = torch.randn(1, 2, 9, 8, requires_grad=True)

    joined = bucket.join_row(bucket.split_row(row))
    joined.sum().backward()

    # IndexBackward0 would sort the positions, which is slow on a GPU.
    names: set[str] = set()
    functions = [joined.grad_fn]
    while functions:
        function = functions.pop()
        if function is not None:
            names.add(function.name())
            functions += [parent for parent, _ in function.next_functions]
    assert "IndexSelectBackward0" in names
    assert "IndexBackward0" not in names
    torch.testing.assert_close(joined, row[0][:, 4:])
    assert row.grad is not None
    torch.testing.assert_close(row.grad[0, :, 4:], torch.ones(2, 5, 8))


@given(texts)
def test_varlen_row_holds_whole_texts(texts):
    packed = shared_prompt.VarlenTexts(texts, CPU)

    row = packed.join(texts)["input_ids"][0].tolist()

    bounds = itertools.pairwise(packed.starts.tolist())
    row_texts = [row[start:stop] for start, stop in bounds]
    assert row_texts == [texts[number] for number in packed.order]
    assert packed.lengths[0] == max(map(len, texts))


def test_decoder_builds_no_mask(folder, monkeypatch):
    """transformers would look for texts in the position ids, and wait for the GPU."""
    reranker, network = load_both(folder)
    expected = plain_scores(reranker, network, PAIRS)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", None)

    scores = reranker(PAIRS)

    assert torch.allclose(scores, expected, rtol=0, atol=1e-12)


def test_decoder_that_drops_arguments_is_refused(folder, monkeypatch):
    reranker, _ = load_both(folder)
    decoder = reranker.network.get_decoder()
    forward = decoder.forward
    monkeypatch.setattr(decoder, "forward", lambda packed, **inputs: forward(**inputs))

    with pytest.raises(RuntimeError, match="does not hand its arguments on to attention"):
        reranker(PAIRS)


def test_compiled_layer_is_one_graph(open_encoder_of, monkeypatch):
    """A graph break under recomputation is an error here."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # checks of shapes break it
    encoder = open_encoder_of("qwen3").train()
    encoder.enable_packing()
    texts = [[5, 6, 7, 8], [9, 8, 7, 6]]
    expected = encoder(texts)
    checkpoint_layers(encoder.backbone)
    encoder.backbone.layers[0].compile(dynamic=True, backend="eager", fullgraph=True)

    vectors = encoder(texts)

    assert torch.allclose(vectors, expected)
    vectors.sum().backward()


def test_flash_attention_shares_key_heads(monkeypatch):
    """Tensors without data let the kernel check its inputs without a GPU."""
    to_meta = functools.partial(torch.as_tensor, device="meta")
    monkeypatch.setattr(shared_prompt, "on_device", lambda values, device: to_meta(values))
    packed = shared_prompt.VarlenTexts([[1, 2, 3], [4, 5]], torch.device("cuda"))
    query = torch.empty(1, 4, 5, 64, device="meta", dtype=torch.bfloat16)
    key = torch.empty(1, 2, 5, 64, device="meta", dtype=torch.bfloat16)

    output = packed.attend(query, key, key, dropout_p=0.0, scale=0.125)

    assert output.shape == (1, 5, 4, 64)
    assert packed.buckets == []


def test_groups_stay_within_token_budget(folder):
    reranker = load_reranker(Source(source=str(folder)), CPU)
    lists = [PAIRS, [], pairs_of([5, 200, 5], seed=1), pairs_of([3], seed=2)]
    all_pairs = list(itertools.chain.from_iterable(lists))

    groups = reranker.micro_batches(lists, 80)

    # A group has pairs of one list. The first has 20 + 30 + 30 tokens, the second
    # 20 + 29 + 12 + 12 + 7.
    assert groups == [[1, 4], [5, 3, 6, 0], [2], [8], [7, 9], [10]]
    for group, num_slots in zip(groups, [80, 80, 21, 220, 30, 23], strict=True):
        assert reranker.num_slots([all_pairs[position] for position in group]) == num_slots


def test_empty_lists_have_no_groups(folder):
    reranker = load_reranker(Source(source=str(folder)), CPU)

    assert reranker.micro_batches([[], []], 80) == []
