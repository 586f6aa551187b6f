"""Token ids: exactly those of the tokenizer, each text tokenised once, and a cache that is never trusted blindly."""

import numpy as np

from skilltrain.models.tokens import tokenize_texts, tokenizer_identity
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
    store = tokenize_texts({"x": "ab", "y": "c", "z": "ab", "empty": ""}, letters)
    assert [store[key].tolist() for key in ("x", "y", "z", "empty")] == [
        [97, 98],
        [99],
        [97, 98],
        [],
    ]
    assert letters.seen == ["ab", "c", ""]  # the text of x and z once
    assert store["x"].dtype == np.int32
    assert np.shares_memory(store["x"], store["z"])
    assert tokenize_texts({}, letters) == {}


def test_the_second_run_reads_what_the_first_wrote_and_trusts_no_byte(tmp_path):
    def run(texts=("ab", "c", "ab"), identity="letters"):
        """(ids of every key, the texts that had to be tokenised)."""
        letters = Letters()
        store = tokenize_texts(
            dict(zip("xyz", texts, strict=True)), letters, identity, tmp_path / "new"
        )
        return [store[key].tolist() for key in "xyz"], letters.seen

    expected, seen = run()
    assert seen == ["ab", "c"] and run() == (expected, [])
    (file,) = (tmp_path / "new").iterdir()
    content = file.read_bytes()
    for position in range(0, len(content), 13):
        damaged = bytearray(content)
        damaged[position] ^= 0x15
        file.write_bytes(bytes(damaged))
        assert run()[0] == expected
    assert run() == (expected, [])
    assert run(texts=("ab", "d", "ab"))[1] == ["ab", "d"]
    assert run(texts=("a", "bc", "ab"))[1] == ["a", "bc", "ab"]  # no two lists run together
    assert run(identity="other")[1] == ["ab", "c"] and run()[1] == []


def test_without_room_training_goes_on_and_says_so(tmp_path, capsys):
    (tmp_path / "file").write_text("no folder")
    assert tokenize_texts({"x": "ab"}, Letters(), "letters", tmp_path / "file")["x"].tolist() == [
        97,
        98,
    ]
    assert capsys.readouterr().err.count("cannot keep the token ids") == 1


def test_identity_of_a_tokenizer():
    tokenizer = bert_tokenizer()
    identity = tokenizer_identity(tokenizer)
    tokenizer(
        ["deploy pods"], truncation=True, max_length=3, padding=True
    )  # both stay set in the backend
    assert tokenizer_identity(tokenizer) == identity == tokenizer_identity(bert_tokenizer())
    others = {tokenizer_identity(qwen3_tokenizer(appends)) for appends in (True, False)} | {
        identity
    }
    assert len(others) == 3
    tokenizer.add_tokens(["skill_name"])
    assert tokenizer_identity(tokenizer) != identity
