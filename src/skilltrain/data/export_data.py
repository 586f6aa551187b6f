"""Write training data in the formats of other tools, and lists from texts of other tools."""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, product
from pathlib import Path
from statistics import mode
from typing import Any, get_args

from skilltrain.data import DataForm
from skilltrain.data.read_formats import read_texts
from skilltrain.errors import SkilltrainError
from skilltrain.files import path_inside, staged_folder, write_text
from skilltrain.records import POSITIVE, Judgement, Query, Skill, Verdict
from skilltrain.stage import Summary
from skilltrain.tables import (
    JUDGEMENTS,
    LISTS,
    RANKINGS,
    SKILLS,
    read_lists,
    read_queries,
    read_skills,
    read_table,
    read_verdicts,
    table_path,
    write_queries,
    write_table,
)
from skilltrain.templates import SkillTemplate
from skilltrain.terminal import say

# Score of each verdict in TREC and BEIR: twice its gain in our own benchmarks.
_SCORES = {Verdict.REQUIRED: 2, Verdict.USEFUL: 1, Verdict.IRRELEVANT: 0, Verdict.REJECTED: 0}
LinesByFile = dict[str, list[str]]
"""Lines of each file by its path in the folder to write."""
_ORIGIN = "texts"  # origin of what was read from texts


def export_data(
    source: Any, to: DataForm, out: Path | str, pool: Path | str | None = None
) -> Summary:
    """Write training data in the form of another tool, or convert such data to lists.

    Args:
        source: Folder with the tables to write. If `to` is `lists`, a file of texts, a DataFrame, a
            `datasets.Dataset` or a list of dicts (see `read_texts`).
        to: The form to write. The names in capitals are tables of this package.

            - `pairs`, `triplets`, `tuples`: LISTS for sentence-transformers, in train.jsonl. A
              tuple has one positive and all negatives of its list.
            - `trec`: RANKINGS as runs, a file for each stage, and JUDGEMENTS as qrels.txt.
            - `beir`: QUERIES and JUDGEMENTS with the pool as a BEIR folder.
            - `lists`: the other way round, pairs, triplets or tuples of texts become LISTS, and
              their texts become the pool.
        out: Folder to write.
        pool: Folder of the SKILLS table. None: `source` has this table too.

    Returns:
        Number of lines by file, header lines included. For `lists`, the numbers of lists and texts.

    Raises:
        SkilltrainError: A table is missing, or the tables do not fit each other.

    Examples:
        >>> export_data("runs/lists", "triplets", "runs/triplets", pool="runs/pool")
        {'train.jsonl': 1740}
        >>> rows = [{"anchor": "join PDFs", "positive": "Merges PDFs.", "negative": "Sorts rows."}]
        >>> export_data(rows, "lists", "runs/from_texts")
        {'num_lists': 1, 'num_skills': 2}
    """
    if to not in get_args(DataForm):
        problem = f"there is no form {to!r}; choose from {', '.join(get_args(DataForm))}"
        raise SkilltrainError("unknown-choice", problem)
    with staged_folder(Path(out)) as folder:
        if to == "lists":
            return _write_lists(read_texts(source), folder)
        lines_by_file = _lines_of(Path(source), to, Path(pool or source))
        for name, lines in lines_by_file.items():
            # The name may hold a split or a stage of a stranger's table, such as `../../x`.
            write_text(path_inside(folder, name, source), "\n".join([*lines, ""]))
        return {name: len(lines) for name, lines in lines_by_file.items()}


def _lines_of(source: Path, form: DataForm, pool: Path) -> LinesByFile:
    """Return the lines of each file that `export_data` writes.

    Args:
        source: Folder with the tables to write.
        form: Any form but `lists`.
        pool: Folder of the SKILLS table.

    Raises:
        SkilltrainError: A table names a query or skill that the other tables lack.
    """
    if form == "trec":
        return _trec_lines(source)
    skills = read_skills(pool)
    try:
        # `_texts` writes the three other forms: pairs, triplets and tuples.
        return _beir_lines(source, skills) if form == "beir" else _texts(source, skills, form)
    except KeyError as error:
        problem = f"the pool or the queries lack the id {error}"
        raise SkilltrainError("unknown-skill", problem, where=source, fix="set pool") from error


def _texts(source: Path, skills: Iterable[Skill], form: DataForm) -> LinesByFile:
    """Return lists as rows of texts for sentence-transformers.

    A list with two positives and ten negatives gives two pairs, twenty triplets or two tuples.

    Args:
        source: Folder with LISTS and QUERIES.
        skills: Skills of the pool.
        form: `pairs`, `triplets` or `tuples`.

    Returns:
        The lines of train.jsonl. A row has the keys `anchor` (the query), `positive`, and
        `negative_1`, `negative_2` and so on.

    Raises:
        KeyError: A list has an unknown query or skill.
        SkilltrainError: There is no row to write.
    """
    queries = {query.query_id: query.text for query in read_queries(source)}
    template = SkillTemplate()
    texts = {skill.skill_id: template.render(skill) for skill in skills}
    rows: list[dict[str, str]] = []  # rows to write
    # Here `row` is a training list: a query with its candidates.
    for row in read_lists(source):
        candidates = [*zip(row["skill_ids"], row["verdicts"], strict=True)]
        positives = [texts[skill_id] for skill_id, verdict in candidates if verdict in POSITIVE]
        negatives = [texts[skill_id] for skill_id, verdict in candidates if verdict not in POSITIVE]
        # A group has the negatives of one row to write. Each positive gets a row for each group.
        # Pairs have one group without negatives, triplets have a group for each negative, and
        # tuples have one group with all negatives.
        groups = {"pairs": [[]], "triplets": [[text] for text in negatives], "tuples": [negatives]}
        for positive, group in product(positives, groups[form]):
            numbered = {f"negative_{number}": text for number, text in enumerate(group, 1)}
            rows.append({"anchor": queries[row["query_id"]], "positive": positive, **numbered})

    if not rows:
        needed = "a positive and a negative" if form == "triplets" else "a positive"
        raise SkilltrainError("nothing-left", f"no list has {needed}", where=source)
    # All rows must have the same columns. Tuples of other lengths than most are left out.
    num_columns = mode(map(len, rows))
    lines = [json.dumps(row, ensure_ascii=False) for row in rows if len(row) == num_columns]
    if len(lines) < len(rows):
        say(f"left out {len(rows) - len(lines)} tuples: most have another number of negatives")
    return {"train.jsonl": lines}


def _trec_lines(source: Path) -> LinesByFile:
    """Return the rankings of a folder as runs, and its judgements as qrels.txt.

    Raises:
        SkilltrainError: The folder has neither table, an id has white space, or two stages would
            be written to one file.
    """
    lines_by_file: LinesByFile = {}
    stages: dict[str, str] = {}  # stage in the table, by its name in the run
    if table_path(source, RANKINGS).is_file():
        for row in read_table(source, RANKINGS).to_pylist():
            # A name such as `encoder runs/encoder` becomes `encoder_runs_encoder`.
            stage = row["stage"]
            row["stage"] = stage.replace("/", "_").replace(" ", "_")
            other = stages.setdefault(row["stage"], stage)
            if other != stage:
                problem = f"the stages {other!r} and {stage!r} would be written to one file"
                raise SkilltrainError("repeated-id", problem, where=source, fix="rename a stage")
            line = "{query_id} Q0 {skill_id} {rank} {score} {stage}".format_map(row)
            lines_by_file.setdefault(f"{row['stage']}.run", []).append(line)
    # A folder without rankings must have judgements.
    if table_path(source, JUDGEMENTS).is_file() or not lines_by_file:
        lines_by_file["qrels.txt"] = [
            f"{query_id} 0 {skill_id} {score}" for query_id, skill_id, score in _qrels(source)
        ]
    for name, lines in lines_by_file.items():
        num_columns = 4 if name == "qrels.txt" else 6
        for line in lines:
            if len(line.split()) != num_columns:
                problem = f"an id has white space, which a TREC file cannot hold: {line}"
                raise SkilltrainError("invalid-value", problem, where=source, fix="rename the id")
    return lines_by_file


def _qrels(source: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the query id, the skill id and the score of each judgement in a folder."""
    for query_id, verdicts in read_verdicts(source).items():
        for skill_id, verdict in verdicts.items():
            yield query_id, skill_id, _SCORES[verdict]


def _beir_lines(source: Path, skills: Iterable[Skill]) -> LinesByFile:
    """Return the lines of the files of a BEIR folder.

    The files are corpus.jsonl, queries.jsonl, and a file of judgements for each split, such as
    qrels/train.tsv.

    Args:
        source: Folder with QUERIES and JUDGEMENTS.
        skills: Skills of the pool. The text of a document begins with the skill's description.

    Raises:
        KeyError: A judgement has an unknown query or skill.
        SkilltrainError: A query has no split.
    """
    lines_by_file: LinesByFile = {"corpus.jsonl": [], "queries.jsonl": []}
    skill_ids: set[str] = set()
    for skill in skills:
        skill_ids.add(skill.skill_id)
        text = f"{skill.description}\n{skill.body}".strip()
        document = {"_id": skill.skill_id, "title": skill.name, "text": text}
        lines_by_file["corpus.jsonl"].append(json.dumps(document, ensure_ascii=False))
    qrels_files: dict[str, str] = {}  # file of the query's judgements, by query id
    for query in read_queries(source):
        # The split becomes the name of a file, and a file `.tsv` could not be read back.
        if not query.split:
            problem = f"query '{query.query_id}' has no split"
            raise SkilltrainError("invalid-value", problem, where=source)
        row = {"_id": query.query_id, "text": query.text}
        lines_by_file["queries.jsonl"].append(json.dumps(row, ensure_ascii=False))
        qrels_files[query.query_id] = f"qrels/{query.split}.tsv"
    for query_id, skill_id, score in _qrels(source):
        if skill_id not in skill_ids:
            raise KeyError(skill_id)
        # A new file of judgements begins with a header line.
        lines = lines_by_file.setdefault(qrels_files[query_id], ["query-id\tcorpus-id\tscore"])
        lines.append(f"{query_id}\t{skill_id}\t{score}")
    return lines_by_file


def _write_lists(verdicts_by_query: Mapping[str, dict[str, Verdict]], folder: Path) -> Summary:
    """Write lists of texts as LISTS, with QUERIES, JUDGEMENTS, and the texts as SKILLS.

    JUDGEMENTS has the positives only, because nobody may have judged the negatives.

    Args:
        verdicts_by_query: Verdict by text, for each query by its text. A query without a negative
            gets a random text as negative, because training needs a negative. The text is added
            to this argument.
        folder: Folder to write to.

    Returns:
        The numbers of lists and of different texts.
    """
    texts = [*dict.fromkeys(chain.from_iterable(verdicts_by_query.values()))]
    rng = random.Random(0)
    judgements: list[Judgement] = []
    lists: list[dict[str, Any]] = []
    for query, verdicts in verdicts_by_query.items():
        query_id = _id_of(query)
        positives = [text for text, verdict in verdicts.items() if verdict in POSITIVE]
        for text in positives:
            judgements.append(Judgement(query_id, _id_of(text), Verdict.REQUIRED, _ORIGIN))
        # If the query has only positives, draw texts until a text is drawn that is no positive.
        # `setdefault` does not change the verdict of a positive. If all texts are positives, there
        # is nothing to draw.
        while len(verdicts) == len(positives) < len(texts):
            verdicts.setdefault(rng.choice(texts), Verdict.IRRELEVANT)
        row = {"query_id": query_id, "skill_ids": [*map(_id_of, verdicts)]}
        row |= {"verdicts": [*verdicts.values()], "sources": [_ORIGIN] * len(verdicts)}
        # The texts come from no ranking, so all ranks are 0.
        lists.append(row | {"ranks": [0] * len(verdicts)})
    write_table([Skill(_id_of(text), "", "", text) for text in texts], SKILLS, folder)
    write_table(lists, LISTS, folder)
    queries = [
        Query(_id_of(query), query, kind="single", origin=_ORIGIN, split="train")
        for query in verdicts_by_query
    ]
    write_queries(queries, judgements, [], folder)
    return {"num_lists": len(lists), "num_skills": len(texts)}


def _id_of(text: str) -> str:
    """Return an id that depends only on a text: the start of its hash."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
