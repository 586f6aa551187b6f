r"""Cut the skills of a pool to a number of tokens (SkillRouter's first version, appendix C).

The first version limits descriptions and bodies in tokens. Later versions and the released code
limit them in characters, like the recipes. Write one pool for the encoder and one for the reranker:

    python data_pipelines/token_limits.py runs/paper/pool runs/paper/encoder_pool
    python data_pipelines/token_limits.py runs/paper/pool runs/paper/reranker_pool \
        description_tokens=500 body_tokens=3000

POOL is a SKILLS table, or a source of the stage `pool`. docs/papers/skillrouter.md says how to
train and evaluate on the new pools.
"""

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from skilltrain.config import Config
from skilltrain.data.pool.read import read_pool
from skilltrain.files import staged_folder
from skilltrain.models.loading import load_tokenizer, resolve_model
from skilltrain.models.tokens import TextTokenizer
from skilltrain.recipe import run_pipeline
from skilltrain.tables import SKILLS, write_table


class Pipeline(Config):
    """Settings of this pipeline."""

    pool: Path
    out: Path
    tokenizer: str = Field(
        default="Qwen/Qwen3-Embedding-0.6B", description="model whose tokenizer counts the tokens"
    )
    description_tokens: int = Field(default=300, ge=0, description="longest description, in tokens")
    body_tokens: int = Field(default=2500, ge=0, description="longest body, in tokens")


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


def run(pipeline: Pipeline) -> dict[str, int]:
    """Write a pool of cut skills, and return how many descriptions and bodies were cut."""
    skills = read_pool(pipeline.pool)
    folder = resolve_model(pipeline.tokenizer, weights=False)
    tokenizer = TextTokenizer(load_tokenizer(folder))
    cut_skills = []
    for skill in skills:
        description = cut_to_tokens(skill.description, pipeline.description_tokens, tokenizer)
        body = cut_to_tokens(skill.body, pipeline.body_tokens, tokenizer)
        cut_skills.append(replace(skill, description=description, body=body))
    with staged_folder(pipeline.out) as out:
        write_table(cut_skills, SKILLS, out)

    pairs = list(zip(skills, cut_skills, strict=True))
    return {
        "skills": len(skills),
        "cut_descriptions": sum(old.description != new.description for old, new in pairs),
        "cut_bodies": sum(old.body != new.body for old, new in pairs),
    }


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
