import numpy as np

from skilltrain.models.tokens import tokenized


def test_each_text_is_tokenised_once_by_hand():
    seen = []

    def letters(texts):
        seen.extend(texts)
        return [[ord(letter) for letter in text] for text in texts]

    store = tokenized(["x", "y", "z", "empty"], ["ab", "c", "ab", ""], letters)
    assert [store[key].tolist() for key in ("x", "y", "z", "empty")] == [[97, 98], [99], [97, 98], []]
    assert seen == ["ab", "c", ""]  # the text of x and z once
    assert store["x"].dtype == np.int32
    assert np.shares_memory(store["x"], store["z"])
    assert dict(tokenized([], [], letters)) == {}
