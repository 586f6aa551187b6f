"""Untrusted text as token ids, of which none is a control token; each text tokenised once."""

import copy
import re
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np

from skilltrain.errors import SkilltrainError
from skilltrain.models.micro_batches import TokenIds
from skilltrain.terminal import track

# Qwen3 lists <think>, <tool_call> and others as ordinary added tokens; runs of spaces may be added tokens too.
_CONTROL_SHAPE = re.compile(r"<.+>|\[.+\]", re.DOTALL)
_BLOCK = 2000  # texts tokenised between two movements of the progress bar
TextT = TypeVar("TextT", bound=Hashable)


def as_special(token: Any) -> Any:
    """The same added token, marked as special."""
    from tokenizers import AddedToken

    return AddedToken(
        token.content, single_word=token.single_word, lstrip=token.lstrip, rstrip=token.rstrip,
        normalized=token.normalized, special=True,
    )  # fmt: skip


class TextTokenizer:
    """A copy of a tokenizer that reads `<|im_end|>`, `<think>` or `[SEP]` in a text as the letters they are.

    For texts without such strings its ids are the tokenizer's own. `split_special_tokens=True` of transformers spares
    only tokens marked as special, and those that stand in a Unigram vocabulary (`</s>` of XLM-R) it does not.
    Raises SkilltrainError for a tokenizer that has no fast implementation.
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
        reached = self.backend.encode_batch([token.content for token in controls.values()], add_special_tokens=False)
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
        kept = [i for i, number in enumerate(ids) if not self._leaks or number not in self._control_ids]
        return [ids[i] for i in kept], [spans[i] for i in kept]

    def _plain(self, encoding: Any) -> list[int]:
        if not self._leaks or self._control_ids.isdisjoint(encoding.ids):
            return encoding.ids
        marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [number for number, framing in marks if framing or number not in self._control_ids]


class TokenStore(dict[str, np.ndarray]):
    """Token ids by key, views of one flat int32 array: 4 bytes per token, where lists of Python numbers take 40."""


def tokenized(
    keys: Sequence[str], texts: Sequence[TextT], tokenize: Callable[[list[TextT]], Sequence[TokenIds]]
) -> TokenStore:
    """The token ids of each key's text, each distinct text tokenised once.

    `texts` are strings, or whatever `tokenize` makes one text each of.
    """
    distinct = list(dict.fromkeys(texts))
    blocks = [distinct[start : start + _BLOCK] for start in range(0, len(distinct), _BLOCK)]
    found = [
        np.asarray(ids, dtype=np.int32) for block in track(blocks, "tokenizing", len(blocks)) for ids in tokenize(block)
    ]
    ends = np.cumsum([len(ids) for ids in found], dtype=np.int64)
    flat = np.concatenate([np.array([], dtype=np.int32), *found])
    ids_of = dict(zip(distinct, np.split(flat, ends[:-1]), strict=True)) if found else {}
    return TokenStore((key, ids_of[text]) for key, text in zip(keys, texts, strict=True))
