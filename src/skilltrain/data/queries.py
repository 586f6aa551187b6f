"""Stage `queries`: reads files of queries and judged skills into tables over a pool.

A row with the key `group_id` is a group of skills, and its id is the id of the query.

A judgement is dropped in three cases: an earlier judgement in its row gives the skill another
verdict, the skill is not in the pool, or it is negative and another query with the same text has
the skill as a positive. In a log of use, a skipped near-duplicate of a loaded skill is dropped too.

Notes:
- Patterns in `files` are replaced by files, so that a run records the files. A pattern without
  matches fails when it is read.
- `glob` takes no absolute pattern. The anchor of a path is "/", or "" for a relative path.
- A query without an id gets a hash of its content, which stays the same when rows are added or
  moved. Without a split, queries for one skill get the same split.
- The table DROPPED of the pool lists its duplicates, each with the skill that is kept. It is beside
  the file of SKILLS. A judgement of a duplicate counts for the skill that is kept.
- If no query is left, DROPPED is written beside `out`.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    Field,
    StrictInt,
    StrictStr,
    field_validator,
    model_validator,
)

from skilltrain.config import Config, InputPath, InputPaths, validate
from skilltrain.data.filter_layers import JaccardLayer
from skilltrain.data.near_duplicates import near_duplicate_clusters
from skilltrain.data.pool.skill_file import as_text
from skilltrain.data.query_texts import query_profile
from skilltrain.data.read_formats import beir_query_rows
from skilltrain.data.sampling import is_drawn
from skilltrain.data.trigger_evals import UNSERVED_FILE, query_rows, unserved_rows
from skilltrain.data.use_log import ORIGIN as USE_ORIGIN
from skilltrain.data.use_log import request_rows
from skilltrain.errors import SkilltrainError
from skilltrain.files import read_jsonl, read_records, write_jsonl
from skilltrain.metrics.benchmarks.qrels import beir_files
from skilltrain.records import POSITIVE, Dropped, Judgement, Query, Reason, Verdict, counted
from skilltrain.stage import Stage, Summary
from skilltrain.tables import (
    DROPPED,
    JUDGEMENTS,
    QUERIES,
    SKILLS,
    read_queries,
    read_skills,
    read_table,
    table_path,
    write_queries,
    write_table,
)
from skilltrain.texts import clean_text, one_line

Split = Literal["train", "dev", "test"]
_NO_SKILL = ""  # id in a row of DROPPED whose reason concerns the whole query
# If a row gives one skill two verdicts, that of the first key here counts.
VERDICT_KEYS = {
    "skill_ids": Verdict.REQUIRED,
    "required": Verdict.REQUIRED,
    "useful": Verdict.USEFUL,
    "rejected": Verdict.REJECTED,
    "irrelevant": Verdict.IRRELEVANT,
}


class Queries(Stage):
    """Read queries and judgements from files."""

    example = "files=examples/skill_library/queries/*.jsonl pool=runs/pool out=runs/queries"
    result = "{num_queries} queries ({num_by_split}); left out: {num_dropped}"
    next_command = "mine pool={pool} queries={out} encoder.source={base} out={near}/mined"

    stage: Literal["queries"] = "queries"
    files: InputPaths = Field(
        default=(),
        description=".jsonl, .jsonl.gz or .parquet, or patterns like queries/*.jsonl; a row has "
        "query or text, and skill_ids or required; optional useful, rejected, irrelevant, "
        "query_id, origin, split, kind; or folders of skills with evals/trigger-eval.json, of "
        "BEIR or MTEB, or with the QUERIES and JUDGEMENTS tables",
    )
    from_log: InputPath | None = Field(
        default=None,
        description="log of `serve --log`: skills that agents loaded are required, and skills "
        "that they skipped are irrelevant; with a log, no files are needed",
    )
    max_per_session: int = Field(
        default=20, ge=1, description="requests of a log that one session may add"
    )
    exclude: InputPath | None = Field(
        default=None, description="JSON Lines with the query_id of each query to leave out"
    )
    pool: InputPath = Field(
        description="folder of the stage pool, in which every required skill must be"
    )
    split: Split | None = Field(
        default=None,
        description="split of all queries; null: that of the row, else the file's name",
    )
    dev_share: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="share of the queries without a split that become dev, while the others "
        "become train; null: each query must have a split",
    )
    origin: str = Field(
        default="unknown",
        min_length=1,
        description="author of the queries whose rows do not name one",
    )
    missing_gold: Literal["error", "drop"] = Field(
        default="error",
        description="what to do with a query that requires a skill which is not in the pool",
    )
    out: Path = Field(description="folder to write queries, judgements and dropped to")

    @field_validator("files")
    @classmethod
    def _expand_patterns(cls, files: tuple[Path, ...]) -> tuple[Path, ...]:
        """Replace each pattern by the files that match it, so that a run records the files.

        The file queries.jsonl of a BEIR folder is replaced by its folder.
        """
        expanded: list[Path] = []
        for file in files:
            matches: list[Path] = []
            if not file.exists():
                # `glob` takes no absolute pattern. The anchor is "/", or "" for a relative path.
                pattern = str(file.relative_to(file.anchor))
                matches = sorted(Path(file.anchor).glob(pattern))
            # The judgements of a BEIR file are in the folder `qrels` beside the file. So read the
            # folder, which holds both.
            elif file.name == "queries.jsonl" and (file.parent / "qrels").is_dir():
                matches = [file.parent]
            # A pattern without matches stays, and fails when it is read.
            if not matches:
                matches = [file]
            expanded += matches
        return tuple(expanded)

    @model_validator(mode="after")
    def _check_inputs(self) -> "Queries":
        """Check that there is something to read."""
        if not self.files and self.from_log is None:
            raise ValueError("give 'files' or 'from_log'")
        return self

    def run(self, out: Path) -> Summary:
        """Read the files, write QUERIES, JUDGEMENTS and DROPPED, and return their counts.

        Raises:
            SkilltrainError: A row is no query, an id appears twice, a required skill is not in the
                pool (with `missing_gold: error`), or no query is left. In the last case DROPPED is
                written beside `out`.
        """
        reader = _QueryReader(self)
        if self.from_log:
            for where, row in request_rows(self.from_log):
                reader.add(row, self.from_log, where)
        for path in self.files:
            for where, row in _read_rows(path):
                reader.add(row, path, where)
        judgements = reader.without_skipped_copies(reader.consistent_judgements())
        dropped = reader.dropped

        # Leave out queries that require a skill which is not in the pool.
        missing = [row for row in dropped if row.filter == "missing_gold"]
        incomplete_ids = {row.query_id for row in missing}
        # A skill that was loaded some time ago may be gone, so a log may name it.
        faults = [row for row in missing if reader.queries[row.query_id].query.origin != USE_ORIGIN]
        if faults and self.missing_gold == "error":
            first = faults[0]
            problem = f"query '{first.query_id}' requires skill '{first.skill_id}', which is not "
            problem += f"in {self.pool}"
            num_others = len({row.query_id for row in faults}) - 1
            if num_others:
                problem += f" (and {num_others} more)"
            where = reader.queries[first.query_id].where
            fix = "add its source to the pool, or set missing_gold: drop"
            raise SkilltrainError("unknown-skill", problem, where=where, fix=fix)
        judgements = [row for row in judgements if row.query_id not in incomplete_ids]
        queries = [
            judged.query
            for query_id, judged in reader.queries.items()
            if query_id not in incomplete_ids
        ]

        if not queries:
            file = self.out.with_name(f"{self.out.name}.dropped.parquet")
            write_table(dropped, DROPPED, file)
            problem = f"no query is left, and {len(dropped)} rows were dropped"
            if dropped:
                problem += f"; the first: {dropped[0].filter}: {dropped[0].reason}"
            raise SkilltrainError("nothing-left", problem, fix=f"all reasons are in {file}")

        write_queries(queries, judgements, dropped, out)
        num_unserved = _write_unserved(self.files, out)
        return {
            "num_queries": len(queries),
            "num_by_split": counted(query.split for query in queries),
            "num_by_kind": counted(query.kind for query in queries),
            "num_by_verdict": counted(judgement.verdict for judgement in judgements),
            "num_dropped": counted(row.filter for row in dropped),
            "num_unserved": num_unserved,
            "profile": query_profile([query.text for query in queries]),
        }


def _optional_line(value: Any) -> str | None:
    return one_line(as_text(value)) or None


def _as_entries(value: Any) -> list[Any]:
    """Return the judged skills of a row as a list of maps.

    Args:
        value: One skill, a list of skills, or None. A skill is an id, or a map with a `skill_id`.
    """
    if value is None:
        return []
    items = value if isinstance(value, list | tuple) else [value]
    return [item if isinstance(item, dict) else {"skill_id": item} for item in items]


OptionalLine = Annotated[str | None, BeforeValidator(_optional_line)]


class Entry(BaseModel, frozen=True):
    """A judged skill in a row of a query file."""

    skill_id: Annotated[StrictStr, AfterValidator(clean_text), AfterValidator(one_line)]
    reason: OptionalLine = None
    why: OptionalLine = None
    group: OptionalLine = None
    judge: OptionalLine = None


class RejectedEntry(Entry, frozen=True):
    """A rejected skill. Its reason is one of the reasons in R3."""

    reason: Reason | None = None


Entries = Annotated[tuple[Entry, ...], BeforeValidator(_as_entries)]


class QueryRow(Config, extra="ignore"):
    """A row of a query file; other keys are ignored."""

    text: str | None = Field(validation_alias=AliasChoices("query", "text"))
    query_id: StrictStr | StrictInt | None = Field(
        default=None, validation_alias=AliasChoices("query_id", "group_id")
    )
    origin: OptionalLine = None
    split: Split | None = None
    kind: Literal["single", "multi"] | None = None
    session: str | None = None
    skill_ids: Entries = ()
    required: Entries = ()
    useful: Entries = ()
    rejected: Annotated[tuple[RejectedEntry, ...], BeforeValidator(_as_entries)] = ()
    irrelevant: Entries = ()


class JudgedQuery(NamedTuple):
    """A query with its judgements by skill id. `where` names its file and row."""

    query: Query
    judgements: dict[str, Judgement]
    where: str


class _QueryReader:
    """Collects the queries of all rows by id, and the rows of DROPPED."""

    def __init__(self, config: Queries) -> None:
        self.queries: dict[str, JudgedQuery] = {}
        self.dropped: list[Dropped] = []
        self._config = config
        # Ids of the pool's skills.
        self._pool = set(read_table(config.pool, SKILLS).column("skill_id").to_pylist())

        # The table DROPPED of the pool lists its duplicates. `other_id` is the skill that is kept.
        # `config.pool` may name the file of SKILLS. DROPPED is beside that file.
        dropped_file = table_path(config.pool, SKILLS).with_name(f"{DROPPED.name}.parquet")
        rows = read_table(dropped_file, DROPPED).to_pylist() if dropped_file.is_file() else []
        duplicates = [row for row in rows if row["filter"] == "duplicate"]
        # Id of the kept skill by the id of its duplicate.
        self._kept_ids = {row["skill_id"]: row["other_id"] for row in duplicates}

        # `read_jsonl` yields pairs of a position and a row.
        excluded = read_jsonl(config.exclude) if config.exclude else ()
        self._excluded_ids = {_optional_line(row.get("query_id")) for _, row in excluded}
        # Number of queries by session of the log.
        self._num_by_session = Counter[str | None]()

    def add(self, values: dict[str, Any], path: Path, where: str) -> None:
        """Add the query of a row with its judgements, or drop the query.

        Args:
            values: The row, with values by key.
            path: File of the row.
            where: File and row, for errors and for the reasons of dropped queries.

        Raises:
            SkilltrainError: The row is no query, or has the id of an earlier row.
        """
        row = _validate_row(values, where)
        row_id = _optional_line(row.query_id)
        required_entries = row.skill_ids + row.required
        # `_resolve_duplicate` returns the id of the kept skill if the entry names its duplicate.
        required = sorted({self._resolve_duplicate(entry) for entry in required_entries})
        query = self._make_query(row, row_id, required, path)
        # `_judge` records contradictory judgements, even if the query is dropped below.
        judged = JudgedQuery(query, judgements=self._judge(row, query, where), where=where)

        # A row with the key `group_id` is a group of skills. Its id is read as the query's id.
        if "group_id" in values:
            _check_group(row_id, judged)
        # Leave out a query that cannot be used. Add all others. `_NO_SKILL` stands for the skill
        # where the whole query is dropped.
        if not query.text:
            self._drop(query, _NO_SKILL, "empty_query", f"{where} has no query text")
        elif not required:
            self._drop(query, _NO_SKILL, "no_gold", f"{where} requires no skill")
        elif query.query_id in self._excluded_ids:
            self._drop(query, _NO_SKILL, "excluded", f"{where} is in {self._config.exclude}")
        elif row.session and self._is_full(row.session):
            limit = self._config.max_per_session
            reason = f"{where}: its session has {limit} earlier requests"
            self._drop(query, _NO_SKILL, "session_limit", reason)
        else:
            self._add_new(judged, has_own_id=bool(row_id))

    def _is_full(self, session: str) -> bool:
        """Count a request of a session. Return whether the session has too many requests."""
        self._num_by_session[session] += 1
        return self._num_by_session[session] > self._config.max_per_session

    def _add_new(self, judged: JudgedQuery, has_own_id: bool) -> None:
        """Add a query, or drop it if it repeats an earlier query.

        Args:
            judged: The query with its judgements.
            has_own_id: Whether its row gives an id. If not, the id was made from the content, so
                two rows with one id have the same content.

        Raises:
            SkilltrainError: The query has its own id, and an earlier query has the same id.
        """
        query, _, where = judged
        # `setdefault` adds the query, or returns the earlier query with its id.
        earlier = self.queries.setdefault(query.query_id, judged)
        if earlier is judged:
            return
        if has_own_id:
            problem = f"query_id '{query.query_id}' stands in {earlier.where} too"
            raise SkilltrainError("repeated-id", problem, where=where)
        self._drop(query, _NO_SKILL, "duplicate_query", f"{where} repeats {earlier.where}")

    def _make_query(
        self, row: QueryRow, row_id: str | None, required: list[str], path: Path
    ) -> Query:
        """Return the query of a row. Id, kind, origin and split have defaults.

        Args:
            row: The row.
            row_id: Its query id. If it is None, the id is a hash of the text and required skills.
            required: Ids of the required skills, in order.
            path: File of the row. The start of its name is the default of the split.
        """
        text = clean_text(row.text or "").strip()
        stem = path.name.split(".")[0]
        split = self._config.split or row.split or stem
        if split not in get_args(Split):
            split = self._draw_split(path, required)

        # A hash of the content stays the same when rows are added or moved.
        content = "\x00".join([text, *required])
        digest = hashlib.sha256(content.encode()).hexdigest()[:12]
        query_id = row_id or f"{clean_text(stem)}-{digest}"
        default_kind = "multi" if len(required) > 1 else "single"
        origin = row.origin or self._config.origin
        return Query(query_id, text, row.kind or default_kind, origin, split)

    def _draw_split(self, path: Path, required: list[str]) -> Split:
        """Draw the split of a query that has none. Queries for one skill get the same split.

        Args:
            path: File of the query, for the error.
            required: Ids of the required skills. The first one is the key of the draw.

        Raises:
            SkilltrainError: The settings give no share of dev.
        """
        dev_share = self._config.dev_share
        if dev_share is None:
            problem = "neither its rows nor its file name give a split"
            fix = "set split: train, or dev_share: 0.2"
            raise SkilltrainError("choose-split", problem, where=path, fix=fix)
        return "dev" if is_drawn(dev_share, "split", *required[:1]) else "train"

    def _judge(self, row: QueryRow, query: Query, where: str) -> dict[str, Judgement]:
        """Return the judgements in a row by skill id.

        If a row judges a skill twice, the first judgement is kept. A second judgement with another
        verdict is dropped as a contradiction.

        Args:
            row: The row.
            query: The query of the row.
            where: File and row, for the reason of a dropped judgement.
        """
        judgements: dict[str, Judgement] = {}
        for key, verdict in VERDICT_KEYS.items():
            for entry in getattr(row, key):
                # A duplicate is not in the pool. Its judgement counts for the skill that is kept.
                skill_id = self._resolve_duplicate(entry)
                judgement = Judgement(
                    query.query_id,
                    skill_id,
                    verdict,
                    judge=entry.judge or query.origin,
                    reason=entry.reason,
                    why=entry.why,  # explains the reason in words
                    group=entry.group,
                )
                first = judgements.setdefault(skill_id, judgement)
                if first.verdict is not verdict:
                    reason = f"{where} says {verdict}, but also {first.verdict}, which is kept"
                    self._drop(query, skill_id, "contradiction", reason)
        return judgements

    def _resolve_duplicate(self, entry: Entry) -> str:
        """Return the id of the judged skill, or of the skill that the pool keeps for a duplicate.

        An unknown id is returned as it is.
        """
        if entry.skill_id in self._pool:
            return entry.skill_id
        return self._kept_ids.get(entry.skill_id) or entry.skill_id

    def consistent_judgements(self) -> list[Judgement]:
        """Return the usable judgements of all queries, and record the others as dropped.

        A judgement is dropped in two cases: its skill is not in the pool, or it is negative and
        another query with the same text has the skill as a positive.
        """
        first_positives = self._first_positives()
        consistent: list[Judgement] = []
        for query, judgements, where in self.queries.values():
            for skill_id, judgement in judgements.items():
                statement = f"{where} says {judgement.verdict}"
                positive_where = first_positives.get((query.text, skill_id))
                if positive_where is not None and judgement.verdict not in POSITIVE:
                    contrary = f"but {positive_where}, of the same text, calls it an answer"
                    self._drop(query, skill_id, "contradiction", f"{statement}, {contrary}")
                elif skill_id not in self._pool:
                    is_required = judgement.verdict is Verdict.REQUIRED
                    code = "missing_gold" if is_required else "not_in_pool"
                    reason = f"{statement} of a skill that is not in the pool"
                    self._drop(query, skill_id, code, reason)
                else:
                    consistent.append(judgement)
        return consistent

    def without_skipped_copies(self, judgements: Sequence[Judgement]) -> list[Judgement]:
        """Drop judgements of skipped skills that are near-duplicates of a loaded skill.

        A log of use records which skills an agent loaded for a request, and which it skipped. A
        near-duplicate of the loaded skill serves the request too, so it is no negative.

        Args:
            judgements: Judgements of all queries. Only judgements from a log are checked.

        Returns:
            The judgements that are kept.
        """
        # Skills that the log loaded or skipped. `USE_ORIGIN` marks judgements from the log.
        used_ids = {row.skill_id for row in judgements if row.judge == USE_ORIGIN}
        if not used_ids:
            return [*judgements]
        skills = [skill for skill in read_skills(self._config.pool) if skill.skill_id in used_ids]
        layer = JaccardLayer()  # has the limits of the stage `filter`
        clusters = near_duplicate_clusters(skills, layer.above, layer.max_names)
        # Only skills from the log have a cluster. For other skills it is None, and not used below.
        keys = [(row.query_id, clusters.get(row.skill_id)) for row in judgements]
        pairs = list(zip(keys, judgements, strict=True))
        # Clusters with a loaded skill, each with the id of its query.
        loaded_keys = {key for key, row in pairs if row.verdict in POSITIVE}

        consistent: list[Judgement] = []
        for key, row in pairs:
            is_skipped = row.judge == USE_ORIGIN and row.verdict not in POSITIVE
            if is_skipped and key in loaded_keys:
                reason = "skipped, but a near-duplicate of a loaded skill"
                self._drop(self.queries[row.query_id].query, row.skill_id, "near_duplicate", reason)
            else:
                consistent.append(row)
        return consistent

    def _first_positives(self) -> dict[tuple[str, str], str]:
        """Return file and row of the first positive judgement, by query text and skill id."""
        first_positives: dict[tuple[str, str], str] = {}
        for query, judgements, where in self.queries.values():
            for skill_id, judgement in judgements.items():
                if judgement.verdict in POSITIVE:
                    first_positives.setdefault((query.text, skill_id), where)
        return first_positives

    def _drop(self, query: Query, skill_id: str, code: str, reason: str) -> None:
        """Record why a judgement is left out, or with `_NO_SKILL` why the whole query is."""
        # The reason may hold a file name that is not valid UTF-8. Arrow cannot store it.
        self.dropped.append(Dropped(query.query_id, skill_id, code, clean_text(reason)))


def _validate_row(values: dict[str, Any], where: str) -> QueryRow:
    """Return a row of a query file, or raise SkilltrainError if it is no query.

    Args:
        values: The row, with values by key.
        where: File and row, for the error.
    """
    # A query lists its judged skills under keys of `VERDICT_KEYS`, such as `skill_ids`.
    if VERDICT_KEYS.keys().isdisjoint(values):
        keys = ", ".join(map(str, list(values)[:8]))
        problem = f"is no query: no key skill_ids or required among {keys}"
        # The key `_id` marks a row of a BEIR file, which has its judgements in other files.
        fix = "put the judgements of BEIR in a folder qrels beside it" if "_id" in values else ""
        raise SkilltrainError("invalid-row", problem, where=where, fix=fix)
    query_id = values.get("query_id")
    return validate(QueryRow, values, f"{where}, query {query_id}" if query_id else where)


def _check_group(group_id: str | None, judged: JudgedQuery) -> None:
    """Raise SkilltrainError if a group of skills has fewer than two skills to compare."""
    num_skills = len(judged.judgements)
    if num_skills < 2:
        problem = (
            f"group '{group_id}' holds {num_skills} skill(s): "
            "a group is judged by comparing its skills"
        )
        raise SkilltrainError("invalid-row", problem, where=judged.where)


def _write_unserved(files: Iterable[Path], out: Path) -> int:
    """Write the queries of trigger evaluations that no skill serves, and return their number.

    Args:
        files: Files of queries, and folders. Only folders without tables are read.
        out: Folder to write to.
    """
    rows = unserved_rows([file for file in files if _is_skill_folder(file)])
    if rows:
        write_jsonl(out / UNSERVED_FILE, rows)
    return len(rows)


def check_query_files(files: Sequence[Path]) -> None:
    """Check that files can be read, and that their rows have the form of queries.

    Raises:
        SkilltrainError: A file cannot be read, a row has another form, or none of the rows of all
            files can be used.
    """
    rows: list[QueryRow] = []
    for file in files:
        rows += [_validate_row(values, where) for where, values in _read_rows(file)]
    # Some rows may be unusable. The stage `queries` drops them with a reason.
    usable = [row for row in rows if (row.text or "").strip() and row.skill_ids + row.required]
    if files and not usable:
        problem = "no row has both a query and a skill that it needs"
        raise SkilltrainError("nothing-left", problem, where=files[0])


def _table_rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the queries of the tables QUERIES and JUDGEMENTS as rows of a query file."""
    # The keys of a query file are the verdicts, each with a list of judged skills. A query without
    # a judgement requires no skill.
    rows = {query.query_id: asdict(query) | {"required": []} for query in read_queries(folder)}
    for judgement in read_table(folder, JUDGEMENTS).to_pylist():
        if row := rows.get(judgement["query_id"]):
            row.setdefault(judgement["verdict"], []).append(judgement)
    for query_id, row in rows.items():
        yield f"{folder}, query {query_id}", row


def _read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a query file, each with a text that names the file and the row.

    Raises:
        SkilltrainError: The file cannot be read.
    """
    if not path.is_dir():
        yield from read_records(path)
    elif _is_skill_folder(path):
        # Queries are in the files evals/trigger-eval.json.
        yield from query_rows(path)
    elif table_path(path, QUERIES).is_file():
        yield from _table_rows(path)
    else:
        yield from beir_query_rows(path)


def _is_skill_folder(path: Path) -> bool:
    """Return whether a path is a folder without tables of queries, so one of skills."""
    has_queries = table_path(path, QUERIES).is_file() or bool(beir_files(path, "queries"))
    return path.is_dir() and not has_queries
