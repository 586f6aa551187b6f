"""Makes the input of a loss from the model's output: scores, gains and masks of negatives."""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

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
from skilltrain.training.training_set import TrainingList, TrainingSet, skill_of

InBatchMask = Literal["none", "positives", "names", "clusters"]
"""Skills that are no in-batch negatives of a query. Each value includes those before it."""


@dataclass(frozen=True)
class ScoreContext:
    """Facts about the training set and the loss that every step needs to find negatives.

    Skills are duplicates if they have a duplicate key in common, for example `name pdf` or
    `cluster 7`. The mask decides which keys count.

    Attributes:
        in_batch: Whether skills of other queries are negatives.
        needs: Needs of the loss.
        keys_by_skill: Duplicate keys by key of the skill.
        answer_keys_by_query: Duplicate keys of all known answers, by query text.
    """

    in_batch: bool
    needs: Needs
    keys_by_skill: Mapping[str, tuple[str, ...]]
    answer_keys_by_query: Mapping[str, Set[str]]

    @classmethod
    def of(
        cls, data: TrainingSet, loss: Loss, in_batch: bool, mask: InBatchMask = "clusters"
    ) -> "ScoreContext":
        """Collect the duplicate keys of all skills, and of the answers of all queries.

        Args:
            data: The training set.
            loss: The loss.
            in_batch: Whether skills of other queries are negatives.
            mask: Which skills are left out of these negatives. It decides which keys count.
        """
        answer_keys = {}
        for training_list in data.lists:
            query = training_list.query
            # The key `query …` keeps a query from being its own negative when no skill is masked.
            keys = answer_keys.setdefault(query, {f"query {query}"})
            for skill_id in training_list.positives:
                keys.update(_duplicate_keys(skill_id, data, mask))
        keys_by_skill = {key: _duplicate_keys(key, data, mask) for key in data.skills}
        return cls(
            in_batch,
            loss.needs,
            keys_by_skill=keys_by_skill,
            answer_keys_by_query=answer_keys,
        )


def _duplicate_keys(key: str, data: TrainingSet, mask: InBatchMask) -> tuple[str, ...]:
    """Return the duplicate keys of a skill: id, name and cluster, as far as the mask goes.

    Args:
        key: Key of the skill or of one of its windows. A skill may not be in the training set.
        data: The training set.
        mask: Which of the keys count.

    Returns:
        Keys such as `id s12`, `name pdf` and `cluster 7`.
    """
    skill = data.skills.get(key)
    skill_id = skill.skill_id if skill else key
    name = name_key(skill.name) if skill else ""
    cluster = data.clusters.get(skill_id, "")
    # The masks "none", "positives", "names" and "clusters" use the first 0, 1, 2 and 3 keys.
    num_keys = get_args(InBatchMask).index(mask)
    keys = (("id", skill_id), ("name", name), ("cluster", cluster))
    return tuple(f"{kind} {value}" for kind, value in keys[:num_keys] if value != "")


def check_teacher_scores(data: TrainingSet, loss: Loss) -> None:
    """Check that a teacher has scored every list, for a loss that needs its scores.

    Raises:
        SkilltrainError: A list has no teacher scores; the error names its query.
    """
    if not loss.needs.teacher_scores:
        return
    unscored = []  # ids of queries
    for training_list in data.lists:
        scores = training_list.teacher_scores
        # A candidate that the teacher has not scored has NaN.
        if scores is None or all(map(math.isnan, scores)):
            unscored.append(training_list.query_id)
    if unscored:
        raise SkilltrainError(
            "no-teacher-scores",
            f"loss {loss.name} needs teacher scores, and {len(unscored)} of {len(data.lists)} "
            f"lists have none (query {unscored[0]!r})",
            where="data.lists",
            fix="fill teacher_scores, or choose another loss",
        )


class _ListTable:
    """Lists as a table on the CPU: a row for each list, a column for each candidate.

    Attributes:
        lists: The lists.
        cells: Row and column of each listed candidate, list after list.
        is_listed: Whether a candidate is in a list. An in-batch negative is not.
    """

    def __init__(
        self, lists: Sequence[TrainingList], columns: Sequence[Sequence[int]], num_columns: int
    ) -> None:
        """Make the table.

        Args:
            lists: The lists.
            columns: Columns of the candidates of each list.
            num_columns: Number of columns of the table.
        """
        # A list has one row. Repeat the number of the row for each candidate of the list.
        sizes = np.array([*map(len, columns)], dtype=int)  # [list]
        rows = np.repeat(np.arange(len(lists)), sizes)
        self.lists = lists
        self.cells = (rows, np.fromiter(chain.from_iterable(columns), int))
        self.is_listed = np.zeros((len(lists), num_columns), bool)
        self.is_listed[self.cells] = True

    @classmethod
    def among(cls, lists: Sequence[TrainingList], skill_ids: Sequence[str]) -> "_ListTable":
        """Make the table of the lists' candidates among all skills of a batch.

        Args:
            lists: The lists.
            skill_ids: Skills of the batch. Each has a column, in this order.
        """
        positions = {skill_id: position for position, skill_id in enumerate(skill_ids)}
        columns = []
        for training_list in lists:
            columns.append([positions[skill_id] for skill_id in training_list.skill_ids])
        return cls(lists, columns, len(skill_ids))

    def gains(self) -> Float[np.ndarray, "query candidate"]:
        return self._filled((each.gains for each in self.lists), 0.0, np.float32)

    def is_positive(self) -> Bool[np.ndarray, "query candidate"]:
        return self._filled((each.is_positive for each in self.lists), False, bool)

    def teacher_scores(self) -> Float[np.ndarray, "query candidate"]:
        scores = (each.teacher_scores or () for each in self.lists)
        return self._filled(scores, math.nan, np.float32)

    def has_teacher_score(self) -> Bool[np.ndarray, "query candidate"]:
        return ~np.isnan(self.teacher_scores())

    def to_scored_batch(
        self,
        scores: Float[Tensor, "query candidate"],
        valid: Bool[np.ndarray, "query candidate"],
        needs: Needs,
        vectors: Vectors | None,
        negatives: Mapping[Direction, Bool[np.ndarray, "_ _"]],
    ) -> ScoredBatch:
        """Return the input of a loss, on the device of the scores.

        Args:
            scores: Scores of the model.
            valid: Whether a candidate takes part in the loss, if the loss reads no teacher scores.
            needs: What the loss reads. Teacher scores and vectors that it does not read are left
                out. If it reads teacher scores, a candidate without one becomes invalid.
            vectors: Vectors whose cosines are the scores. None for a reranker.
            negatives: Masks of negatives by direction (see `ScoredBatch`).
        """
        device = scores.device
        teacher_scores = untaught = None
        if needs.teacher_scores:
            teacher_scores = on_device(self.teacher_scores(), device)
            # Candidates that only lack a teacher score. In a sum of losses, a part that reads no
            # teacher scores makes these candidates valid again (`ScoredBatch.for_needs`).
            untaught = on_device(valid & ~self.has_teacher_score(), device)
            valid = valid & self.has_teacher_score()
        masks = {}
        for direction, mask in negatives.items():
            masks[direction] = on_device(mask, device)
        return ScoredBatch(
            scores=scores,
            gains=on_device(self.gains(), device).to(scores.dtype),
            valid=on_device(valid, device),
            optional_teacher_scores=teacher_scores,
            positive=on_device(self.is_positive(), device),
            optional_vectors=vectors if needs.vectors else None,
            negatives=masks,
            # Candidates of the query's own list. All others are in-batch negatives.
            own=on_device(self.is_listed, device),
            untaught=untaught,
        )

    def _filled(
        self, values: Iterable[Iterable[float]], empty: float | bool, dtype: type
    ) -> Shaped[np.ndarray, "query candidate"]:
        """Return the values of each list as a table.

        Args:
            values: Values of each list, one per candidate.
            empty: Value of a candidate that is not in the list.
            dtype: Type of the table.
        """
        table = np.full(self.is_listed.shape, empty, dtype)
        table[self.cells] = [*chain.from_iterable(values)]
        return table


def list_scores(
    lists: Sequence[TrainingList],
    pair_scores: Float[Tensor, "pair"],
    needs_teacher_scores: bool,
) -> ScoredBatch:
    """Return the input of a reranker's loss.

    For example, the scores [1, 2, 3] of two lists with 2 candidates and 1 candidate become the
    table [[1, 2], [3, 0]], in which 0 is padding.

    Args:
        lists: Lists of this rank.
        pair_scores: Scores of all their candidates, list after list.
        needs_teacher_scores: Whether the loss learns from a teacher. Candidates without a teacher
            score are then not valid.
    """
    # Arrange the scores as a table. A shorter list ends with padding.
    sizes = [len(training_list.gains) for training_list in lists]
    scores_by_list = [*pair_scores.split(sizes)]
    scores = torch.nn.utils.rnn.pad_sequence(scores_by_list, batch_first=True)  # [list, candidate]

    # The columns of each list's candidates. A list with 3 candidates has the columns 0, 1 and 2.
    columns = [range(size) for size in sizes]
    table = _ListTable(lists, columns, num_columns=max(sizes))
    needs = Needs(teacher_scores=needs_teacher_scores)
    return table.to_scored_batch(scores, table.is_listed, needs, vectors=None, negatives={})


def encoder_scores(
    local_lists: Sequence[TrainingList],
    batch: Sequence[TrainingList],
    query_vectors: Float[Tensor, "query dim"],
    all_queries: Float[Tensor, "all dim"] | None,
    skill_ids: Sequence[str],
    skill_vectors: Float[Tensor, "skill dim"],
    context: ScoreContext,
) -> ScoredBatch:
    """Return the input of an encoder's loss: this rank's queries against the skills of all ranks.

    Args:
        local_lists: Lists of this rank.
        batch: Lists of all ranks.
        query_vectors: Unit vectors of the queries of `local_lists`.
        all_queries: Unit vectors of the queries of `batch`. None for a loss that compares queries
            with skills only.
        skill_ids: Keys of the distinct candidates of `batch`: skill ids, or keys of windows (parts
            of a long skill).
        skill_vectors: Unit vectors of these candidates.
        context: Facts about the training set and the loss.
    """
    # Find the candidates that take part in the loss: those of the query's list, and in-batch
    # negatives.
    table = _ListTable.among(local_lists, skill_ids)
    valid = table.is_listed  # [query, skill]
    if context.in_batch:
        valid = valid | in_batch_negatives(local_lists, skill_ids, context)

    # Find the negatives of the loss's other directions, such as from skill to query.
    negatives = {}
    if context.needs.directions:
        negatives = _negatives(table, valid, batch, skill_ids, context)

    # Collect the unit vectors. `Vectors.scores` computes the cosines of queries and skills.
    if all_queries is None:
        all_queries = query_vectors[:0]  # no rows
    vectors = Vectors(
        at_least_float32(query_vectors),
        at_least_float32(skill_vectors),
        at_least_float32(all_queries),
        query_ids=tuple(training_list.query_id for training_list in local_lists),
        # `skill_of` turns the key of a window into the id of its skill.
        skill_ids=tuple(map(skill_of, skill_ids)),
    )
    scores = vectors.scores  # [query, skill]
    return table.to_scored_batch(scores, valid, context.needs, vectors, negatives)


def in_batch_negatives(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], context: ScoreContext
) -> Bool[np.ndarray, "query skill"]:
    """Return which skills are in-batch negatives of each query.

    These are the skills of other lists, except known answers of the query and their duplicates.
    """
    answer_keys = [context.answer_keys_by_query[each.query] for each in lists]
    skill_keys = [context.keys_by_skill[skill_id] for skill_id in skill_ids]
    is_answer = _share_a_key(answer_keys, skill_keys)
    return ~(is_answer | _ListTable.among(lists, skill_ids).is_listed)


def _negatives(
    table: _ListTable,
    valid: Bool[np.ndarray, "query candidate"],
    batch: Sequence[TrainingList],
    skill_ids: Sequence[str],
    context: ScoreContext,
) -> dict[Direction, Bool[np.ndarray, "_ _"]]:
    """Return masks of negatives by direction, except from query to skill (see `ScoredBatch`).

    Args:
        table: Lists of this rank.
        valid: Whether a candidate of this rank's queries takes part in the loss.
        batch: Lists of all ranks.
        skill_ids: The distinct skills of `batch`.
        context: Facts about the training set and the loss.
    """
    # A query is a negative of another query if the two have no answer in common.
    answer_keys = [context.answer_keys_by_query[each.query] for each in table.lists]
    all_answer_keys = [context.answer_keys_by_query[each.query] for each in batch]
    has_common_answer = _share_a_key(answer_keys, all_answer_keys)  # [query, batch]

    # Each positive of this rank is a pair of a query (row) and a skill (column).
    positives = (table.is_positive() & valid).nonzero()
    queries, skills = positives  # each [positive]
    gains = table.gains()[positives]  # [positive]
    # A skill is a negative of a positive if it is an in-batch negative of the positive's query.
    skills_by_query = in_batch_negatives(table.lists, skill_ids, context)  # [query, skill]

    # Let a positive be query q with skill s. Another query r is a negative if s is a candidate of r
    # and has a lower gain for r than for q. If s is not in the list of r, its gain for r is 0.
    batch_table = _ListTable.among(batch, skill_ids)
    is_candidate = batch_table.is_listed | in_batch_negatives(batch, skill_ids, context)
    batch_gains = batch_table.gains()[:, skills].T  # [positive, batch]
    has_lower_gain = is_candidate[:, skills].T & (batch_gains < gains[:, None])
    return {
        "query_to_query": ~has_common_answer,
        "skill_to_query": has_lower_gain,
        "skill_to_skill": skills_by_query[queries],
    }


def _share_a_key(
    row_keys: Sequence[Set[str]], column_keys: Sequence[tuple[str, ...] | Set[str]]
) -> Bool[np.ndarray, "row column"]:
    """Return whether each row has a key in common with each column.

    For example, a query (row) and a skill (column) have a key in common if the skill is a known
    answer of the query, or a duplicate of such an answer.

    Args:
        row_keys: Keys of each row.
        column_keys: Keys of each column.
    """
    # Look up the columns of each key, which is faster than comparing each row with each column.
    columns_by_key = {}
    for column, keys in enumerate(column_keys):
        for key in keys:
            columns_by_key.setdefault(key, []).append(column)
    is_shared = np.zeros((len(row_keys), len(column_keys)), bool)
    for row, keys in enumerate(row_keys):
        for key in keys:
            # A key that no column has selects no columns.
            is_shared[row, columns_by_key.get(key, [])] = True
    return is_shared
