"""Tokenizers that do by themselves what our models do around theirs, for readers that only have the folder."""

import copy
from pathlib import Path
from typing import Any

from skilltrain.models.text_tokens import TextTokenizer


def write_tokenizer(tokenizer: Any, max_tokens: int, aside: Path) -> None:
    """Write a copy of `tokenizer` that by itself cuts at `max_tokens`."""
    tokenizer = copy.copy(tokenizer)
    tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(str(aside))


def control_tokens(tokenizer: Any) -> list[str]:
    """The tokens that our models never see in a text: their names in it are read as the letters they are."""
    added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
    ids = TextTokenizer(tokenizer).ids([*added.values()])
    return sorted(name for (number, name), own in zip(added.items(), ids, strict=True) if number not in own)


def reading_names_as_text(tokenizer: Any) -> Any:
    """A copy of a tokenizer that reads the names of control tokens in texts as text, as `TextTokenizer` does."""
    from tokenizers import AddedToken

    names = control_tokens(tokenizer)
    known = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokenizer = copy.deepcopy(tokenizer)
    as_special = [
        AddedToken(
            name, single_word=known[name].single_word, lstrip=known[name].lstrip, rstrip=known[name].rstrip,
            normalized=known[name].normalized, special=True,
        )
        for name in names
    ]  # fmt: skip
    tokenizer.backend_tokenizer.add_special_tokens(as_special)
    tokenizer.init_kwargs["split_special_tokens"] = tokenizer.split_special_tokens = True
    return tokenizer


def append_token(tokenizer: Any, end: str) -> None:
    """Make `tokenizer` append the token `end` to what it makes of a text already, in place."""
    from tokenizers import processors

    number = tokenizer.convert_tokens_to_ids(end)
    ending = processors.TemplateProcessing(single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, number)])
    backend = tokenizer.backend_tokenizer
    own = [backend.post_processor] if backend.post_processor is not None else []
    backend.post_processor = processors.Sequence([*own, ending])
