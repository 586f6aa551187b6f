"""Texts tokenised once: their ids in memory, and in a file that later runs read instead of tokenising again."""

import functools
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32, Int64

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.models.micro_batches import TokenIds
from skilltrain.terminal import progress, say

_BLOCK = 2000  # texts tokenised between two movements of the progress bar
_DIGEST_BYTES = 32
TextT = TypeVar("TextT", bound=Hashable)


class TokenStore(dict[str, np.ndarray]):
    """Token ids by key, views of one flat int32 array: 4 bytes a token, where lists of Python numbers take 40."""

    @property
    def lengths(self) -> Int64[np.ndarray, "key"]:
        """Tokens of each key's text, in the order of the keys."""
        return np.array([len(ids) for ids in self.values()], dtype=np.int64)


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
    distinct = list(dict.fromkeys(texts))
    path = None if cache is None else cache / f"{_fingerprint(distinct, identity)}.tokens"
    values = _read(path) if path else None
    if values is None:
        values = _tokenize(distinct, tokenize)
        if path:
            _write(path, values)
    lengths, ids = np.split(values, [len(distinct)])
    ids_of = dict(zip(distinct, np.split(ids, np.cumsum(lengths, dtype=np.int64)[:-1]), strict=False))
    return TokenStore((key, ids_of[text]) for key, text in zip(keys, texts, strict=True))


def tokenizer_identity(tokenizer: Any) -> str:
    """A fingerprint of all that decides which ids a tokenizer gives a text, whatever was done with it before."""
    import tokenizers
    import transformers

    # Truncation and padding are those of the last call; the callers' own limits are part of their identity.
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    versions = [transformers.__version__, tokenizers.__version__]
    return _fingerprint([str(tokenizer.special_tokens_map), json.dumps(content)], str(versions))


def _fingerprint(texts: Iterable[Any], identity: str) -> str:
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(b"\0" + repr(text).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _tokenize(
    texts: list[TextT], tokenize: Callable[[list[TextT]], Sequence[TokenIds]]
) -> Int32[np.ndarray, "length_or_token"]:
    """How many ids each text has, then the ids of all texts."""
    lengths: list[int] = []
    blocks: list[np.ndarray] = []
    with progress("tokenizing", len(texts)) as (bar, task):
        for start in range(0, len(texts), _BLOCK):
            found = tokenize(texts[start : start + _BLOCK])
            lengths += [len(ids) for ids in found]
            blocks += [np.asarray(ids, dtype=np.int32) for ids in found]
            bar.update(task, completed=len(lengths))
    if len(lengths) != len(texts):
        raise ValueError(f"tokenize gave {len(lengths)} texts for {len(texts)}")
    return np.concatenate([np.array(lengths, dtype=np.int32), *blocks])


def _read(path: Path) -> Int32[np.ndarray, "length_or_token"] | None:
    """What `_write` kept; None where the file is not there, or its bytes are not those of its digest."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, values = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return np.frombuffer(values, dtype=np.int32) if hashlib.sha256(values).digest() == digest else None


def _write(path: Path, values: Int32[np.ndarray, "length_or_token"]) -> None:
    try:
        with atomic_path(path) as temporary, temporary.open("wb") as file:
            file.write(hashlib.sha256(values.data).digest())
            file.write(values.data)
    except SkilltrainError as error:
        _say_once(f"token ids are not kept for later runs: {error}")


@functools.cache
def _say_once(message: str) -> None:
    say(message)
