r"""Cut the skills of a pool to a number of tokens (SkillRouter's first version, appendix C).

The first version limits descriptions and bodies in tokens. Later versions and the released code
limit them in characters. `skillrouter.py variant=paper` writes such pools from the skills it is
given. Use this program for another pool, such as a tier (a pool) of SkillRouter's benchmark. The
limits of the encoder are the default:

    python data_pipelines/token_limits.py POOL runs/paper/encoder_tier
    python data_pipelines/token_limits.py POOL runs/paper/reranker_tier \
        description_tokens=500 body_tokens=3000

POOL is a SKILLS table, or a source of the stage `pool`. docs/papers/skillrouter.md says how to
evaluate on the new pools.
"""

from pathlib import Path

from pydantic import Field

from skilltrain.config import Config
from skilltrain.papers.skillrouter.token_limits import ENCODER_LIMITS, TokenLimits, write_cut_pool
from skilltrain.recipe import run_pipeline


class Pipeline(Config):
    """Settings of this pipeline."""

    pool: Path
    out: Path
    tokenizer: str = Field(
        default="Qwen/Qwen3-Embedding-0.6B", description="model whose tokenizer counts the tokens"
    )
    description_tokens: int = Field(
        default=ENCODER_LIMITS.description, ge=0, description="longest description, in tokens"
    )
    body_tokens: int = Field(
        default=ENCODER_LIMITS.body, ge=0, description="longest body, in tokens"
    )


def run(pipeline: Pipeline) -> dict[str, int]:
    """Write a pool of cut skills, and return how many descriptions and bodies were cut."""
    limits = TokenLimits(pipeline.description_tokens, pipeline.body_tokens)
    return write_cut_pool(pipeline.pool, pipeline.out, pipeline.tokenizer, limits)


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
