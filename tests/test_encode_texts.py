import numpy as np
import pytest
import torch

from skilltrain.models.cpu_linear import PackedLinear, pack_linear_layers
from skilltrain.retrieval import dense as module
from skilltrain.retrieval.dense import EncodingCount, encode_texts, even_groups
from skilltrain.retrieval.vectors import OrderedTexts, longest_first, text_keys
from tiny_models import WORDS


def test_keys_tell_texts_and_limits_apart_and_no_more():
    texts = ["pods", "", "pods ", "日本", "pods"]
    keys, lengths = text_keys(texts, 32)
    assert lengths.tolist() == [4, 0, 5, 2, 4]
    assert keys[0] == keys[4] and len(set(keys.tolist())) == 4
    assert not set(keys.tolist()) & set(text_keys(texts, 33)[0].tolist())
    assert [len(part) for part in text_keys([], 32)] == [0, 0]


def test_longest_first_and_equals_in_their_order():
    assert longest_first(np.array([3, 9, 3, 1, 9])).tolist() == [1, 4, 0, 2, 3]


def test_groups_by_hand():
    lengths = [4, 2, 4, 4, 3, 2]
    # Three texts of four tokens are enough for themselves; the others share what they pad to.
    assert even_groups(lengths, 12, enough=12) == [[0, 2, 3], [4, 1, 5]]
    assert even_groups(lengths, 8, enough=8) == [[0, 2], [3, 4], [1, 5]]
    assert even_groups(lengths, 8, enough=1) == [[0, 2], [3], [4], [1, 5]]
    assert even_groups([50, 0], 8, enough=8) == [[0], [1]]
    assert even_groups([], 8, enough=8) == []


@pytest.mark.parametrize("enough", [1, 40, 10**6])
def test_every_text_is_in_one_group_within_the_budget(enough):
    lengths = np.random.default_rng(0).integers(1, 60, size=500).tolist()
    groups = even_groups(lengths, 100, enough)
    assert sorted(position for group in groups for position in group) == list(range(500))
    for group in groups:
        longest = max(lengths[position] for position in group)
        assert longest * len(group) <= 100 and lengths[group[0]] == longest
    assert [lengths[group[0]] for group in groups] == sorted((lengths[group[0]] for group in groups), reverse=True)


def work_of(num):
    generator = np.random.default_rng(1)
    texts = sorted((" ".join(generator.choice(WORDS, size=n % 23 + 1)) for n in range(num)), key=len, reverse=True)
    return OrderedTexts(texts, text_keys(texts, 24)[0], np.arange(num), 24, "encoding")


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("packed", [False, True])
def test_blocks_groups_and_packed_layers_give_each_texts_own_vector(open_encoder_of, monkeypatch, name, packed):
    model, work = open_encoder_of(name), work_of(50)
    with torch.inference_mode():
        alone = torch.cat([model([ids]) for ids in model.tokenize(work.texts, 24)]).numpy()
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(module, "_TOKENIZED_AT_ONCE", 5)
    monkeypatch.setattr(module, "_ENOUGH_TOKENS", 40)
    if packed:
        pack_linear_layers(model.backbone, 64)
    found, count = np.full_like(alone, np.nan), EncodingCount()
    for part, vectors in encode_texts(model, work, 64, count):
        assert len(part) <= 16
        found[part] = vectors
    np.testing.assert_allclose(found, alone, atol=1e-6)
    tokens = sum(map(len, model.tokenize(work.texts, 24)))
    assert (count.texts, count.tokens) == (50, tokens) and tokens <= count.slots < 1.3 * tokens


def test_a_slow_models_vectors_come_before_the_block_is_done(open_encoder_of, monkeypatch):
    monkeypatch.setattr(module, "_SAVE_SECONDS", 0)
    parts = [part for part, _ in encode_texts(open_encoder_of("bert"), work_of(30), 48, EncodingCount())]
    assert len(parts) > 5 and sorted(np.concatenate(parts).tolist()) == list(range(30))


def test_tokenising_ahead_gives_the_same(open_encoder_of, monkeypatch):
    model, work = open_encoder_of("bert"), work_of(30)
    monkeypatch.setattr(module, "_BLOCK", 8)

    here = list(module._tokenized(model, work))
    monkeypatch.setattr(type(model), "device", torch.device("meta"))  # as if beside a GPU
    there = list(module._tokenized(model, work))
    assert [start for start, _ in there] == [0, 8, 16, 24]
    assert [[ids.tolist() for ids in block] for _, block in there] == [[i.tolist() for i in block] for _, block in here]


def test_packed_layers_are_the_layers_they_stand_for():
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False), torch.nn.Linear(3, 2).bfloat16()
    )
    values = torch.randn(4, 7, 5)
    with torch.inference_mode():
        plain = network[:3](values)
        pack_linear_layers(network, 28)
        assert [isinstance(layer, PackedLinear) for layer in network] == [True, False, True, False]
        torch.testing.assert_close(network[:3](values), plain, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(network[0](values.transpose(0, 1)), network[0](values).transpose(0, 1))
