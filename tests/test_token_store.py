"""Token ids: exactly those of the tokenizer, each text tokenised once, and a cache that is never trusted blindly."""

import numpy as np

from skilltrain.models import tokens
from skilltrain.models.tokens import tokenized, tokenizer_identity
from tiny_models import bert_tokenizer, qwen3_tokenizer


class Letters:
    """A tokenizer that gives a text its letters' code points, and counts the texts that it saw."""

    def __init__(self):
        self.seen = []

    def __call__(self, texts):
        self.seen += texts
        return [[ord(letter) for letter in text] for text in texts]


def test_ids_and_lengths_by_hand():
    letters = Letters()
    store = tokenized(["x", "y", "z", "empty"], ["ab", "c", "ab", ""], letters)
    assert [store[key].tolist() for key in ("x", "y", "z", "empty")] == [[97, 98], [99], [97, 98], []]
    assert letters.seen == ["ab", "c", ""]  # the text of x and z once
    assert store["x"].dtype == np.int32
    assert np.shares_memory(store["x"], store["z"])
    assert dict(tokenized([], [], letters)) == {}


class TestCache:
    """The file that later runs read."""

    KEYS, TEXTS = ("x", "y", "z"), ("ab", "c", "ab")

    def run(self, folder, texts=TEXTS, identity="letters"):
        """(ids of every key, the texts that had to be tokenised)."""
        letters = Letters()
        store = tokenized(self.KEYS, texts, letters, identity, folder)
        return [store[key].tolist() for key in self.KEYS], letters.seen

    def test_the_second_run_tokenizes_nothing(self, tmp_path):
        first, seen = self.run(tmp_path / "new")
        assert seen == ["ab", "c"]
        assert self.run(tmp_path / "new") == (first, [])
        assert len(list((tmp_path / "new").iterdir())) == 1

    def test_another_text_or_identity_is_another_file(self, tmp_path):
        self.run(tmp_path)
        assert self.run(tmp_path, texts=("ab", "d", "ab"))[1] == ["ab", "d"]
        assert self.run(tmp_path, texts=("a", "bc", "ab"))[1] == ["a", "bc", "ab"]  # no two lists run together
        assert self.run(tmp_path, identity="other")[1] == ["ab", "c"]
        assert self.run(tmp_path)[1] == []

    def test_every_damaged_byte_is_found(self, tmp_path):
        expected, _ = self.run(tmp_path)
        (file,) = tmp_path.iterdir()
        content = file.read_bytes()
        for position in range(0, len(content), 13):
            damaged = bytearray(content)
            damaged[position] ^= 0x15
            file.write_bytes(bytes(damaged))
            assert self.run(tmp_path)[0] == expected
        assert self.run(tmp_path) == (expected, [])

    def test_without_room_training_goes_on_and_says_so(self, tmp_path, monkeypatch):
        said = []
        monkeypatch.setattr(tokens, "say", said.append)
        blocked = tmp_path / "file"
        blocked.write_text("no folder")
        assert self.run(blocked)[1] == ["ab", "c"]
        assert len(said) == 1
        assert "not kept" in said[0]


def test_identity_of_a_tokenizer():
    tokenizer = bert_tokenizer()
    identity = tokenizer_identity(tokenizer)
    tokenizer(["deploy pods"], truncation=True, max_length=3, padding=True)  # both stay set in the backend
    assert tokenizer_identity(tokenizer) == identity == tokenizer_identity(bert_tokenizer())
    others = {tokenizer_identity(qwen3_tokenizer(appends)) for appends in (True, False)} | {identity}
    assert len(others) == 3
    tokenizer.add_tokens(["skill_name"])
    assert tokenizer_identity(tokenizer) != identity
