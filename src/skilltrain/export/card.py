"""Model cards: the README.md of a saved model, from its run, its data and its evaluations."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.files import read_json, shareable, write_text
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.reranker import RerankerSettings
from skilltrain.runs import record_of
from skilltrain.templates import FIELDS_SEEN

_TEMPLATE = Path(__file__).parent / "templates" / "card.md.j2"
_CLASSES = {  # class that opens the model → kind, task on the Hub, tags
    "SentenceTransformer": ("encoder", "sentence-similarity", ["feature-extraction"]),
    "MultiVectorEncoder": ("encoder", "sentence-similarity", ["multi-vector", "late-interaction"]),
    "CrossEncoder": ("reranker", "text-ranking", ["cross-encoder", "reranker"]),
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_OPENED_NAME = re.compile(r'^model = \w+\("(.+)"\)', re.MULTILINE)


@dataclass(frozen=True)
class Published:
    """Facts that a run does not know about its model.

    Attributes:
        repo: Name on the Hub, OWNER/NAME.
        license: Licence id of the Hub, such as apache-2.0.
        reports: Folders of evaluations of the run.
    """

    repo: str | None = None
    license: str | None = None
    reports: Sequence[Path] = ()

    def __post_init__(self) -> None:
        from huggingface_hub.utils import HFValidationError, validate_repo_id

        if self.repo is None:
            return
        try:
            if "/" not in self.repo:
                raise HFValidationError("it has no owner")
            validate_repo_id(self.repo)
        except HFValidationError as error:
            fault = f"is no name of a model on the Hub: {error}"
            raise SkilltrainError(fault, where=self.repo, fix="write OWNER/NAME") from error


@dataclass(frozen=True)
class RunRecord:
    """Facts that a run knows about its model.

    Attributes:
        settings: Settings saved with the model.
        recipe: The run's resolved recipe.
        summary: The run's summary. Its key `dev` maps a metric to mean, low, high (the 95%
            interval) and n.
        exported: The exported checkpoint, if it is not the run's final model.
        form: The model's form, if it is not the one that training saves.
        run: The run's folder.
    """

    settings: EncoderSettings | RerankerSettings
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    exported: str | None = None
    form: Form | None = None
    run: Path | None = None


class Result(NamedTuple):
    """One metric of one system; `figure` has mean, low, high and n."""

    benchmark: str
    system: str
    uses_model: bool
    metric: str
    figure: Mapping[str, float]


def model_card(record: RunRecord, published: Published = Published()) -> str:
    """Write a model card as Markdown with YAML front matter.

    Local paths are cut to their last part, and no text of the training data is shown.

    Raises:
        SkilltrainError: No system of a report uses the run.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    model_class = "SentenceTransformer"
    if isinstance(record.settings, RerankerSettings):
        model_class = "CrossEncoder"
    elif record.form == "multi_vector":
        model_class = "MultiVectorEncoder"
    kind, task, tags = _CLASSES[model_class]

    results = [
        Result("development queries", "this model", True, metric, figure)
        for metric, figure in record.summary.get("dev", {}).items()
    ]
    for report in published.reports:
        results += _report_results(report, record.run or Path())
    evaluations = [
        EvalResult(
            task,
            "agent-skills",
            result.benchmark,
            result.metric,
            round(result.figure["mean"], 4),
            dataset_config=f"{result.benchmark}: {result.system}",
            metric_name=result.metric,
        )
        for result in results
        if result.uses_model
    ]

    base = record.recipe["model"]["source"]
    data = ModelCardData(
        library_name="sentence-transformers",
        pipeline_tag=task,
        license=published.license,
        base_model=base if _HUB_ID.fullmatch(base) and not Path(base).exists() else None,
        tags=["sentence-transformers", *tags, "agent-skills", "skilltrain"],
        model_name=f"agent skill {kind}" if evaluations else None,
        eval_results=evaluations or None,
    )
    variables = vars(record) | {
        "kind": kind,
        "model_class": model_class,
        "name": published.repo or ".",
        "base": shareable(base).removeprefix("package:"),
        "fields": FIELDS_SEEN[record.settings.template.skill.fields],
        "inputs": _inputs(record_of(record.run)) if record.run else (),
        "recipe": yaml.safe_dump(shareable(record.recipe), sort_keys=False, allow_unicode=True),
        "results": results,
        "summary_of": lambda folder: record_of(folder).get("summary", {}),
        "quoted": repr,
    }
    return f"{ModelCard.from_template(data, str(_TEMPLATE), **variables)}\n"


def rename_model(card: Path, repo: str) -> None:
    """Make the programs of a card open the repository `repo`, not a folder or another repository."""
    text = card.read_text(encoding="utf-8")
    name = _OPENED_NAME.search(text)
    if name is not None:  # else somebody rewrote the card
        write_text(card, text.replace(f'"{name[1]}"', f'"{repo}"'))


def _report_results(report: Path, run: Path) -> Iterator[Result]:
    """Yield the results of an evaluation. At least one of its systems uses the model of `run`."""
    metrics = read_json(report / "metrics.json")
    record = record_of(report)
    names = set()
    for key, folder, _ in _inputs(record):
        if folder.resolve() == run.resolve():  # the key is systems.NUMBER.…
            names.add(record["recipe"]["systems"][int(key.split(".")[1])]["name"])
    if not names:
        fault = f"no system of this report uses {run}"
        raise SkilltrainError(fault, where=report, fix="evaluate it first")
    for system in metrics["systems"]:
        uses_model = system["name"] in names
        for metric, figure in system["metrics"].items():
            yield Result(metrics["benchmark"], system["name"], uses_model, metric, figure)


def _inputs(record: Mapping[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Yield key, path and SHA-256 of each input in a run's record."""
    for key, sha256 in record.get("inputs", {}).items():
        value: Any = record["recipe"]
        for part in key.split("."):
            value = value[int(part) if isinstance(value, list) else part]
        yield key, Path(value), sha256
