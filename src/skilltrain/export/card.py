"""The README.md of a saved model, written from its run: what it is, how to use it, what it was trained on."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import yaml

from skilltrain import __version__
from skilltrain.export.published import (
    Published,
    Results,
    base_license,
    data_sets,
    data_steps,
    is_on_hub,
    languages,
    read_results,
)
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.reranker import RerankerSettings
from skilltrain.templates import FIELDS_SEEN

_SECRET_KEY = re.compile(r"(^|_)(key|token|secret|password|credentials)$", re.IGNORECASE)
_SECRET = re.compile(r"\b(hf_|sk-|ghp_|github_pat_|AKIA)[\w-]{10,}|(?<=://)[^/\s@]+@")
_HOMES = ("home", "Users")


@dataclass(frozen=True)
class RunRecord:
    """What a run has to say of its model.

    `recipe` is the resolved settings as plain values. `summary` is the run's own; its key `dev` maps a measure to
    mean, low, high (the 95% interval) and n. `exported` names the checkpoint, if it is not the run's chosen one;
    `interpolate` is the share of its weights in a mean with those of the base; `form` one of `forms.Form`. `run` is
    where the run lies.
    """

    settings: EncoderSettings | RerankerSettings
    base: str
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    exported: str | None = None
    interpolate: float | None = None
    form: str | None = None
    run: Path | None = None


def model_card(record: RunRecord, published: Published = Published()) -> str:  # noqa: B008
    """Markdown with YAML front matter, for the Hub and for whoever opens the folder.

    It shows only the last part of local paths, nothing that looks like a key, and no text of the training data. Raises
    SkilltrainError for a report in which no system uses the run.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("skilltrain.export"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters["number"] = _number
    template = record.settings.template
    results = [read_results(report, record.run or Path()) for report in published.reports]
    return environment.get_template("card.md.j2").render(
        front_matter=_front_matter(record, published, results),
        kind=_kind(record),
        form=None if isinstance(record.settings, EncoderSettings) else record.settings.template.form,
        exported_form=record.form,
        base=shareable(record.base).removeprefix("package:"),
        base_license=base_license(record.base),
        base_is_on_hub=is_on_hub(record.base),
        published=published,
        results=results,
        steps=data_steps(record.run) if record.run else [],
        version=__version__,
        exported=record.exported,
        interpolate=record.interpolate,
        settings=record.settings,
        skill=template.skill,
        seen=FIELDS_SEEN[template.skill.fields],
        separator=repr(template.skill.separator),
        query_chars=template.query_chars,
        summary=record.summary,
        recipe=yaml.safe_dump(shareable(record.recipe), sort_keys=False, allow_unicode=True),
    )


def _kind(record: RunRecord) -> str:
    return "encoder" if isinstance(record.settings, EncoderSettings) else "reranker"


def _front_matter(record: RunRecord, published: Published, results: Sequence[Results]) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    is_encoder = isinstance(record.settings, EncoderSettings)
    task = "sentence-similarity" if is_encoder else "text-ranking"
    own = ["sentence-transformers", "feature-extraction"] if is_encoder else ["sentence-transformers", "cross-encoder"]
    if record.form == "multi_vector":
        own = ["sentence-transformers", "multi-vector", "late-interaction"]
    if isinstance(record.settings, RerankerSettings) and record.settings.template.form == "cosine_pair":
        own = []  # only skilltrain opens it
    found = [("agent-skills-dev", "development queries", record.summary.get("dev", {}))]
    found += [("agent-skills", one.benchmark, one.rows[one.own[0]]) for one in results]
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
        language=languages(Path(pool)) if pool else None,
        datasets=data_sets(Path(pool)) if pool else None,
        base_model=record.base if is_on_hub(record.base) else None,
        tags=[*own, *([] if is_encoder else ["reranker"]), "agent-skills", "skilltrain"],
        model_name=(published.repo or f"agent skill {_kind(record)}") if figures else None,
        eval_results=figures or None,
    )
    return data.to_yaml()


def _number(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value).replace("|", "\\|")


def shareable(value: Any) -> Any:
    """Settings without keys, and with absolute paths shortened to their last part: they name users and machines."""
    if isinstance(value, Mapping):
        return {key: shareable(item) for key, item in value.items() if not _SECRET_KEY.search(str(key))}
    if isinstance(value, list | tuple):
        return [shareable(item) for item in value]
    return _shortened(_SECRET.sub("…", value)) if isinstance(value, str) else value


def _shortened(text: str) -> str:
    path = PurePosixPath(text) if text.startswith(("/", "~")) else PureWindowsPath(text)
    if not (path.is_absolute() or text.startswith("~")):
        return text
    if len(path.parts) == 1:
        return "~" if text.startswith("~") else text
    return "~" if path.parent.name in _HOMES else path.name
