"""Tokenizers that do by themselves what our models do around theirs, for readers that only have the folder."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from skilltrain.models.tokens import TextTokenizer, as_special
from skilltrain.templates import QWEN3_RERANKER_PREFIX, QWEN3_RERANKER_SUFFIX, RerankerTemplate

_CHAT_TEMPLATE = Path(__file__).parent / "templates" / "yes_no_chat.j2"


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
    names = control_tokens(tokenizer)
    known = {token.content: token for token in tokenizer.added_tokens_decoder.values()}
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.add_special_tokens([as_special(known[name]) for name in names])
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


def yes_no_chat_template(template: RerankerTemplate, control_tokens: Sequence[str]) -> str:
    """Qwen3-Reranker's chat form for the roles system (another instruction), query and document.

    The query is cut to the template's characters. The name of a control token inside query or document is broken up
    by a space: untrusted text must not end its own message (skilltrain reads such names as plain text, without it).
    """
    values = {
        "CONTROL_TOKENS": [*control_tokens],
        "INSTRUCTION": template.instruction,
        "PREFIX": QWEN3_RERANKER_PREFIX,
        "SUFFIX": QWEN3_RERANKER_SUFFIX,
        "SEPARATOR": template.separator,
        "QUERY_CHARS": template.query_chars or 10**9,  # null: all of it
    }
    lines = [f"{{%- set {name} = {json.dumps(value, ensure_ascii=False)} -%}}" for name, value in values.items()]
    return "\n".join([*lines, _CHAT_TEMPLATE.read_text(encoding="utf-8")]).strip() + "\n"
