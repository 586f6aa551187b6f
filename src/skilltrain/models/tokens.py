"""Untrusted text as token ids, of which none is a control token; each text tokenised once, and kept for later runs."""

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

# Qwen3 lists <think>, <tool_call> and others as ordinary added tokens; runs of spaces may be added tokens too.
_CONTROL_SHAPE = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_BLOCK = 2000  # texts tokenised between two movements of the progress bar
TextT = TypeVar("TextT", bound=Hashable)


def as_special(token: Any) -> Any:
    """The same added token, marked as special."""
    from tokenizers import AddedToken

    return AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
        special=True,
    )


class TextTokenizer:
    """A copy of a tokenizer that reads `<|im_end|>`, `<think>` or `[SEP]` in a text as the letters they are.

    `split_special_tokens=True` of transformers spares only tokens marked as special, and not those that stand in a
    Unigram vocabulary (`</s>` of XLM-R). Raises SkilltrainError for a tokenizer that has no fast implementation.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise SkilltrainError("the tokenizer has no fast implementation (tokenizer.json)")
        self.backend: Any = copy.deepcopy(tokenizer.backend_tokenizer)
        self.backend.no_padding()
        self.backend.no_truncation()
        controls = {
            number: token
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special or _CONTROL_SHAPE.fullmatch(token.content)
        }
        self.backend.add_special_tokens([as_special(token) for token in controls.values()])
        self.backend.encode_special_tokens = True
        self._control_ids = {number for number in controls if number != tokenizer.unk_token_id}
        reached = self.backend.encode_batch(
            [token.content for token in controls.values()], add_special_tokens=False
        )
        self._leaks = any(not self._control_ids.isdisjoint(encoding.ids) for encoding in reached)

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text alone, without anything around it and never cut."""
        self.backend.no_truncation()
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [self._plain(encoding) for encoding in encodings]

    def framed_ids(self, texts: Sequence[str], max_tokens: int) -> list[list[int]]:
        """Token ids of each text between the tokenizer's own control tokens, those included cut to `max_tokens`."""
        self.backend.enable_truncation(max_tokens)
        return [self._plain(encoding) for encoding in self.backend.encode_batch_fast(list(texts))]

    def ids_and_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """(token ids, the characters [start, end) each came from) of one text."""
        self.backend.no_truncation()
        encoding = self.backend.encode(text, add_special_tokens=False)
        ids, spans = encoding.ids, encoding.offsets  # each access builds the whole list
        kept = [
            i for i, number in enumerate(ids) if not self._leaks or number not in self._control_ids
        ]
        return [ids[i] for i in kept], [spans[i] for i in kept]

    def _plain(self, encoding: Any) -> list[int]:
        if not self._leaks or self._control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [number for number, framing in marks if framing or number not in self._control_ids]


def tokenized(
    texts: Mapping[str, TextT],
    tokenize: Callable[[list[TextT]], Sequence[TokenIds]],
    identity: str = "",
    cache: Path | None = None,
) -> dict[str, np.ndarray]:
    """The token ids of each key's text, each distinct text tokenised once, or read from a file in the folder `cache`.

    `texts` are whatever `tokenize` takes and `repr` tells apart. The file is named after them and `identity`, which
    must tell everything else that the ids depend on. One that is damaged is written anew, or done without. The ids are
    views of one flat int32 array: 4 bytes per token, where lists of Python numbers take 40.
    """
    distinct = list(dict.fromkeys(texts.values()))
    path = None if cache is None else cache / f"{_fingerprint(distinct, identity)}.tokens"
    values = _read(path) if path else None
    if values is None:
        starts = range(0, len(distinct), _BLOCK)
        blocks = (
            tokenize(distinct[start : start + _BLOCK])
            for start in track(starts, "tokenizing", len(starts))
        )
        found = [np.asarray(ids, dtype=np.int32) for block in blocks for ids in block]
        values = np.concatenate([np.array([len(ids) for ids in found], dtype=np.int32), *found])
        if path:
            _write(path, values)
    lengths, ids = np.split(values, [len(distinct)])
    ids_of = dict(
        zip(distinct, np.split(ids, np.cumsum(lengths, dtype=np.int64)[:-1]), strict=False)
    )
    return {key: ids_of[text] for key, text in texts.items()}


def tokenizer_identity(tokenizer: Any) -> str:
    """A fingerprint of all that decides which ids a tokenizer gives a text, whatever was done with it before."""
    import tokenizers
    import transformers

    # Truncation and padding are those of the last call; the callers' own limits are part of their identity.
    content = json.loads(tokenizer.backend_tokenizer.to_str()) | {
        "truncation": None,
        "padding": None,
    }
    versions = [transformers.__version__, tokenizers.__version__]
    return _fingerprint([str(tokenizer.special_tokens_map), json.dumps(content)], str(versions))


def _fingerprint(texts: Iterable[Any], identity: str) -> str:
    digest = hashlib.sha256(identity.encode("utf-8", "surrogatepass"))
    for text in texts:
        digest.update(b"\0" + repr(text).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _read(path: Path) -> Int32[np.ndarray, "length_or_token"] | None:
    """How many ids each text has, then the ids of all texts; None where `_write` left no whole file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, values = content[:32], content[32:]
    return (
        np.frombuffer(values, dtype=np.int32) if hashlib.sha256(values).digest() == digest else None
    )


def _write(path: Path, values: Int32[np.ndarray, "length_or_token"]) -> None:
    try:
        with atomic_path(path) as temporary:
            temporary.write_bytes(hashlib.sha256(values.data).digest() + values.tobytes())
    except SkilltrainError as error:
        say(f"token ids are not kept for later runs: {error}")
