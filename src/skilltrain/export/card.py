"""The README.md of a saved model, from its run, the data's history, the base's licence, and evaluations."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.files import read_json
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.loading import resolve_model
from skilltrain.models.reranker import RerankerSettings
from skilltrain.runs import record_of
from skilltrain.tables import SKILLS, read_table, table_path
from skilltrain.templates import FIELDS_SEEN
from skilltrain.version import __version__

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_SOURCE = re.compile(r"hf:([^:]+)")
_LEAST_SHARE = 0.01  # of the pool's skills, for a language to be named
_SECRET_KEY = re.compile(r"(^|_)(key|token|secret|password|credentials)$", re.IGNORECASE)
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{10,}|(?<=://)[^/\s@]+@")
_HOMES = ("home", "Users")


@dataclass(frozen=True)
class Published:
    """What a run cannot know of its model: its name on the Hub, its licence, the reports of evaluations of the run."""

    repo: str | None = None
    license: str | None = None
    reports: Sequence[Path] = ()

    def __post_init__(self) -> None:
        if self.repo is not None and _HUB_ID.fullmatch(self.repo) is None:
            raise SkilltrainError(
                "is no name of a model on the Hub", where=self.repo, fix="write OWNER/NAME"
            )


@dataclass(frozen=True)
class RunRecord:
    """What a run, in the folder `run`, has to say of its model.

    `summary` is the run's own; its key `dev` maps a measure to mean, low, high (the 95% interval) and n. `exported`
    names the checkpoint, if it is not the run's chosen one; `interpolate` is its share in a mean with the base.
    """

    settings: EncoderSettings | RerankerSettings
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    exported: str | None = None
    interpolate: float | None = None
    form: Form | None = None
    run: Path | None = None

    @property
    def kind(self) -> str:
        return "encoder" if isinstance(self.settings, EncoderSettings) else "reranker"

    @property
    def base(self) -> str:
        return self.recipe["model"]["source"]


def model_card(record: RunRecord, published: Published = Published()) -> str:
    """Markdown with YAML front matter, for the Hub and for whoever opens the folder.

    It shows only the last part of local paths, nothing that looks like a key, and no text of the training data.
    Raises SkilltrainError for a report in which no system uses the run.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    files = PackageLoader("skilltrain.export")
    environment = Environment(
        loader=files, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": _number, "quoted": repr}
    results = [_read_results(report, record.run or Path()) for report in published.reports]
    told = {
        "kind": record.kind,
        "base": shareable(record.base).removeprefix("package:"),
        "recipe": yaml.safe_dump(shareable(record.recipe), sort_keys=False, allow_unicode=True),
        "front_matter": _front_matter(record, published, results),
        "seen": FIELDS_SEEN[record.settings.template.skill.fields],
        "base_license": _base_license(record.base),
        "base_is_on_hub": _is_on_hub(record.base),
        "published": published,
        "results": results,
        "steps": data_steps(record.run) if record.run else [],
        "version": __version__,
    }
    return environment.get_template("card.md.j2").render(vars(record) | told) + "\n"


def _front_matter(
    record: RunRecord, published: Published, results: Sequence[Mapping[str, Any]]
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    task, own = "sentence-similarity", ["sentence-transformers", "feature-extraction"]
    if isinstance(record.settings, RerankerSettings):
        is_ours = record.settings.template.form == "cosine_pair"  # only skilltrain opens it
        task, own = "text-ranking", [] if is_ours else ["sentence-transformers", "cross-encoder"]
    elif record.form == "multi_vector":
        own = ["sentence-transformers", "multi-vector", "late-interaction"]
    found = [("agent-skills-dev", "development queries", record.summary.get("dev", {}))]
    found += [("agent-skills", one["benchmark"], one["rows"][one["own"][0]]) for one in results]
    figures = [
        EvalResult(task, kind, name, metric, round(value["mean"], 4), metric_name=metric)
        for kind, name, measures in found
        for metric, value in measures.items()
    ]
    pool = record.recipe.get("data", {}).get("pool")
    data = ModelCardData(
        library_name="sentence-transformers" if own else "skilltrain",
        pipeline_tag=task,
        license=published.license,
        base_model=record.base if _is_on_hub(record.base) else None,
        tags=[
            *own,
            *(["reranker"] if record.kind == "reranker" else []),
            "agent-skills",
            "skilltrain",
        ],
        model_name=(published.repo or f"agent skill {record.kind}") if figures else None,
        eval_results=figures or None,
        **(_pool_facts(Path(pool)) if pool else {}),
    )
    return data.to_yaml()


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def _read_results(report: Path, run: Path) -> dict[str, Any]:
    """An evaluation's measures by system (`rows`), and which systems use the model of `run` (`own`), at least one."""
    found, record = read_json(report / "metrics.json"), record_of(report)
    uses = [key for key, folder, _ in _inputs(record) if folder.resolve() == run.resolve()]
    systems = enumerate(record.get("recipe", {}).get("systems", ()))
    own = [
        system["name"]
        for n, system in systems
        if any(key.startswith(f"systems.{n}.") for key in uses)
    ]
    if not own:
        raise SkilltrainError(
            f"no system of this report uses {run}", where=report, fix="evaluate it first"
        )
    rows = {system["name"]: system["metrics"] for system in found["systems"]}
    return {"benchmark": found["benchmark"], "rows": rows, "own": own}


def data_steps(run: Path) -> list[dict[str, str]]:
    """The stages that what `run` read went through, the first one first, as far as their folders still exist."""
    steps: dict[str, dict[str, str]] = {}
    for _, folder, sha256 in reversed([*_inputs(record_of(run))]):
        if inner := record_of(folder):
            facts = {"stage": inner["recipe"]["stage"], "counts": _counts(inner.get("summary", {}))}
            for step in (*data_steps(folder), {**facts, "name": folder.name, "sha256": sha256}):
                steps.setdefault(step["sha256"], step)
    return [*steps.values()]


def _inputs(record: Mapping[str, Any]) -> Iterator[tuple[str, Path, str]]:
    """Yield (key, path, SHA-256) of each input of a run."""
    for key, sha256 in record.get("inputs", {}).items():
        value: Any = record["recipe"]
        for part in key.split("."):
            value = value[int(part)] if isinstance(value, list) else value[part]
        yield key, Path(value), sha256


def _counts(summary: Mapping[str, Any]) -> str:
    """Counts in words: `num_kept 320; dropped_by_layer: name 3, jaccard 5`."""
    parts = []
    for key, value in summary.items():
        if isinstance(value, int):
            parts.append(f"{key} {value:,}")
        elif (
            isinstance(value, Mapping)
            and value
            and all(isinstance(count, int) for count in value.values())
        ):
            parts.append(
                f"{key}: "
                + ", ".join(f"{str(name).rsplit('/')[-1]} {n:,}" for name, n in value.items())
            )
    return "; ".join(parts).replace("|", "\\|")


def _is_on_hub(source: str) -> bool:
    """Whether a model's source names one of the Hub, and no folder here."""
    return _HUB_ID.fullmatch(source) is not None and not Path(source).expanduser().exists()


def _base_license(source: str) -> str | None:
    """The licence that the card beside a base model's weights states; None for one of the Hub: its page knows."""
    from huggingface_hub import ModelCard

    try:
        card = None if _is_on_hub(source) else resolve_model(source, weights=False) / "README.md"
        return ModelCard.load(card).data.get("license") if card and card.is_file() else None
    except (SkilltrainError, ValueError):  # it is gone, or its card is none
        return None


def _pool_facts(pool: Path) -> dict[str, Any]:
    """The languages of the skills, most frequent first, and the Hub's data sets that the pool was made from."""
    counts: Counter[str] = Counter()
    if table_path(pool, SKILLS).is_file():
        counts.update(filter(None, read_table(pool, SKILLS).column("lang").to_pylist()))
    languages = [
        lang for lang, count in counts.most_common() if count >= _LEAST_SHARE * counts.total()
    ]
    found = [
        _HUB_SOURCE.match(str(source))
        for source in record_of(pool).get("recipe", {}).get("sources", ())
    ]
    return {
        "language": languages or None,
        "datasets": [match[1] for match in found if match] or None,
    }


def shareable(value: Any) -> Any:
    """Settings without keys, and with absolute paths shortened to their last part: they name users and machines."""
    if isinstance(value, Mapping):
        return {
            key: shareable(item) for key, item in value.items() if not _SECRET_KEY.search(str(key))
        }
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    return _shortened(_SECRET.sub("…", value)) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    path = PurePosixPath(text) if text.startswith(("/", "~")) else PureWindowsPath(text)
    if not (path.is_absolute() or text.startswith("~")) or text == path.anchor:
        return text
    return "~" if len(path.parts) == 1 or path.parent.name in _HOMES else path.name
