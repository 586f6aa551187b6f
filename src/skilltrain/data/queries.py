"""The stage `queries`: query files and R3-like judgement files become queries and judgements over a pool."""

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

import pyarrow as pa
import pyarrow.parquet as pq
import pydantic
from pydantic import BaseModel, Field, field_validator

from skilltrain.config import Config, InputPath, InputPaths, validate
from skilltrain.data.pool.skill_file import as_text
from skilltrain.data.query_texts import query_profile
from skilltrain.errors import SkilltrainError, reason_of
from skilltrain.files import check_regular, read_json, read_jsonl
from skilltrain.records import POSITIVE, Dropped, Judgement, Query, Reason, Verdict, counted
from skilltrain.tables import DROPPED, SKILLS, read_table, table_path, write_queries, write_table
from skilltrain.texts import clean_text, one_line

Split = Literal["train", "dev", "test"]
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
    files: InputPaths = Field(
        min_length=1,
        description=".jsonl, .jsonl.gz, .json, .parquet or .csv, or patterns like queries/*.jsonl; a row has query or "
        "text, and skill_ids, skill_id or required; optional useful, rejected, irrelevant, query_id, origin, split, "
        "kind; a list in a .csv file is written as JSON",
    )
    pool: InputPath = Field(
        description="folder of the stage pool, in which every required skill must be"
    )
    split: Split | None = Field(
        default=None, description="of all queries; null: the row's own, or the file's name"
    )
    origin: str = Field(
        default="unknown",
        min_length=1,
        description="who wrote the queries, where a row does not say",
    )
    missing_gold: Literal["error", "drop"] = Field(
        default="error",
        description="what to do with a query that requires a skill which is not in the pool",
    )
    out: Path = Field(description="folder to write queries, judgements and dropped to")

    @field_validator("files")
    @classmethod
    def _matching(cls, files: tuple[Path, ...]) -> tuple[Path, ...]:
        """A pattern as the files that it names, so that these are recorded."""
        found: list[Path] = []
        for file in files:
            matching = (
                [] if file.exists() else Path(file.anchor).glob(str(file.relative_to(file.anchor)))
            )
            found += sorted(matching) or [file]
        return tuple(found)


def _line(value: Any) -> str | None:
    return one_line(as_text(value)) or None


def _entries(value: Any) -> list[Any]:
    """One id, a list of ids, or a list of maps with skill_id, reason, why and group, as maps."""
    items = value if isinstance(value, list | tuple) else [value]
    return [item if isinstance(item, dict) else {"skill_id": item} for item in items]


Line = Annotated[str | None, pydantic.BeforeValidator(_line)]


class Said(BaseModel, frozen=True):
    """What a row says of one skill."""

    skill_id: Annotated[pydantic.StrictStr, pydantic.AfterValidator(one_line)]
    verdict: Verdict = Verdict.REQUIRED
    reason: Line = None
    why: Line = None
    group: Line = None


class SaidRejected(Said, frozen=True):
    """The same of a rejected skill, whose reason is one of eight."""

    reason: Reason | None = None


Entries = Annotated[tuple[Said, ...], pydantic.BeforeValidator(_entries)]


class QueryRow(Config, extra="ignore"):
    """A row of a query file; keys of other names are not looked at."""

    text: str = ""
    query_id: pydantic.StrictStr | pydantic.StrictInt | None = None
    origin: Line = None
    split: Split | None = None
    kind: Literal["single", "multi"] | None = None
    skill_ids: Entries = ()
    skill_id: Entries = ()
    required: Entries = ()
    useful: Entries = ()
    rejected: Annotated[tuple[SaidRejected, ...], pydantic.BeforeValidator(_entries)] = ()
    irrelevant: Entries = ()


class JudgedQuery(NamedTuple):
    """A query with what its row says of skills; `place` is its file and row."""

    query: Query
    judgements: dict[str, Said]
    place: str


def run_queries(config: QueriesConfig, out: Path) -> dict[str, Any]:
    """Write QUERIES, JUDGEMENTS and DROPPED (beside `out` where no query is left, which is an error); their counts.

    Raises SkilltrainError for a row that is no query, for an id that appears twice, for a required skill that is not in
    the pool (with `missing_gold: error`), and where no query is left (DROPPED is written beside `out` then).
    """
    reader = _Reader(config)
    for path in config.files:
        for place, row in _rows_of_file(path):
            reader.read(row, path, place)
    asked, dropped, judgements = reader.asked, reader.dropped, reader.judgements()
    missing = {drop.query_id: drop for drop in reversed(dropped) if drop.filter == "missing_gold"}
    if missing and config.missing_gold == "error":
        first = [*missing.values()][-1]
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        what = f"query '{first.query_id}' requires skill '{first.skill_id}', which is not in {config.pool}{more}"
        fix = "add its source to the pool, or set missing_gold: drop"
        raise SkilltrainError(what, where=asked[first.query_id].place, fix=fix)
    queries = [item.query for query_id, item in asked.items() if query_id not in missing]
    if not queries:
        file = config.out.with_name(f"{config.out.name}.dropped.parquet")
        write_table(dropped, DROPPED, file)
        first = f"; the first: {dropped[0].filter}: {dropped[0].reason}" if dropped else ""
        what = (
            f"no query is left of {len(config.files)} file(s), {len(dropped)} dropped rows{first}"
        )
        raise SkilltrainError(what, fix=f"all reasons are in {file}")
    write_queries(queries, judgements, dropped, out)
    return {
        "num_queries": len(queries),
        "num_by_split": counted(query.split for query in queries),
        "num_by_kind": counted(query.kind for query in queries),
        "num_by_verdict": counted(one.verdict for one in judgements),
        "num_dropped": counted(drop.filter for drop in dropped),
        "profile": query_profile([query.text for query in queries]),
    }


class _Reader:
    """The queries read so far, by id, and what is left out of their rows."""

    def __init__(self, config: QueriesConfig) -> None:
        self.config, self.asked, self.dropped = config, dict[str, JudgedQuery](), list[Dropped]()
        self.skill_ids = set(read_table(config.pool, SKILLS).column("skill_id").to_pylist())
        file = table_path(config.pool, SKILLS).with_name(f"{DROPPED.name}.parquet")
        rows = read_table(file, DROPPED).to_pylist() if file.is_file() else []
        rows = [
            row
            for row in rows
            if row["filter"] == "duplicate" and row["skill_id"] not in self.skill_ids
        ]
        self.kept_for = {row["skill_id"]: row["other_id"] for row in rows if row["other_id"]}

    def read(self, values: dict[str, Any], path: Path, place: str) -> None:
        """Take a row, with one verdict a skill; a dropped duplicate's goes to the skill kept in its place."""
        row = _checked(values, place)
        said = [
            given.model_copy(
                update={
                    "verdict": verdict,
                    "skill_id": self.kept_for.get(given.skill_id, given.skill_id),
                }
            )
            for key, verdict in VERDICT_KEYS.items()
            for given in getattr(row, key)
        ]
        judged: dict[str, Said] = {}
        contradicted = [
            one for one in said if judged.setdefault(one.skill_id, one).verdict is not one.verdict
        ]
        text, own_id = clean_text(row.text).strip(), _line(row.query_id)
        if "group_id" in values and len(judged) < 2:
            what = f"group '{own_id}' holds {len(judged)} skill(s): a group is judged against one another"
            raise SkilltrainError(what, where=place)
        required = sorted(
            skill_id for skill_id, found in judged.items() if found.verdict is Verdict.REQUIRED
        )
        # A made-up id comes from what the row says, so that it stays the same when lines are added, removed or moved.
        digest = hashlib.sha256("\x00".join([text, *required]).encode()).hexdigest()[:12]
        stem = path.name.split(".")[0]
        split = self.config.split or row.split or (stem if stem in get_args(Split) else None)
        if split is None:
            raise SkilltrainError(
                "neither its rows nor its file name give a split",
                where=path,
                fix="set split: train",
            )
        kind = row.kind or ("multi" if len(required) > 1 else "single")
        query_id = own_id or f"{clean_text(stem)}-{digest}"
        item = JudgedQuery(
            Query(query_id, text, kind, row.origin or self.config.origin, split), judged, place
        )
        for one in contradicted:
            self._drop(
                item,
                one.skill_id,
                "contradiction",
                f"says {one.verdict} and another verdict, which stands",
            )
        if not text:
            self._drop(item, "", "empty_query", "has no query text")
        elif not required:
            self._drop(item, "", "no_gold", "requires no skill")
        elif (earlier := self.asked.setdefault(query_id, item)) is not item:
            if own_id:
                raise SkilltrainError(
                    f"query_id '{query_id}' stands in {earlier.place} too", where=place
                )
            self._drop(item, "", "duplicate_query", f"repeats {earlier.place}")

    def judgements(self) -> list[Judgement]:
        """What the rows say; nothing of a query that requires a skill which is not in the pool.

        What one says against a skill that another of the same text calls an answer is left out, too.
        """
        answers: dict[tuple[str, str], str] = {}
        for item in self.asked.values():
            for skill_id, found in item.judgements.items():
                if found.verdict in POSITIVE:
                    answers.setdefault((item.query.text, skill_id), item.place)
        return [row for item in self.asked.values() for row in self._rows(item, answers)]

    def _rows(self, item: JudgedQuery, answers: Mapping[tuple[str, str], str]) -> list[Judgement]:
        rows: list[Judgement] = []
        is_whole, query = True, item.query
        for skill_id, found in item.judgements.items():
            place = answers.get((query.text, skill_id))
            if place is not None and found.verdict not in POSITIVE:
                reason = (
                    f"says {found.verdict}, and {place}, of the same text, that it is an answer"
                )
                self._drop(item, skill_id, "contradiction", reason)
            elif skill_id in self.skill_ids:
                rows.append(Judgement(query.query_id, judge=query.origin, **found.model_dump()))
            else:
                is_gold = found.verdict is Verdict.REQUIRED
                is_whole &= not is_gold
                why = f"says {found.verdict} of a skill that is not in the pool"
                self._drop(item, skill_id, "missing_gold" if is_gold else "not_in_pool", why)
        return rows if is_whole else []

    def _drop(self, item: JudgedQuery, skill_id: str, filter: str, reason: str) -> None:
        self.dropped.append(
            Dropped(item.query.query_id, skill_id, filter, f"{item.place} {reason}")
        )


def _rows_of_file(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of a file. Raises SkilltrainError where it cannot be read as what its name says."""
    check_regular(path)
    readers = {
        ".json": read_json,
        ".parquet": lambda path: pq.read_table(path).to_pylist(),
        ".csv": _read_csv,
    }
    if (kind := path.suffix.lower()) in (".jsonl", ".gz"):
        yield from read_jsonl(path)
        return
    if kind not in readers:
        fix = "give a .jsonl, .jsonl.gz, .json, .parquet or .csv file"
        raise SkilltrainError("cannot tell what this file is", where=path, fix=fix)
    try:
        rows = readers[kind](path)
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise SkilltrainError(
            f"cannot be read as {kind[1:]}: {reason_of(error)}", where=path
        ) from error
    if not isinstance(rows, list):
        raise SkilltrainError(f"is a {type(rows).__name__}, not a list of queries", where=path)
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise SkilltrainError(
                f"is a {type(row).__name__}, not an object", where=f"{path}, row {number}"
            )
        yield f"{path}, row {number}", row


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file; an empty cell is None, a cell that begins with a bracket is JSON."""

    def cell(value: Any) -> Any:
        return (
            json.loads(value)
            if isinstance(value, str) and value.lstrip()[:1] in ("[", "{")
            else value
        ) or None

    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file, restkey="too many cells"))
    return [{key: cell(value) for key, value in row.items()} for row in rows]


def _checked(row: Mapping[str, Any], place: str) -> QueryRow:
    """A row without empty cells; the text may stand under query, the id under group_id."""
    has_text = not {"query", "text"}.isdisjoint(row)
    if not has_text or VERDICT_KEYS.keys().isdisjoint(row):
        need = "skill_ids, skill_id or required" if has_text else "query or text"
        what = f"is no query: no key {need} among {', '.join(map(str, list(row)[:8]))}"
        raise SkilltrainError(what, where=place)
    said = {key: value for key, value in row.items() if value is not None}
    names = {"query": "text", "group_id": "query_id"}
    said |= {
        own: said[other] for other, own in names.items() if other in said and not said.get(own)
    }
    return validate(QueryRow, said, place)
