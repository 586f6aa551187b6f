"""Converts untrusted texts to token ids without control tokens, and caches token ids."""

import copy
import hashlib
import json
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int32

from skilltrain.errors import SkilltrainError
from skilltrain.files import atomic_path
from skilltrain.models.micro_batches import TokenIds
from skilltrain.terminal import say, track

# Names of control tokens, such as <think> or [SEP]. Qwen3 does not mark all its control tokens as
# special, and not every added token is one: some tokenizers add runs of spaces.
_CONTROL_NAME = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_BLOCK_SIZE = 2000  # texts per step of the progress bar
_DIGEST_BYTES = 32  # length of a SHA-256
KeyT = TypeVar("KeyT", bound=Hashable)
TextT = TypeVar("TextT", bound=Hashable)


def as_special(token: Any) -> Any:
    """Return a copy of an added token that is marked as special."""
    special_token = copy.copy(token)
    special_token.special = True
    return special_token


class TextTokenizer:
    """Copy of a tokenizer that reads `<|im_end|>`, `<think>` or `[SEP]` in a text as plain letters.

    The option `split_special_tokens=True` of transformers is not enough. It skips tokens that are
    not marked as special, and those in a Unigram vocabulary, such as `</s>` of XLM-R.

    Raises:
        SkilltrainError: The tokenizer has no fast implementation.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Copy a tokenizer of transformers."""
        if not tokenizer.is_fast:
            raise SkilltrainError(
                "unsupported-model", "the tokenizer has no fast implementation (tokenizer.json)"
            )
        self.backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.no_truncation()

        # With `encode_special_tokens`, the backend reads the names of special tokens in a text as
        # plain letters. So mark all control tokens as special.
        control_tokens = {
            token_id: token
            for token_id, token in tokenizer.added_tokens_decoder.items()
            if token.special or _CONTROL_NAME.fullmatch(token.content)
        }
        self.backend.add_special_tokens([as_special(token) for token in control_tokens.values()])
        self.backend.encode_special_tokens = True

        # A Unigram vocabulary has its control tokens as words too, so the backend still makes
        # control tokens of their names in a text. The other methods then remove these tokens. To
        # find out whether this is such a backend, encode all names as plain text, and look for the
        # ids of control tokens in the result.
        self._control_ids = set(control_tokens) - {tokenizer.unk_token_id}
        names = [token.content for token in control_tokens.values()]
        ids_in_names: set[int] = set()
        for encoding in self.backend.encode_batch(names, add_special_tokens=False):
            ids_in_names.update(encoding.ids)
        self._parses_control_tokens = bool(ids_in_names & self._control_ids)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each whole text, without any special token."""
        self.backend.no_truncation()
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._ids_of_text(encoding) for encoding in encodings]

    def framed_ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Return the token ids of each text with the tokenizer's special tokens around them.

        Texts are truncated to `max_tokens`, special tokens included.
        """
        self.backend.enable_truncation(max_tokens)
        encodings = self.backend.encode_batch_fast(list(texts))
        return [self._ids_of_text(encoding) for encoding in encodings]

    def ids_and_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the token ids of a text, and for each the start and end of its characters."""
        self.backend.no_truncation()
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids = encoding.ids
        spans = encoding.offsets
        if not self._parses_control_tokens:
            return ids, spans

        # This backend makes a control token of its name in the text. Leave such tokens out.
        positions = [i for i, token_id in enumerate(ids) if token_id not in self._control_ids]
        return [ids[i] for i in positions], [spans[i] for i in positions]

    def _ids_of_text(self, encoding: Any) -> list[int]:
        """Return the ids of an encoding, without control tokens that were found in the text.

        Special tokens that the tokenizer itself has added stay.
        """
        if not self._parses_control_tokens or self._control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        ids = []
        for token_id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if is_added or token_id not in self._control_ids:
                ids.append(token_id)
        return ids


def tokenize_texts(
    texts: Mapping[KeyT, TextT],
    tokenize: Callable[[list[TextT]], Sequence[TokenIds]],
    identity: str = "",
    cache: Path | None = None,
) -> dict[KeyT, np.ndarray]:
    """Tokenise each distinct text once, or read its token ids from the cache.

    Args:
        texts: Texts by key, of any type that `tokenize` accepts and `repr` distinguishes.
        tokenize: Returns the token ids of each text of a list.
        identity: Everything else that the token ids depend on. It is part of the file's name.
        cache: Folder of the cache. None: no cache. A damaged file is replaced.

    Returns:
        Token ids by key. They are views of one int32 array, which takes 4 bytes per token. Lists
        would take 40.
    """
    # Read the token ids from the cache, or make them.
    distinct_texts = list(dict.fromkeys(texts.values()))
    file = None
    values = None
    if cache is not None:
        file = cache / f"{_fingerprint(distinct_texts, identity)}.tokens"
        values = _read(file)
    if values is None:
        values = _tokenize_in_blocks(distinct_texts, tokenize)
        if file is not None:
            _write(file, values)

    # The values are the number of tokens of each text, then the token ids of all texts.
    num_texts = len(distinct_texts)
    lengths = values[:num_texts]
    ids = values[num_texts:]

    # Split the ids by text.
    ends = np.cumsum(lengths, dtype=np.int64)
    ids_of_texts = np.split(ids, ends)[:-1]  # nothing is after the last end
    ids_by_text = dict(zip(distinct_texts, ids_of_texts, strict=True))
    return {key: ids_by_text[text] for key, text in texts.items()}


def _tokenize_in_blocks(
    texts: list[TextT], tokenize: Callable[[list[TextT]], Sequence[TokenIds]]
) -> Int32[np.ndarray, "length_or_token"]:
    """Tokenise texts block by block.

    Returns:
        The number of tokens of each text, followed by the token ids of all texts.
    """
    starts = range(0, len(texts), _BLOCK_SIZE)
    ids: list[np.ndarray] = []
    for start in track(starts, "tokenizing", len(starts)):
        block = tokenize(texts[start : start + _BLOCK_SIZE])
        ids += [np.asarray(text_ids, dtype=np.int32) for text_ids in block]
    lengths = np.array([len(text_ids) for text_ids in ids], dtype=np.int32)
    return np.concatenate([lengths, *ids])


def tokenizer_identity(tokenizer: Any) -> str:
    """Return a fingerprint of everything that decides which ids a tokenizer gives a text.

    Truncation and padding do not count, because the tokenizer remembers those of its last call.
    """
    import tokenizers
    import transformers

    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["truncation"] = None
    content["padding"] = None
    versions = [transformers.__version__, tokenizers.__version__]
    return _fingerprint([str(tokenizer.special_tokens_map), json.dumps(content)], str(versions))


def _fingerprint(texts: Iterable[Any], identity: str) -> str:
    """Return a SHA-256 over the texts and `identity`.

    Args:
        texts: Objects whose `repr` tells them apart, such as strings.
        identity: Another text that the result depends on.
    """
    # `surrogatepass` accepts broken characters. The byte 0 separates the texts.
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(b"\0" + repr(text).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read(file: Path) -> Int32[np.ndarray, "length_or_token"] | None:
    """Read token ids from the cache. Return None if the file is missing or damaged.

    Returns:
        The number of tokens of each text, followed by the token ids of all texts.
    """
    try:
        content = file.read_bytes()
    except OSError:
        return None
    # A file is a SHA-256 of the values, then the values.
    digest = content[:_DIGEST_BYTES]
    values = content[_DIGEST_BYTES:]
    if hashlib.sha256(values).digest() != digest:
        return None
    return np.frombuffer(values, dtype=np.int32)


def _write(file: Path, values: Int32[np.ndarray, "length_or_token"]) -> None:
    """Write a SHA-256 of the values and the values. If this fails, tell the user and go on."""
    try:
        with atomic_path(file) as temporary:
            temporary.write_bytes(hashlib.sha256(values.data).digest() + values.tobytes())
    except SkilltrainError as error:
        say(f"cannot keep the token ids for later runs: {error}")
