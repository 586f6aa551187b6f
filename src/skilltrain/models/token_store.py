"""Texts tokenised once: a compact store in memory, and a file that later runs read instead of tokenising again."""

import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
from jaxtyping import Int32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.models.micro_batches import TokenIds
from skilltrain.terminal import progress, say

_BLOCK = 2000  # texts tokenised between two movements of the progress bar
_DIGEST_BYTES = 32
TextT = TypeVar("TextT", bound=Hashable)


class TokenStore:
    """Token ids by key, in one flat int32 array: 4 bytes a token, where lists of Python numbers take 40."""

    def __init__(
        self, ids: Int32[np.ndarray, "token"], offsets: Int64[np.ndarray, "bound"], rows: Mapping[str, int]
    ) -> None:
        self._ids, self._offsets, self._rows = ids, offsets, rows

    def __getitem__(self, key: str) -> Int32[np.ndarray, "token"]:
        row = self._rows[key]
        return self._ids[self._offsets[row] : self._offsets[row + 1]]

    def __contains__(self, key: object) -> bool:
        return key in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def lengths(self) -> Int64[np.ndarray, "key"]:
        """Tokens of each key's text, in the order of the keys."""
        rows = np.fromiter(self._rows.values(), dtype=np.int64, count=len(self._rows))
        return np.diff(self._offsets)[rows]


def tokenized(
    keys: Sequence[str],
    texts: Sequence[TextT],
    tokenize: Callable[[list[TextT]], Sequence[TokenIds]],
    identity: str,
    cache: Path | None,
) -> TokenStore:
    """The token ids of each key's text, each distinct text tokenised once, or read from a file in the folder `cache`.

    `texts` are strings, or whatever `tokenize` makes one text each of, that `repr` tells apart. The file is named
    after them and `identity`, which must tell everything else that the ids depend on. A file that is damaged is written
    anew; one that cannot be written is done without.
    """
    rows = {text: row for row, text in enumerate(dict.fromkeys(texts))}
    path = None if cache is None else cache / f"{_fingerprint(rows, identity)}.tokens"
    arrays = _read(path, len(rows)) if path else None
    if arrays is None:
        arrays = _tokenize(list(rows), tokenize)
        if path:
            _write(path, *arrays)
    return TokenStore(*arrays, {key: rows[text] for key, text in zip(keys, texts, strict=True)})


def tokenizer_identity(tokenizer: Any) -> str:
    """A fingerprint of all that decides which ids a tokenizer gives a text, whatever was done with it before."""
    import tokenizers
    import transformers

    settings = [transformers.__version__, tokenizers.__version__, str(tokenizer.special_tokens_map)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # the few that are written in Python
        settings.append(json.dumps([repr(type(tokenizer)), tokenizer.get_vocab()], sort_keys=True))
    else:
        content = json.loads(backend.to_str())
        # Truncation and padding are those of the last call; the callers' own limits are part of their identity.
        settings.append(json.dumps(content | {"truncation": None, "padding": None}))
    return hashlib.sha256("\0".join(settings).encode("utf-8", "surrogatepass")).hexdigest()


def _fingerprint(texts: Mapping[Any, int], identity: str) -> str:
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(b"\0" + repr(text).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _tokenize(
    texts: list[TextT], tokenize: Callable[[list[TextT]], Sequence[TokenIds]]
) -> tuple[Int32[np.ndarray, "token"], Int64[np.ndarray, "bound"]]:
    """(ids of all texts in a row, where each text starts and the last one ends)."""
    blocks, lengths = [np.empty(0, dtype=np.int32)], []
    with progress("tokenizing", len(texts)) as (bar, task):
        for start in range(0, len(texts), _BLOCK):
            found = tokenize(texts[start : start + _BLOCK])
            lengths += [len(ids) for ids in found]
            blocks.append(np.concatenate([np.asarray(ids, dtype=np.int32) for ids in found]))
            bar.update(task, completed=len(lengths))
    if len(lengths) != len(texts):
        raise ValueError(f"tokenize gave {len(lengths)} texts for {len(texts)}")
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths, dtype=np.int64)])
    return np.concatenate(blocks), offsets


def _read(path: Path, num_texts: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The two arrays in a file; None if it is not there, or is damaged."""
    try:
        with path.open("rb") as file:
            if file.read(_DIGEST_BYTES) != _rest_digest(file):
                return None
            file.seek(_DIGEST_BYTES)
            ids, offsets = (np.load(file, allow_pickle=False) for _ in range(2))
    except (OSError, ValueError, EOFError):
        return None
    return (ids, offsets) if offsets.shape == (num_texts + 1,) else None


def _write(path: Path, ids: np.ndarray, offsets: np.ndarray) -> None:
    """Keep the arrays behind a digest of their bytes, which tells a damaged file before anything is read from it."""
    try:
        with atomic_path(path) as temporary, temporary.open("w+b") as file:
            file.write(bytes(_DIGEST_BYTES))
            for array in (ids, offsets):
                np.save(file, array, allow_pickle=False)
            file.seek(_DIGEST_BYTES)
            digest = _rest_digest(file)
            file.seek(0)
            file.write(digest)
    except SkilltrainError as error:
        _say_once(f"token ids are not kept for later runs: {error}")


def _rest_digest(file: BinaryIO) -> bytes:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.digest()


@functools.cache
def _say_once(message: str) -> None:
    say(message)
