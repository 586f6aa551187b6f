"""What a loss sees of a step: scores from vectors, gains, and who may be a negative of whom."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from skilltrain.errors import SkilltrainError
from skilltrain.losses import Loss, Needs, ScoredBatch, Vectors
from skilltrain.losses.scored_batch import Direction
from skilltrain.models.micro_batches import on_device
from skilltrain.models.pooling import at_least_float32
from skilltrain.texts import name_key
from skilltrain.training.training_set import TrainingList, TrainingSet


@dataclass(frozen=True)
class ScoreContext:
    """What stays the same over a training run.

    Attributes:
        in_batch: Whether the other queries' skills are negatives too.
        needs: What the loss declares.
        groups: By skill, its name and its near-duplicate cluster: skills that share one answer the
            same queries.
        answers: By a query's text, the groups of all its answers.
    """

    in_batch: bool
    needs: Needs
    groups: Mapping[str, tuple[str, ...]]
    answers: Mapping[str, Set[str]]

    @classmethod
    def of(cls, data: TrainingSet, loss: Loss, in_batch: bool) -> "ScoreContext":
        """Find the groups of all skills, and of all queries' answers."""

        def groups_of(key: str) -> tuple[str, ...]:
            skill = data.skills.get(key)
            skill_id, name = (skill.skill_id, name_key(skill.name)) if skill else (key, "")
            group = f"name {name}" if name else f"id {skill_id}"
            if skill_id not in data.clusters:
                return (group,)
            return (group, f"cluster {data.clusters[skill_id]}")

        answers: dict[str, set[str]] = {}
        for row in data.lists:
            groups = answers.setdefault(row.query, set())
            for skill_id in row.positives:
                groups.update(groups_of(skill_id))
        groups_by_skill = {skill_id: groups_of(skill_id) for skill_id in data.skills}
        return cls(in_batch, loss.needs, groups_by_skill, answers)


def check_teacher_scores(data: TrainingSet, loss: Loss) -> None:
    """Check that a teacher has scored every list, for a loss that needs its scores.

    Raises:
        SkilltrainError: A list has no teacher scores; the error names its query.
    """
    if not loss.needs.teacher_scores:
        return
    without = [
        row.query_id
        for row in data.lists
        if all(math.isnan(score) for score in row.teacher_scores or ())
    ]
    if without:
        what = f"loss {loss.name} needs teacher scores, and {len(without)} of {len(data.lists)} lists have none"
        fix = "fill teacher_scores, or choose another loss"
        raise SkilltrainError(
            "no-teacher-scores", f"{what} (query {without[0]!r})", where="data.lists", fix=fix
        )


class _ListTable:
    """Lists as a table on the CPU: a row for each list, a column for each candidate.

    `cells` are the rows and columns of the lists' own candidates, `is_listed` their mask.
    """

    def __init__(
        self, lists: Sequence[TrainingList], columns: Sequence[Sequence[int]], num_columns: int
    ) -> None:
        sizes = np.array([len(row) for row in columns], dtype=int)
        rows = np.repeat(np.arange(len(lists)), sizes)
        self.lists = lists
        self.cells = (rows, np.fromiter(chain.from_iterable(columns), int))
        self.is_listed = np.zeros((len(lists), num_columns), bool)
        self.is_listed[self.cells] = True

    @classmethod
    def among(cls, lists: Sequence[TrainingList], skill_ids: Sequence[str]) -> "_ListTable":
        """Make the table of the lists' candidates among all skills of a batch."""
        positions = {skill_id: position for position, skill_id in enumerate(skill_ids)}
        columns = [[positions[skill_id] for skill_id in row.skill_ids] for row in lists]
        return cls(lists, columns, len(skill_ids))

    def gains(self) -> Float[np.ndarray, "query candidate"]:
        return self._filled((row.gains for row in self.lists), 0.0, np.float32)

    def is_positive(self) -> Bool[np.ndarray, "query candidate"]:
        return self._filled((row.is_positive for row in self.lists), 0.0, bool)

    def teacher_scores(self) -> Float[np.ndarray, "query candidate"]:
        return self._filled((row.teacher_scores or () for row in self.lists), math.nan, np.float32)

    def taught(
        self, valid: Bool[np.ndarray, "query candidate"]
    ) -> Bool[np.ndarray, "query candidate"]:
        """Return which valid candidates the teacher has scored."""
        return valid & ~np.isnan(self.teacher_scores())

    def scored(
        self,
        scores: Float[Tensor, "query candidate"],
        valid: Bool[np.ndarray, "query candidate"],
        needs: Needs,
        vectors: Vectors | None,
        negatives: Mapping[Direction, Bool[np.ndarray, "_ _"]],
    ) -> ScoredBatch:
        """Move all that a loss needs to the scores' device, and join both."""
        device = scores.device
        teacher_scores = on_device(self.teacher_scores(), device) if needs.teacher_scores else None
        return ScoredBatch(
            scores=scores,
            gains=on_device(self.gains(), device).to(scores.dtype),
            valid=on_device(valid, device),
            optional_teacher_scores=teacher_scores,
            positive=on_device(self.is_positive(), device),
            optional_vectors=vectors if needs.vectors else None,
            negatives={key: on_device(mask, device) for key, mask in negatives.items()},
        )

    def _filled(
        self, values: Iterable[Iterable[float]], empty: float, dtype: type
    ) -> Shaped[np.ndarray, "query candidate"]:
        """Put the lists' values into their cells and `empty` elsewhere."""
        table = np.full(self.is_listed.shape, empty, dtype)
        table[self.cells] = [*chain.from_iterable(values)]
        return table


def list_scores(
    lists: Sequence[TrainingList], flat: Float[Tensor, "pair"], needs_teacher_scores: bool
) -> ScoredBatch:
    """What the reranker's loss sees: the scores of the lists' pairs, one list after the other, as one table."""
    sizes = [len(row.gains) for row in lists]
    scores = torch.nn.utils.rnn.pad_sequence([*flat.split(sizes)], batch_first=True)
    table = _ListTable(lists, [range(size) for size in sizes], max(sizes))
    valid = table.taught(table.is_listed) if needs_teacher_scores else table.is_listed
    return table.scored(scores, valid, Needs(needs_teacher_scores), None, {})


def encoder_scores(
    own: Sequence[TrainingList],
    batch: Sequence[TrainingList],
    query_vectors: Float[Tensor, "own dim"],
    all_queries: Float[Tensor, "all dim"] | None,
    skill_ids: Sequence[str],
    skill_vectors: Float[Tensor, "skill dim"],
    context: ScoreContext,
) -> ScoredBatch:
    """What the encoder's loss sees of this rank's queries `own`, against all skills of the `batch`.

    Vectors are unit vectors; `all_queries` are those of `batch`, which a loss that needs directions
    compares too. For a loss that learns from a teacher only the candidates that the teacher scored
    are valid: no in-batch negatives.
    """
    table = _ListTable.among(own, skill_ids)
    valid = table.is_listed
    if context.in_batch:
        valid = valid | in_batch_negatives(own, skill_ids, context)
    if context.needs.teacher_scores:
        valid = table.taught(valid)
    negatives = {}
    if context.needs.directions:
        negatives = _negatives(table, valid, batch, skill_ids, context)
    if all_queries is None:
        all_queries = query_vectors[:0]
    parts = (query_vectors, skill_vectors, all_queries)
    vectors = Vectors(*(at_least_float32(part) for part in parts))
    return table.scored(vectors.scores, valid, context.needs, vectors, negatives)


def in_batch_negatives(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> Bool[np.ndarray, "query skill"]:
    """Which skills of other lists count against each query: all but known answers and their twins (`groups`)."""
    answers = [context.answers[row.query] for row in lists]
    is_answer = _share_a_group(answers, [context.groups[skill_id] for skill_id in skill_ids])
    return ~(is_answer | _ListTable.among(lists, skill_ids).is_listed)


def _negatives(
    table: _ListTable,
    valid: Bool[np.ndarray, "query candidate"],
    batch: Sequence[TrainingList],
    skill_ids: Sequence[str],
    context: ScoreContext,
) -> dict[Direction, Bool[np.ndarray, "_ _"]]:
    """Find who is a negative of whom in the other directions (see `ScoredBatch`).

    Queries are negatives of each other if they share no answer. A query is a negative of a positive
    if the positive is an in-batch negative for it, or a candidate of lower gain.
    """
    row, column = (table.is_positive() & valid).nonzero()  # [positive]
    all_table = _ListTable.among(batch, skill_ids)
    is_candidate = in_batch_negatives(batch, skill_ids, context) | all_table.is_listed
    gains = table.gains()[row, column][:, None]
    answers = [context.answers[one.query] for one in table.lists]
    all_answers = [context.answers[one.query] for one in batch]
    return {
        "query_to_query": ~_share_a_group(answers, all_answers),
        "skill_to_query": is_candidate[:, column].T & (gains > all_table.gains()[:, column].T),
        "skill_to_skill": in_batch_negatives(table.lists, skill_ids, context)[row],
    }


def _share_a_group(
    rows: Sequence[Set[str]], columns: Sequence[tuple[str, ...] | Set[str]]
) -> Bool[np.ndarray, "row column"]:
    """Whether a row's groups and a column's groups have one in common."""
    columns_by_group: dict[str, list[int]] = {}
    for column, groups in enumerate(columns):
        for group in groups:
            columns_by_group.setdefault(group, []).append(column)
    shared = np.zeros((len(rows), len(columns)), bool)
    for row, groups in enumerate(rows):
        for group in groups:
            shared[row, columns_by_group.get(group, [])] = True
    return shared
