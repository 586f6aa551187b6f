r"""Make the training lists of SkillRouter (sections 4.2 and 4.3).

recipes/sr_emb_*.yaml and recipes/sr_rank_*.yaml train on them.

Lists for the encoder, before it is trained:
    python data_pipelines/skillrouter.py SKILLS runs/full
Lists for the reranker, with the trained encoder:
    python data_pipelines/skillrouter.py SKILLS runs/full runs/full/sr_emb_0.6b
Lists for recipes/paper/sr_emb_*.yaml, and the pool that these recipes train on. Its skills are cut
to the limits of the paper's first version, in tokens:
    python data_pipelines/skillrouter.py SKILLS runs/paper variant=paper
Lists and pool for recipes/paper/sr_rank_*.yaml, with the trained encoder:
    python data_pipelines/skillrouter.py SKILLS runs/paper runs/paper/sr_emb_0.6b variant=paper
Either with the prompt of table 2, which you copy into a YAML file (docs/papers/skillrouter.md):
    python data_pipelines/skillrouter.py SKILLS runs/paper variant=paper prompt=table_2.yaml
Another model that writes queries, and other quotas:
    python data_pipelines/skillrouter.py SKILLS runs/other \
        llm='{kind: openai, model: gpt-4o}' quotas='{semantic: 6, lexical: 4}'
Queries from the skills' own texts, without a model; the recipes then need data.pool=OUT/queries:
    python data_pipelines/skillrouter.py SKILLS OUT llm='{kind: own_text}'

SKILLS is a folder of SKILL.md files, JSON Lines or parquet. GPT-4o-mini writes the queries, with
the key in OPENAI_API_KEY. `skilltrain synthesize --help` shows how to use another server or a local
model. Every setting of `Pipeline` below is an option.

Notes:
    - With own_text, a query is a passage of its gold skill. Stages after `synthesize` read the pool
      without these passages, or a model would learn to find a text in itself.
"""

import shutil
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from skilltrain.config import Config
from skilltrain.files import read_json, staged_folder, write_json
from skilltrain.papers.skillrouter.token_limits import (
    ENCODER_LIMITS,
    RERANKER_LIMITS,
    TokenLimits,
    write_cut_pool,
)
from skilltrain.recipe import run_pipeline
from skilltrain.runs import input_fingerprint, run_stage
from skilltrain.stage import parse_recipe

INSTRUCTION = (
    "Given a task description, retrieve the most relevant skill document that would help an agent "
    "complete the task"
)
CUT_RECORD = "cut.json"
"""File in a cut pool that says which pool, tokenizer and limits made it."""
_PAPER_FILTER: dict[str, Any] = {
    "layers": [
        {"name": "name"},
        # (4.2) All trigrams count. Ours leaves out those of templates.
        {"name": "jaccard", "max_names": None},
        {"name": "cosine"},
    ]
}
# Settings in which the paper differs from our defaults, by the folder that a stage writes.
PAPER: dict[str, dict[str, Any]] = {
    "pool": {"drop_duplicates": False},  # (2.1) Ours drops skills with equal texts.
    "queries": {
        "prompt": "skillrouter",  # our words for table 2; ours: seven styles
        "max_skills": 37_979,  # (4.2) drawn by category; ours: one query for every skill
        "dev_share": 0,  # none are held out; ours: 5% of the skills
    },
    # (4.2) BM25 ranks the same top 50. Ours: the whole pool.
    "mined": {"lexical_among": "semantic"},
    "filtered": _PAPER_FILTER,
    # The best 3 of the top 50 by BM25. A random sample of the same 50 would be semantic negatives.
    "encoder_lists": {"best_of": ["lexical"]},
    # (4.3) 32,283 of 37,979 lists are left. Ours: the gold skill is added to the list.
    "reranker_lists": {"absent_gold": "drop"},
    "candidates_filtered": _PAPER_FILTER,  # (4.3) the same filter
}
# Settings of the base encoder in which the first version differs. It has no limits in characters:
# in effect, 100,000 are none. The limit in tokens leaves room for a name, a description and a body.
PAPER_BASE: dict[str, Any] = {
    "template": {
        "instruction": INSTRUCTION,
        "query_chars": 100_000,
        "skill": {"description_chars": 100_000, "body_chars": 100_000},
    },
    "max_tokens": 3000,
}


class Pipeline(Config):
    """Settings of this pipeline."""

    skills: Path
    out: Path
    trained: Path | None = Field(
        default=None, description="the trained encoder, for the reranker's lists"
    )
    base: str = Field(
        default="Qwen/Qwen3-Embedding-0.6B", description="encoder that mines and filters"
    )
    llm: dict[str, Any] = Field(
        default={"kind": "openai", "model": "gpt-4o-mini"}, description="who writes queries"
    )
    prompt: str | None = Field(
        default=None, description="named prompt or YAML file for the queries; null: the variant's"
    )
    template: dict[str, Any] | None = Field(
        default={"instruction": INSTRUCTION},
        description="what the base sees; variant=paper: without limits in characters",
    )
    max_tokens: int | None = Field(
        default=2048,
        description="token limit of the base's texts, as in the recipes; variant=paper: 3000",
    )
    variant: Literal["ours", "paper"] = Field(
        default="ours", description="our defaults, or the paper's (PAPER above)"
    )
    depth: int = Field(
        default=50,
        description="candidates filtered before the cut to 20; 20: cut first, then filter",
    )
    quotas: dict[str, int] = Field(
        default={"semantic": 4, "lexical": 3, "taxonomy": 2, "random": 1},
        description="negatives in a list of the encoder, by source",
    )

    @property
    def inputs(self) -> dict[str, Path]:
        """Queries, and the pool to train on, which must not contain the queries."""
        queries = self.out / "queries"
        cuts_queries = self.llm.get("kind") == "own_text"
        return {"pool": queries if cuts_queries else self.out / "pool", "queries": queries}

    @property
    def encoder_pool(self) -> Path:
        """The pool to train the encoder on."""
        return self.out / "encoder_pool" if self.variant == "paper" else self.inputs["pool"]

    @property
    def reranker_pool(self) -> Path:
        """The pool to train the reranker on."""
        return self.out / "reranker_pool" if self.variant == "paper" else self.inputs["pool"]


def encoder_recipes(pipeline: Pipeline, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes that make the pool, the queries and the encoder's lists."""
    out = pipeline.out
    inputs = pipeline.inputs
    lists = {"stage": "lists", **inputs, "quotas": pipeline.quotas}
    recipes = [
        {
            "stage": "pool",
            "sources": pipeline.skills,
            "categories": "taxonomy",
            "encoder": base,
            "out": out / "pool",
        },
        {
            "stage": "synthesize",
            "pool": out / "pool",
            "llm": pipeline.llm,
            "out": out / "queries",
        },
        {"stage": "mine", **inputs, "encoder": base, "out": out / "mined"},
        {
            "stage": "filter",
            **inputs,
            "rankings": out / "mined",
            "encoder": base,
            "out": out / "filtered",
        },
        {**lists, "rankings": out / "filtered", "out": out / "encoder_lists"},
    ]
    if pipeline.variant == "paper":
        # Lists without the filter, for the ablation (5.4.1).
        raw = {"rankings": out / "mined", "out": out / "encoder_lists_raw"}
        recipes.append(lists | PAPER["encoder_lists"] | raw)
    return recipes


def reranker_recipes(pipeline: Pipeline, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the recipes that make the reranker's lists of 20 from the trained encoder."""
    out = pipeline.out
    inputs = pipeline.inputs
    encoder = {"kind": "dense", "source": str(pipeline.trained), "cache": out / "vectors"}
    return [
        {
            "stage": "candidates",
            **inputs,
            # The trained encoder searches the pool it was trained on. Later stages read the whole
            # pool.
            "pool": pipeline.encoder_pool,
            "system": {"name": "trained encoder", "rankers": [encoder]},
            "depth": pipeline.depth,
            "out": out / "candidates",
        },
        {
            "stage": "filter",
            **inputs,
            "rankings": out / "candidates",
            "encoder": base,
            "judged_positives": "keep",
            "out": out / "candidates_filtered",
        },
        {
            "stage": "lists",
            **inputs,
            "rankings": out / "candidates_filtered",
            "list_size": 20,
            "out": out / "reranker_lists",
        },
    ]


def run(pipeline: Pipeline) -> None:
    """Make the encoder's lists, and with a trained encoder also the reranker's."""
    base = {
        "source": pipeline.base,
        "template": pipeline.template,
        "max_tokens": pipeline.max_tokens,
        "query_max_tokens": pipeline.max_tokens,
        "cache": pipeline.out / "vectors",
    }
    if pipeline.variant == "paper":
        for name, value in PAPER_BASE.items():
            # A setting that the user gives stays.
            if name not in pipeline.model_fields_set:
                base[name] = value
    run_recipes(pipeline, encoder_recipes(pipeline, base))
    # We apply appendix C to the two trained models only. BM25 and the filter of bodies (4.2)
    # compare whole texts, so mining and filters use the whole pool. The base encoder cuts the
    # texts there at 3,000 tokens (PAPER_BASE).
    if pipeline.variant == "paper":
        cut_pool(pipeline.inputs["pool"], pipeline.encoder_pool, pipeline.base, ENCODER_LIMITS)
    if pipeline.trained is not None:
        run_recipes(pipeline, reranker_recipes(pipeline, base))
        # No stage reads this pool. Only the reranker's training, which comes next, does.
        if pipeline.variant == "paper":
            pool = pipeline.inputs["pool"]
            cut_pool(pool, pipeline.reranker_pool, pipeline.base, RERANKER_LIMITS)
    print(closing_line(pipeline))


def run_recipes(pipeline: Pipeline, recipes: list[dict[str, Any]]) -> None:
    """Run stages in order, with the settings of the variant."""
    for recipe in recipes:
        if pipeline.variant == "paper":
            recipe |= PAPER.get(recipe["out"].name, {})
        if recipe["stage"] == "synthesize" and pipeline.prompt is not None:
            recipe["prompt"] = pipeline.prompt
        summary = run_stage(parse_recipe(recipe, __file__), resume=False)
        print(recipe["stage"], summary)


def cut_pool(pool: Path, out: Path, model: str, limits: TokenLimits) -> None:
    """Write a pool whose skills are cut to a number of tokens, unless `out` is this pool already.

    A pool that was cut from other skills, by another tokenizer or to other limits is replaced.

    Args:
        pool: The pool with whole skills.
        out: Folder to write.
        model: Folder, Hub id or package of the model whose tokenizer counts the tokens.
        limits: Longest description and body.

    Raises:
        SkilltrainError: `out` is not empty, and this function has not written it.
    """
    folder = Path(model)
    inputs = {
        "pool": input_fingerprint(pool),
        # A Hub id or the name of a package identifies the tokenizer.
        "tokenizer": input_fingerprint(folder) if folder.is_dir() else model,
        "limits": limits._asdict(),
    }
    record = out / CUT_RECORD
    if record.is_file():
        if read_json(record) == inputs:
            return
        shutil.rmtree(out)
    # The pool and its record appear together, so a killed run leaves no pool without a record.
    with staged_folder(out) as folder:
        counts = write_cut_pool(pool, folder, model, limits)
        write_json(folder / CUT_RECORD, inputs)
    print("token_limits", counts)


def closing_line(pipeline: Pipeline) -> str:
    """Return a line that says which pool to train on."""
    if pipeline.variant == "ours":
        return f"train with data.pool={pipeline.inputs['pool']}"
    line = f"train the encoder with data.pool={pipeline.encoder_pool}"
    if pipeline.trained is not None:
        line += f" and the reranker with data.pool={pipeline.reranker_pool}"
    return line


if __name__ == "__main__":
    run_pipeline(Pipeline, run, __doc__)
