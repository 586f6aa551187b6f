"""Pools whose skills are cut to a number of tokens (SkillRouter's first version, appendix C)."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from skilltrain.data.pool.read import read_pool
from skilltrain.files import staged_folder
from skilltrain.models.loading import load_tokenizer, resolve_model
from skilltrain.models.tokens import TextTokenizer
from skilltrain.tables import SKILLS, write_table


class TokenLimits(NamedTuple):
    """Longest texts of a skill, in tokens."""

    description: int
    body: int


ENCODER_LIMITS = TokenLimits(description=300, body=2500)
RERANKER_LIMITS = TokenLimits(description=500, body=3000)


def write_cut_pool(pool: Path, out: Path, model: str, limits: TokenLimits) -> dict[str, int]:
    """Write a copy of a pool, with descriptions and bodies cut to a number of tokens.

    Args:
        pool: A SKILLS table, or a source of the stage `pool`.
        out: Folder to write.
        model: Folder, Hub id or package of the model whose tokenizer counts the tokens.
        limits: Longest description and body.

    Returns:
        Number of skills, of cut descriptions and of cut bodies.

    Raises:
        SkilltrainError: There is no such pool or model, or `out` is no empty folder.
    """
    skills = read_pool(pool)
    tokenizer = TextTokenizer(load_tokenizer(resolve_model(model, weights=False)))
    cut_skills = []
    for skill in skills:
        description = cut_to_tokens(skill.description, limits.description, tokenizer)
        body = cut_to_tokens(skill.body, limits.body, tokenizer)
        cut_skills.append(replace(skill, description=description, body=body))
    with staged_folder(out) as folder:
        write_table(cut_skills, SKILLS, folder)

    pairs = list(zip(skills, cut_skills, strict=True))
    return {
        "skills": len(skills),
        "cut_descriptions": sum(old.description != new.description for old, new in pairs),
        "cut_bodies": sum(old.body != new.body for old, new in pairs),
    }


def cut_to_tokens(text: str, max_tokens: int, tokenizer: TextTokenizer) -> str:
    """Return the beginning of a text, with at most `max_tokens` tokens.

    Example: if the tokens are `Merge`, ` PDF` and ` files`, two tokens give `Merge PDF`.
    """
    _, spans = tokenizer.ids_and_spans(text)
    if len(spans) <= max_tokens:
        return text
    # Tokens that are parts of one character all have its span, so the cut never splits it.
    first_cut_start, _ = spans[max_tokens]
    return text[:first_cut_start]
