"""What a model card says of things that lie elsewhere: the data's history, the base's licence, and evaluations."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from skilltrain.errors import SkilltrainError
from skilltrain.files import read_json
from skilltrain.models.loading import resolve_model
from skilltrain.runs import RUN_FILE
from skilltrain.tables import SKILLS, read_table, table_path

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_LEAST_SHARE = 0.01  # of the pool's skills, for a language to be named
_HUB_SOURCE = re.compile(r"hf:([^:]+)")


@dataclass(frozen=True)
class Published:
    """What a run cannot know of its model: its name on the Hub, its licence, the reports of evaluations of the run."""

    repo: str | None = None
    license: str | None = None
    reports: Sequence[Path] = ()

    def check(self) -> None:
        """Raise SkilltrainError for a name that is none."""
        if self.repo is not None and HUB_ID.fullmatch(self.repo) is None:
            raise SkilltrainError("is no name of a model on the Hub", where=self.repo, fix="write OWNER/NAME")


class DataStep(NamedTuple):
    """One of the runs that the training data went through: its stage, folder, SHA-256, and what it counted."""

    stage: str
    name: str
    sha256: str
    counts: str


class Results(NamedTuple):
    """A report's figures: `rows` maps a system to its measures, `own` are the systems that use the model."""

    benchmark: str
    rows: Mapping[str, Mapping[str, Mapping[str, float]]]
    own: Sequence[str]


def read_results(report: Path, run: Path) -> Results:
    """The figures of an evaluation in which the model of `run` took part; SkilltrainError if it did not."""
    found, recipe = read_json(report / "metrics.json"), read_json(report / RUN_FILE)["recipe"]
    own = [system["name"] for system in recipe["systems"] if _uses(system, run.resolve())]
    if not own:
        raise SkilltrainError(f"no system of this report uses {run}", where=report, fix="evaluate it first")
    return Results(found["benchmark"], {system["name"]: system["metrics"] for system in found["systems"]}, own)


def _uses(value: Any, run: Path) -> bool:
    if isinstance(value, Mapping):
        source = value.get("source")
        return (isinstance(source, str) and Path(source).resolve() == run) or _uses([*value.values()], run)
    return isinstance(value, list) and any(_uses(item, run) for item in value)


def data_steps(run: Path) -> list[DataStep]:
    """What `run` read, what that was made from, and so on, the first step first; as far as the folders still exist."""
    steps: dict[str, DataStep] = {}
    for step in _steps(run):
        steps.pop(step.sha256, None)  # where it was met last, everything that it was made for stands before it
        steps[step.sha256] = step
    return [*steps.values()][::-1]


def _steps(run: Path) -> Iterator[DataStep]:
    record = _record(run)
    for key, sha256 in record.get("inputs", {}).items():
        folder = Path(_at(record["recipe"], key))
        if inner := _record(folder):
            yield DataStep(inner["recipe"]["stage"], folder.name, sha256, _counts(inner.get("summary", {})))
            yield from _steps(folder)


def _record(folder: Path) -> dict[str, Any]:
    return read_json(folder / RUN_FILE) if (folder / RUN_FILE).is_file() else {}


def _at(recipe: Any, key: str) -> str:
    for part in key.split("."):
        recipe = recipe[int(part)] if isinstance(recipe, list) else recipe[part]
    return recipe


def _counts(summary: Mapping[str, Any]) -> str:
    """Counts in words, such as `num_kept 320; dropped_by_layer: name 3, jaccard 5`; paths shortened to their names."""
    parts = []
    for key, value in summary.items():
        if isinstance(value, int):
            parts.append(f"{key} {value:,}")
        elif isinstance(value, Mapping) and value and all(isinstance(count, int) for count in value.values()):
            parts.append(f"{key}: " + ", ".join(f"{str(name).rsplit('/')[-1]} {n:,}" for name, n in value.items()))
    return "; ".join(parts).replace("|", "\\|")


def is_on_hub(source: str) -> bool:
    """Whether a model's source names one of the Hub, and no folder here."""
    return HUB_ID.fullmatch(source) is not None and not Path(source).expanduser().exists()


def base_license(source: str) -> str | None:
    """The licence that the card beside a base model's weights states; None for one of the Hub: its page knows."""
    from huggingface_hub import ModelCard

    try:
        card = None if is_on_hub(source) else resolve_model(source, weights=False) / "README.md"
        return ModelCard.load(card).data.get("license") if card and card.is_file() else None
    except (SkilltrainError, ValueError):  # it is gone, or its card is none
        return None


def languages(pool: Path) -> list[str] | None:
    """Those of the skills, the most frequent first; None where the pool is not there any more."""
    if not table_path(pool, SKILLS).is_file():
        return None
    counts = Counter(filter(None, read_table(pool, SKILLS).column("lang").to_pylist()))
    return [lang for lang, count in counts.most_common() if count >= _LEAST_SHARE * counts.total()] or None


def data_sets(pool: Path) -> list[str] | None:
    """Names on the Hub of the data sets that the pool was made from."""
    found = [_HUB_SOURCE.match(str(source)) for source in _record(pool).get("recipe", {}).get("sources", ())]
    return [match[1] for match in found if match] or None
