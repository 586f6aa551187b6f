"""Model cards: the README.md of a saved model, from its run, its data and its evaluations.

Notes:
    - A card shows only the last part of a local path, and no text of the training data.
    - A published base model is always listed. Any other base model is listed if it is on the Hub.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from jinja2 import Template

from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.files import read_json, shareable, write_text
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.reranker import RerankerSettings
from skilltrain.runs import record_of
from skilltrain.templates import FIELDS_SEEN, RerankerTemplate

_TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
# Licences that the Hub accepts, from its documentation.
_LICENSES = Path(__file__).with_name("licenses.txt")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")  # OWNER/NAME
_OPENED_NAME = re.compile(r'^model = \w+\("([^"]+)"', re.MULTILINE)  # in the programs of a card


class _ModelClass(NamedTuple):
    """Kind of the models that a class opens, and their task and tags on the Hub."""

    kind: Literal["encoder", "reranker"]
    task: str
    tags: list[str]


_MODEL_CLASSES = {
    "SentenceTransformer": _ModelClass("encoder", "sentence-similarity", ["feature-extraction"]),
    "MultiVectorEncoder": _ModelClass(
        "encoder", "sentence-similarity", ["multi-vector", "late-interaction"]
    ),
    "CrossEncoder": _ModelClass("reranker", "text-ranking", ["cross-encoder", "reranker"]),
}
# Tag of models that were trained with a setting, by the key of the setting.
_RECIPE_TAGS = {"adapter": "lora", "late_interaction": "late-interaction"}


@dataclass(frozen=True)
class Published:
    """Facts about a model that its run does not know.

    Attributes:
        repo: Name on the Hub, OWNER/NAME.
        license: Licence id of the Hub, such as apache-2.0.
        reports: Folders of evaluations of the run.
        base_model: Name of the base model on the Hub, if the run read it from elsewhere.
    """

    repo: str | None = None
    license: str | None = None
    reports: Sequence[Path] = ()
    base_model: str | None = None

    def __post_init__(self) -> None:
        for name in (self.repo, self.base_model):
            if name is not None:
                _check_hub_name(name)
        if self.license is not None:
            _check_license(self.license)


def _check_hub_name(name: str) -> None:
    """Raise SkilltrainError if `name` cannot be the name of a model on the Hub.

    A model of an organisation or a user is named OWNER/NAME.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        # The Hub's own check accepts a name without an owner.
        if "/" not in name:
            raise HFValidationError("it has no owner")
        validate_repo_id(name)
    except HFValidationError as error:
        problem = f"is no name of a model on the Hub: {error}"
        fix = "write OWNER/NAME"
        raise SkilltrainError("invalid-repository", problem, where=name, fix=fix) from error


def _check_license(license: str) -> None:
    """Check that a licence is one of the Hub's licence ids.

    The error suggests the nearest id, such as `apache-2.0` for "Apache 2.0".

    Raises:
        SkilltrainError: The Hub does not know the licence.
    """
    license_ids = _LICENSES.read_text(encoding="utf-8").split()
    if license not in license_ids:
        name = license.lower().replace(" ", "-")
        # With the cutoff 0 there is always a nearest id, even if it is not similar.
        [nearest] = difflib.get_close_matches(name, license_ids, n=1, cutoff=0)
        fix = f"the nearest id is {nearest}; write 'other' for a licence that has no id"
        raise SkilltrainError(
            "invalid-license", "is no licence id of the Hub", where=license, fix=fix
        )


@dataclass(frozen=True)
class RunRecord:
    """Facts about a model that its run knows.

    Attributes:
        settings: Settings saved with the model.
        recipe: The run's resolved recipe.
        summary: The run's summary. Its key `dev` maps a metric to mean, low, high (the 95%
            interval) and n.
        exported: The exported checkpoint, if it is not the run's final model.
        form: The model's form, if it is not the one that training saves.
        run: The run's folder.
        model: The `Encoder` or `Reranker`, for facts such as its dimension.
    """

    settings: EncoderSettings | RerankerSettings
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    exported: str | None = None
    form: Form | None = None
    run: Path | None = None
    model: Any = None


class Result(NamedTuple):
    """One metric of one system on one benchmark.

    Attributes:
        uses_model: Whether the system uses the model of the card.
        estimate: Values of mean, low and high (the 95% interval) and n.
    """

    benchmark: str
    system: str
    uses_model: bool
    metric: str
    estimate: Mapping[str, float]


class Input(NamedTuple):
    """An input of a run: the key of its setting, its path, and its SHA-256."""

    key: str
    path: Path
    sha256: str


def model_card(record: RunRecord, published: Published = Published()) -> str:
    """Return a model card as Markdown with YAML front matter.

    Args:
        record: Facts that the run knows, such as its recipe and its summary.
        published: Facts that only the user knows, such as the licence and the name on the Hub.

    Raises:
        SkilltrainError: A report of `published` does not evaluate this model.
    """
    from huggingface_hub import ModelCard

    # The class of sentence-transformers that opens the model. The first is for an encoder that
    # returns one vector per text.
    class_name = "SentenceTransformer"
    if isinstance(record.settings, RerankerSettings):
        class_name = "CrossEncoder"
    elif record.form == "multi_vector":
        class_name = "MultiVectorEncoder"
    model_class = _MODEL_CLASSES[class_name]

    # Training measured the model on development queries, and each report holds an evaluation.
    results = [
        Result(
            "development queries", "this model", uses_model=True, metric=metric, estimate=estimate
        )
        for metric, estimate in record.summary.get("dev", {}).items()
    ]
    for report in published.reports:
        # A report is the folder of an evaluation. Its systems name the runs that they use.
        results += _report_results(report, record.run or Path())

    base = published.base_model or record.recipe["model"]["source"]
    data = _card_data(model_class, results, base, published.license)
    if published.base_model:
        # `_card_data` leaves out a base model that may be a local folder. The user's own name of
        # the base model is always listed.
        data.base_model = published.base_model
    data.tags += _tags_of(record, class_name)
    # `shareable` removes parent folders from paths, because they may name a user.
    recipe = shareable(record.recipe)
    run_record = record_of(record.run) if record.run else {}
    # The names that the template of the card uses, with their values.
    variables = vars(record) | {
        "kind": model_class.kind,
        "model_class": class_name,
        "name": published.repo or ".",
        "base": shareable(base).removeprefix("package:"),
        # Fields of a skill that the model reads, such as its name and its body.
        "fields": FIELDS_SEEN[record.settings.template.skill.fields],
        "inputs": _inputs(run_record),
        "provenance": run_record.get("provenance"),
        "recipe_text": yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True),
        "results": results,
        "summary_of": lambda folder: record_of(folder).get("summary", {}),
        "quoted": repr,
    }
    return f"{ModelCard.from_template(data, str(_TEMPLATE), **variables)}\n"


def _tags_of(record: RunRecord, class_name: str) -> list[str]:
    """Return tags for the training and the form of a model, and for the server TEI.

    Args:
        record: Facts that the run knows.
        class_name: Class of sentence-transformers that opens the model.
    """
    tags = [tag for key, tag in _RECIPE_TAGS.items() if record.recipe.get(key)]
    if record.form == "onnx":
        tags.append("onnx")
    # TEI serves vectors of whole texts and scores of pairs, but runs no code of a model.
    template = record.settings.template
    is_pair = isinstance(template, RerankerTemplate) and template.form == "pair"
    brings_code = record.recipe["model"].get("trust_remote_code")
    if (class_name == "SentenceTransformer" or is_pair) and not brings_code:
        tags.append("text-embeddings-inference")
    return tags


def write_card(file: Path, template: Path, **variables: Any) -> None:
    """Write the card of a repository that holds no model.

    Args:
        file: The README.md to write.
        template: Template of the card, with its front matter.
        variables: Values by the names that the template uses.
    """
    text = Template(template.read_text(encoding="utf-8")).render(variables)
    write_text(file, f"{text}\n")


def rename_model(card: Path, repo: str) -> None:
    """Make the example programs of a card open the repository `repo`.

    For example, `SentenceTransformer(".")` becomes `SentenceTransformer("me/my-model")`. A card
    without such a program, because somebody rewrote it, stays as it is.

    Args:
        card: Path of the model card.
        repo: Name of the model on the Hub, OWNER/NAME.
    """
    text = card.read_text(encoding="utf-8")
    name = _OPENED_NAME.search(text)
    if name is not None:
        write_text(card, text.replace(f'"{name[1]}"', f'"{repo}"'))


def _card_data(
    model_class: _ModelClass, results: Sequence[Result], base: str, license: str | None
) -> Any:
    """Return the front matter of a card.

    Args:
        model_class: Task and tags on the Hub of the class that opens the model.
        results: Results of all systems. Only results of systems that use the model are listed.
        base: Source of the base model: a name on the Hub or a local folder.
        license: Licence id of the Hub.
    """
    from huggingface_hub import EvalResult, ModelCardData

    evaluations = [
        EvalResult(
            task_type=model_class.task,
            dataset_type="agent-skills",
            dataset_name=result.benchmark,
            metric_type=result.metric,
            metric_value=round(result.estimate["mean"], 4),
            # The client merges results of the same data set and configuration. The name of the
            # system keeps the results of different systems apart.
            dataset_config=f"{result.benchmark}: {result.system}",
            metric_name=result.metric,
        )
        for result in results
        if result.uses_model
    ]
    # A text such as `models/base` may be the name of a local folder instead of a model on the Hub.
    base, _, _ = base.partition("@")  # without the revision
    is_on_hub = _HUB_ID.fullmatch(base) and not Path(base).exists()
    return ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag=model_class.task,
        license=license,
        base_model=base if is_on_hub else None,
        tags=["sentence-transformers", *model_class.tags, "agent-skills", "skilltrain"],
        # The Hub needs a model name for results. Without results, it is left out.
        model_name=f"agent skill {model_class.kind}" if evaluations else None,
        eval_results=evaluations or None,
    )


def _report_results(report: Path, run: Path) -> Iterator[Result]:
    """Yield the results of all systems of an evaluation.

    Args:
        report: Folder of the evaluation.
        run: Folder of the model's run.

    Raises:
        SkilltrainError: No system of the evaluation uses the model.
    """
    metrics = read_json(report / "metrics.json")
    record = record_of(report)
    # An evaluation lists the folders that its systems read. One of these may be the model's run.
    systems_with_model = set()  # names of the systems
    for run_input in _inputs(record):
        if run_input.path.resolve() == run.resolve():
            _, position, *_ = run_input.key.split(".")  # the key is systems.POSITION.…
            systems_with_model.add(record["recipe"]["systems"][int(position)]["name"])
    if not systems_with_model:
        problem = f"no system of this report uses {run}"
        raise SkilltrainError("other-run", problem, where=report, fix="evaluate it first")

    for system in metrics["systems"]:
        uses_model = system["name"] in systems_with_model
        for metric, estimate in system["metrics"].items():
            yield Result(metrics["benchmark"], system["name"], uses_model, metric, estimate)


def _inputs(record: Mapping[str, Any]) -> Iterator[Input]:
    """Yield the inputs in a run's record: the files and folders that the run read.

    The record stores the hash of each input under a key such as `systems.0.source`. The path of
    this input is in the recipe: `recipe["systems"][0]["source"]`.
    """
    for key, sha256 in record.get("inputs", {}).items():
        # Follow the parts of the key through the recipe. A list has positions as parts.
        value: Any = record["recipe"]
        for name in key.split("."):
            value = value[int(name)] if isinstance(value, list) else value[name]
        yield Input(key, Path(value), sha256)
