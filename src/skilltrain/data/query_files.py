"""The stage `queries`: query files and R3-like judgement files become queries and judgements over a pool."""

import glob
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from skilltrain.config import Config, InputPath
from skilltrain.data.pool.skill_file import as_text
from skilltrain.data.pool.skill_pool import kept_duplicates
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl
from skilltrain.records import Query, Verdict
from skilltrain.tables import DROPPED, JUDGEMENTS, QUERIES, SKILLS, read_table, rows_of, table_path, write_table
from skilltrain.texts import clean_text, one_line

Split = Literal["train", "dev", "test"]
SPLITS = ("train", "dev", "test")
KINDS = ("single", "multi")
TEXT_KEYS = ("query", "text")
# Where a row lists skills, and what that says of them; of two verdicts on one skill the earlier here stands.
VERDICT_KEYS = {
    "skill_ids": Verdict.REQUIRED,
    "skill_id": Verdict.REQUIRED,
    "required": Verdict.REQUIRED,
    "useful": Verdict.USEFUL,
    "rejected": Verdict.REJECTED,
    "irrelevant": Verdict.IRRELEVANT,
}


class QueriesConfig(Config):
    """Settings of the stage `queries`."""

    stage: Literal["queries"] = "queries"
    files: list[InputPath] = Field(
        min_length=1,
        description="JSON Lines files or patterns like queries/*.jsonl; a row has query or text, and skill_ids, "
        "skill_id or required; optional useful, rejected, irrelevant, query_id, origin, split, kind",
    )
    pool: InputPath = Field(description="folder of the stage pool, in which every required skill must be")
    split: Split | None = Field(
        default=None, description="split of all queries; else the row's own, else the file's name if it is a split"
    )
    origin: str = Field(default="unknown", min_length=1, description="who wrote the queries whose rows do not say")
    missing_gold: Literal["error", "drop"] = Field(
        default="error", description="what to do with a query that requires a skill which is not in the pool"
    )
    out: Path = Field(description="folder to write queries, judgements and dropped to")

    @field_validator("files", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        """A single file as a list of one; a pattern as the files that it names, so that these are recorded."""
        given = value if isinstance(value, list | tuple) else [value]
        return [path for item in given for path in _matching(item)]


def _matching(item: Any) -> list[Any]:
    if not isinstance(item, str | Path) or not glob.has_magic(str(item)) or Path(item).exists():
        return [item]
    path = Path(item)
    return sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor)))) or [item]


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a row says of one skill."""

    skill_id: str
    verdict: Verdict
    reason: str | None


@dataclass(frozen=True, slots=True)
class JudgedQuery:
    """A query with what its row says of skills; `place` is its file and line.

    `judgements` has one verdict a skill, `outvoted` the others that the row gives the same skill. `num_moved` counts
    the judgements of dropped duplicates that went to the skill kept in their place.
    """

    query: Query
    judgements: tuple[Judgement, ...]
    outvoted: tuple[Judgement, ...]
    place: str
    has_own_id: bool
    num_moved: int


@dataclass(frozen=True, slots=True)
class Pool:
    """The skills that can be judged, and which of them stands for a duplicate that the stage `pool` dropped."""

    skill_ids: frozenset[str]
    kept_for: Mapping[str, str]

    def resolve(self, skill_id: str) -> str:
        """`skill_id` itself, or the kept skill where it is a dropped duplicate's."""
        return skill_id if skill_id in self.skill_ids else self.kept_for.get(skill_id, skill_id)


def read_pool(path: Path) -> Pool:
    """The ids of a pool's SKILLS table, and of the duplicates in the DROPPED table beside it."""
    table, dropped = table_path(path, SKILLS), table_path(path, SKILLS).with_name("dropped.parquet")
    skill_ids = frozenset(read_table(table, SKILLS).column("skill_id").to_pylist())
    return Pool(skill_ids, kept_duplicates(read_table(dropped, DROPPED)) if dropped.is_file() else {})


def run_queries(config: QueriesConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED; their counts.

    Raises SkilltrainError for a line that is no query, for an id that stands twice, for a required skill that is
    not in the pool (with `missing_gold: error`), and where no query is left.
    """
    dropped: list[dict[str, Any]] = []
    pool = read_pool(config.pool)
    judged = list(_distinct(_read_files(config, pool, dropped), dropped))
    judged = _within_pool(judged, config, pool, dropped)
    if not judged:
        raise SkilltrainError(f"no query is left of {len(config.files)} file(s), {len(dropped)} dropped rows")
    judgements = [
        {
            "query_id": item.query.query_id, "skill_id": judgement.skill_id, "verdict": judgement.verdict.value,
            "reason": judgement.reason, "group": None, "judge": item.query.origin,
        }
        for item in judged for judgement in item.judgements
    ]  # fmt: skip
    write_table(rows_of(item.query for item in judged), QUERIES, out)
    write_table(judgements, JUDGEMENTS, out)
    write_table(dropped, DROPPED, out)
    return {
        "num_queries": len(judged),
        "num_by_split": dict(sorted(Counter(item.query.split for item in judged).items())),
        "num_by_kind": dict(sorted(Counter(item.query.kind for item in judged).items())),
        "num_by_verdict": dict(sorted(Counter(row["verdict"] for row in judgements).items())),
        "num_moved_to_kept_duplicate": sum(item.num_moved for item in judged),
        "num_dropped": dict(sorted(Counter(row["filter"] for row in dropped).items())),
    }


def _dropped(query_id: str, skill_id: str, why: str, reason: str) -> dict[str, Any]:
    return {"query_id": query_id, "skill_id": skill_id, "filter": why, "value": None, "reason": reason}


def _read_files(config: QueriesConfig, pool: Pool, dropped: list[dict[str, Any]]) -> Iterator[JudgedQuery]:
    for path in config.files:
        for number, row in read_jsonl(path):
            item = read_query(row, path, f"{path}, line {number}", config, pool)
            for judgement in item.outvoted:
                reason = f"{item.place} says {judgement.verdict} and another verdict, which stands"
                dropped.append(_dropped(item.query.query_id, judgement.skill_id, "contradiction", reason))
            if not item.query.text:
                dropped.append(_dropped(item.query.query_id, "", "empty_query", f"{item.place} has no query text"))
            elif not any(judgement.verdict is Verdict.REQUIRED for judgement in item.judgements):
                dropped.append(_dropped(item.query.query_id, "", "no_gold", f"{item.place} requires no skill"))
            else:
                yield item


def read_query(row: Mapping[str, Any], path: Path, place: str, config: QueriesConfig, pool: Pool) -> JudgedQuery:
    """The query and the judgements of one row.

    Raises SkilltrainError where the row has not the shape of a query.
    """
    text_key = next((key for key in TEXT_KEYS if key in row), None)
    listed = {key: _listed_skills(row[key], key, place) for key in VERDICT_KEYS if row.get(key) is not None}
    if text_key is None or not listed:
        need = "query or text" if text_key is None else "skill_ids, skill_id or required"
        raise SkilltrainError(f"is no query: no key {need} among {', '.join(map(str, list(row)[:8]))}", where=place)
    if not isinstance(row[text_key], str | None):
        raise SkilltrainError(f"{text_key} is a {type(row[text_key]).__name__}, not text", where=place)
    text = clean_text(row[text_key] or "").strip()
    given = [Judgement(skill, VERDICT_KEYS[key], why) for key, pairs in listed.items() for skill, why in pairs]
    resolved = [replace(judgement, skill_id=pool.resolve(judgement.skill_id)) for judgement in given]
    first: dict[str, Judgement] = {}
    for judgement in resolved:
        first.setdefault(judgement.skill_id, judgement)
    required = [judgement.skill_id for judgement in first.values() if judgement.verdict is Verdict.REQUIRED]
    own_id = one_line(as_text(row.get("query_id")) or as_text(row.get("group_id")))
    query = Query(
        query_id=own_id or _made_up_id(path, text, required),
        text=text,
        kind=_choice(row, "kind", KINDS, place) or ("multi" if len(required) > 1 else "single"),
        origin=one_line(as_text(row.get("origin"))) or config.origin,
        split=config.split or _choice(row, "split", SPLITS, place) or _split_of_file(path),
    )
    return JudgedQuery(
        query,
        judgements=tuple(first.values()),
        outvoted=tuple(
            judgement for judgement in resolved if judgement.verdict is not first[judgement.skill_id].verdict
        ),
        place=place,
        has_own_id=bool(own_id),
        num_moved=sum(before.skill_id != after.skill_id for before, after in zip(given, resolved, strict=True)),
    )


def _listed_skills(value: Any, key: str, place: str) -> list[tuple[str, str | None]]:
    """(skill_id, reason) of one id, a list of ids, or a list of maps with skill_id, reason and why."""
    skills: list[tuple[str, str | None]] = []
    for item in value if isinstance(value, list) else [value]:
        fields = item if isinstance(item, dict) else {"skill_id": item}
        skill_id = fields.get("skill_id")
        if not isinstance(skill_id, str) or not skill_id.strip():
            raise SkilltrainError(f"{key} holds {item!r:.60}, not a skill_id", where=place)
        reasons = [one_line(as_text(fields.get(name))) for name in ("reason", "why")]
        skills.append((one_line(clean_text(skill_id)), ": ".join(filter(None, reasons)) or None))
    return skills


def _made_up_id(path: Path, text: str, required: list[str]) -> str:
    """An id from what the row says, so that it stays the same when lines are added, removed or moved."""
    content = "\x00".join([text, *sorted(required)])
    return f"{clean_text(path.name.split('.')[0])}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def _choice(row: Mapping[str, Any], key: str, choices: tuple[str, ...], place: str) -> str | None:
    value = row.get(key)
    if value is not None and value not in choices:
        raise SkilltrainError(f"{key} {value!r} is not one of {', '.join(choices)}", where=place)
    return value


def _split_of_file(path: Path) -> str:
    stem = path.name.split(".")[0]
    if stem not in SPLITS:
        raise SkilltrainError("neither its rows nor its name say a split", where=path, fix="set split: train")
    return stem


def _distinct(items: Iterator[JudgedQuery], dropped: list[dict[str, Any]]) -> Iterator[JudgedQuery]:
    """`items` without rows that repeat an earlier one. Raises SkilltrainError where two rows give the same id."""
    seen: dict[str, JudgedQuery] = {}
    for item in items:
        earlier = seen.setdefault(item.query.query_id, item)
        if earlier is item:
            yield item
        elif item.has_own_id or earlier.has_own_id:
            raise SkilltrainError(f"query_id '{item.query.query_id}' stands in {earlier.place} too", where=item.place)
        else:
            reason = f"{item.place} repeats {earlier.place}"
            dropped.append(_dropped(item.query.query_id, "", "duplicate_query", reason))


def _within_pool(
    items: list[JudgedQuery], config: QueriesConfig, pool: Pool, dropped: list[dict[str, Any]]
) -> list[JudgedQuery]:
    """`items` over the pool's skills alone. Raises SkilltrainError where a query requires another (or drops it)."""
    kept: list[JudgedQuery] = []
    missing: list[tuple[JudgedQuery, str]] = []
    for item in items:
        outside = [judgement for judgement in item.judgements if judgement.skill_id not in pool.skill_ids]
        gold = [judgement.skill_id for judgement in outside if judgement.verdict is Verdict.REQUIRED]
        missing += [(item, skill_id) for skill_id in gold]
        if not gold:
            kept.append(replace(item, judgements=tuple(j for j in item.judgements if j not in outside)))
        for judgement in outside:
            why = "missing_gold" if judgement.verdict is Verdict.REQUIRED else "not_in_pool"
            reason = f"{judgement.verdict} in {item.place}, not in the pool"
            dropped.append(_dropped(item.query.query_id, judgement.skill_id, why, reason))
    if missing and config.missing_gold == "error":
        item, skill_id = missing[0]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise SkilltrainError(
            f"query '{item.query.query_id}' requires skill '{skill_id}', which is not in {config.pool}{more}",
            where=item.place, fix="add its source to the pool, or set missing_gold: drop",
        )  # fmt: skip
    return kept
