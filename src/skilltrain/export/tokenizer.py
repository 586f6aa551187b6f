"""Tokenizers that do by themselves what our models do around theirs, for readers that only have the folder."""

import copy
import json
from pathlib import Path
from typing import Any

from skilltrain.models.text_tokens import TextTokenizer

# A processor has no reader of its own: it is read as the part of a tokenizer that does nothing else.
_EMPTY = {"added_tokens": [], "model": {"type": "BPE", "vocab": {}, "merges": []}}


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
    """Make `tokenizer` append the token `end` to what it makes of a text already, in place.

    A tokenizer whose added tokens are fixed in code (BertProcessing, RobertaProcessing) is left as it is.
    """
    backend = tokenizer.backend_tokenizer
    state = json.loads(backend.post_processor.__getstate__()) if backend.post_processor else None
    parts = [] if state is None else state["processors"] if state["type"] == "Sequence" else [state]
    if any(part["type"] in ("BertProcessing", "RobertaProcessing") for part in parts):
        return
    templates = [part for part in parts if part["type"] == "TemplateProcessing"]
    if not templates:
        templates = [_bare_template()]
        parts = [*parts, *templates]
    last = templates[-1]
    for form in ("single", "pair"):
        last[form].append({"SpecialToken": {"id": end, "type_id": 0}})
    number = tokenizer.convert_tokens_to_ids(end)
    last["special_tokens"][end] = {"id": end, "ids": [number], "tokens": [end]}
    backend.post_processor = _processor({"type": "Sequence", "processors": parts})


def _bare_template() -> dict[str, Any]:
    """A TemplateProcessing that adds nothing."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {"type": "TemplateProcessing", "single": [first], "pair": [first, second], "special_tokens": {}}


def _processor(state: dict[str, Any]) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(json.dumps(_EMPTY | {"post_processor": state})).post_processor
