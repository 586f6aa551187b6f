"""Token ids equal those of the tokenizer. Each text is tokenised once, and the cache is checked."""

import numpy as np
import pytest

from skilltrain.models.tokens import tokenize_texts, tokenizer_identity
from tiny_models import bert_tokenizer, qwen3_tokenizer


class LetterTokenizer:
    """Gives a text the code points of its letters. Records the texts that it tokenised."""

    def __init__(self):
        self.texts = []

    def __call__(self, texts):
        self.texts += texts
        return [list(map(ord, text)) for text in texts]


def test_equal_texts_are_tokenised_once():
    tokenizer = LetterTokenizer()

    store = tokenize_texts({"x": "ab", "y": "c", "z": "ab", "empty": ""}, tokenizer)

    ids = {key: store[key].tolist() for key in ("x", "y", "z", "empty")}
    assert ids == {"x": [97, 98], "y": [99], "z": [97, 98], "empty": []}
    assert tokenizer.texts == ["ab", "c", ""]
    assert store["x"].dtype == np.int32
    assert np.shares_memory(store["x"], store["z"])


def test_no_texts_have_no_ids():
    assert tokenize_texts({}, LetterTokenizer()) == {}


def tokenize_with_cache(folder, texts=("ab", "c", "ab"), identity="letters"):
    """Tokenise texts with a cache. Returns their ids, and the texts that were not in the cache."""
    tokenizer = LetterTokenizer()
    keyed_texts = dict(zip("xyz", texts, strict=True))
    store = tokenize_texts(keyed_texts, tokenizer, identity, folder / "new")
    return [store[key].tolist() for key in "xyz"], tokenizer.texts


def test_second_run_reads_cache(tmp_path):
    ids, texts = tokenize_with_cache(tmp_path)
    assert texts == ["ab", "c"]

    assert tokenize_with_cache(tmp_path) == (ids, [])


def test_damaged_cache_is_not_used(tmp_path):
    ids, _ = tokenize_with_cache(tmp_path)
    (file,) = (tmp_path / "new").iterdir()
    content = file.read_bytes()

    for position in range(0, len(content), 13):
        damaged = bytearray(content)
        damaged[position] ^= 0x15
        file.write_bytes(bytes(damaged))
        damaged_ids, _ = tokenize_with_cache(tmp_path)
        assert damaged_ids == ids
    assert tokenize_with_cache(tmp_path) == (ids, []), "the cache is written again"


@pytest.mark.parametrize(
    ("changed", "texts"),
    [
        ({"texts": ("ab", "d", "ab")}, ["ab", "d"]),
        ({"texts": ("a", "bc", "ab")}, ["a", "bc", "ab"]),  # the same letters in other texts
        ({"identity": "other"}, ["ab", "c"]),
    ],
)
def test_other_texts_do_not_use_cache(tmp_path, changed, texts):
    tokenize_with_cache(tmp_path)

    _, changed_texts = tokenize_with_cache(tmp_path, **changed)
    _, old_texts = tokenize_with_cache(tmp_path)

    assert changed_texts == texts
    assert old_texts == []


def test_unwritable_cache_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")

    store = tokenize_texts({"x": "ab"}, LetterTokenizer(), "letters", tmp_path / "file")

    assert store["x"].tolist() == [97, 98]
    assert capsys.readouterr().err.count("cannot keep the token ids") == 1


def test_use_of_tokenizer_keeps_identity():
    tokenizer = bert_tokenizer()
    identity = tokenizer_identity(tokenizer)

    # The backend keeps the settings of truncation and padding.
    tokenizer(["deploy pods"], truncation=True, max_length=3, padding=True)

    assert tokenizer_identity(tokenizer) == identity == tokenizer_identity(bert_tokenizer())


def test_different_tokenizers_have_different_identities():
    extended = bert_tokenizer()
    extended.add_tokens(["skill_name"])
    tokenizers = [
        bert_tokenizer(),
        extended,
        qwen3_tokenizer(appends_end=True),
        qwen3_tokenizer(appends_end=False),
    ]

    assert len(set(map(tokenizer_identity, tokenizers))) == 4
