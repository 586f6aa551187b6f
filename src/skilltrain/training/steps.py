"""What one forward pass of training computes: micro-batches, gather, scores and loss, all inside the wrapped module."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from skilltrain.distributed import (
    gather_rows,
    highest_on_any_rank,
    made_by_first_rank,
    rank_and_world,
)
from skilltrain.losses import LateInteraction, Loss, ScoredBatch
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import Groups, TokenIds, run_micro_batches, split_to
from skilltrain.models.pooling import max_sim
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.models.tokens import tokenized, tokenizer_identity
from skilltrain.records import Skill
from skilltrain.training.scores import ScoreContext, encoder_scores, list_scores
from skilltrain.training.training_set import TrainingList, TrainingSet

ModelT = TypeVar("ModelT", Encoder, Reranker)


@dataclass(frozen=True)
class StepSettings:
    """How a step runs the model."""

    token_budget: int
    recompute: bool = False
    in_batch: bool = True
    token_cache: Path | None = None
    varlen: bool = False
    is_sharded: bool = (
        True  # ranks that hold shards of the model (FSDP2, ZeRO-3) must run it equally often
    )
    late_interaction: LateInteraction | None = None


@dataclass(frozen=True)
class Texts:
    """Token ids of texts to encode, the same on every rank."""

    texts: Sequence[TokenIds]


@dataclass(frozen=True)
class Pairs:
    """The pairs of each query to score, the same on every rank."""

    lists: Sequence[Sequence[PairIds]]


class _Step(nn.Module, Generic[ModelT]):
    """A model with its loss on batches of lists, as launchers wrap it: all that runs the model goes through `forward`.

    Attributes:
        query_ids: Token ids of the queries, or of their part of a pair, by text.
        skill_ids: Token ids of the skills, or of their part of a pair, by skill id.
        count: Tokens that this rank's model has seen, and slots, which are tokens with padding.
    """

    def __init__(
        self,
        model: ModelT,
        loss: Loss,
        data: TrainingSet,
        settings: StepSettings,
        tokenize_queries: Callable[[list[str]], Sequence[TokenIds]],
        tokenize_skills: Callable[[list[Skill]], Sequence[TokenIds]],
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.data = data
        self.settings = settings
        self.count = Counter[str]()
        self._no_split_modules = _layer_classes(model.network)
        if settings.recompute:
            checkpoint_layers(model.network)
        identity = f"{tokenizer_identity(model.tokenizer)} {model.settings.model_dump_json()}"
        cache = settings.token_cache
        queries = {row.query: row.query for row in data.lists}
        self.query_ids = made_by_first_rank(
            lambda: tokenized(queries, tokenize_queries, identity, cache)
        )
        self.skill_ids = made_by_first_rank(
            lambda: tokenized(data.skills, tokenize_skills, identity, cache)
        )

    def run(
        self,
        function: Callable[[list], Tensor],
        items: Sequence[Any],
        groups: Groups,
        is_counted: bool,
    ) -> Float[Tensor, "item ..."]:
        """Run `function`, which runs the model, over texts or pairs in micro-batches."""
        model = self.model
        if self.settings.is_sharded:
            groups = split_to(groups, highest_on_any_rank(len(groups), model.device))
        if is_counted:
            slots = sum(self.slots_of(items, groups))
            tokens = slots if model.is_packed else sum(len(item) for item in items)
            self.count.update(slots=slots, tokens=tokens)
        if torch.is_grad_enabled():
            items = model.embed(items)
        return run_micro_batches(function, items, groups)

    def slots_of(self, items: Sequence[Any], groups: Groups) -> list[int]:
        """Tokens that the model computes for each group of texts or pairs, padding included."""
        return [
            self.model.num_slots([items[position] for position in group])
            for group in groups
            if group
        ]


class EncoderStep(_Step[Encoder]):
    """The encoder's loss on a batch of lists; each distinct skill is encoded once, by one rank."""

    def __init__(
        self, encoder: Encoder, loss: Loss, data: TrainingSet, settings: StepSettings
    ) -> None:
        super().__init__(
            encoder, loss, data, settings, encoder.tokenize_queries, encoder.tokenize_skills
        )
        if settings.varlen:
            encoder.attend_by_length()
        self.context = ScoreContext.of(data, loss, settings.in_batch)

    def forward(self, batch: Sequence[TrainingList] | Texts) -> Float[Tensor, "..."]:
        """The loss summed over this rank's queries of the global `batch`, or the vectors [text, dim] of all texts."""
        rank, world = rank_and_world()
        if isinstance(batch, Texts):
            vectors, _ = self._encode(batch.texts[rank::world], batch.texts[0])
            return gather_rows(vectors, len(batch.texts))

        own = batch[rank::world]
        skill_ids = self._distinct_skills(batch)
        queries = [self.query_ids[row.query] for row in batch]
        skills = [self.skill_ids[skill_id] for skill_id in skill_ids]
        late = self.settings.late_interaction
        num_tokens = max(len(text) for text in [*queries, *skills]) if late else 0
        texts = [*queries[rank::world], *skills[rank::world]]
        vectors, tokens = self._encode(texts, queries[0], num_tokens)

        query_vectors = vectors[: len(own)]
        skill_vectors = gather_rows(vectors[len(own) :], len(skills))
        needs_all = self.context.needs.directions
        all_queries = gather_rows(query_vectors, len(batch)) if needs_all else None
        scored = encoder_scores(
            own, batch, query_vectors, all_queries, skill_ids, skill_vectors, self.context
        )
        loss = self.loss(scored)
        if late:
            query_tokens = _unpadded(tokens[: len(own)], queries[rank::world])
            skill_tokens = _unpadded(gather_rows(tokens[len(own) :], len(skills)), skills)
            scores = max_sim(query_tokens, skill_tokens)
            loss = loss + late(
                ScoredBatch(scores, scored.gains, scored.valid, positive=scored.positive)
            )
        return loss + skill_vectors[:0].sum()  # keeps the graph where this rank has no query

    def _distinct_skills(self, batch: Sequence[TrainingList]) -> list[str]:
        """Return the ids of the batch's skills in the order in which ranks take turns."""
        skill_ids = sorted({skill_id for row in batch for skill_id in row.skill_ids})
        _, world = rank_and_world()
        if world > 1:
            # Ranks get equal work: the slowest of 8 has 1.10 of the mean, unsorted 1.18.
            skill_ids.sort(key=lambda skill_id: -len(self.skill_ids[skill_id]))
        return skill_ids

    def lengths(self, one: TrainingList) -> list[int]:
        """Tokens of the texts of a list's skills."""
        return [len(self.skill_ids[skill_id]) for skill_id in one.skill_ids]

    def slots(self, batch: Sequence[TrainingList]) -> list[int]:
        """Tokens of each micro-batch of a batch, padding included, where one process computes all of it."""
        texts = [self.query_ids[one.query] for one in batch]
        texts += [
            self.skill_ids[skill_id] for skill_id in {s for one in batch for s in one.skill_ids}
        ]
        return self.slots_of(texts, self.model.micro_batches(texts, self.settings.token_budget))

    def _encode(
        self, texts: Sequence[TokenIds], any_text: TokenIds, num_tokens: int = 0
    ) -> tuple[Float[Tensor, "text dim"], Float[Tensor, "text token dim"]]:
        """Encode this rank's texts.

        Args:
            any_text: What a rank without texts runs the model on, for its part in the exchange.
            num_tokens: Token vectors per text; 0 if only the texts' vectors are needed.

        Returns:
            Unit vectors of texts; those of their tokens, with zeros behind a text's last one.
        """

        model = self.model
        inputs = texts or [any_text]
        groups = model.micro_batches(inputs, self.settings.token_budget)
        function = partial(model.with_tokens, num_tokens=num_tokens) if num_tokens else model
        rows = self.run(function, inputs, groups, bool(texts))[: len(texts)]
        if not num_tokens:
            rows = rows[:, None]
        return rows[:, 0], rows[:, 1:]


class RerankerStep(_Step[Reranker]):
    """The reranker's loss on a batch of lists."""

    def __init__(
        self, reranker: Reranker, loss: Loss, data: TrainingSet, settings: StepSettings
    ) -> None:
        pairs = reranker.pairs
        super().__init__(
            reranker,
            loss,
            data,
            settings,
            lambda texts: [pairs.query(text) for text in texts],
            pairs.skills,
        )

    def forward(self, batch: Sequence[TrainingList] | Pairs) -> Float[Tensor, "..."]:
        """The loss summed over this rank's queries of the global `batch`, or the scores [pair] of all pairs."""
        rank, world = rank_and_world()
        if isinstance(batch, Pairs):
            return self._gathered_scores(batch.lists)
        # A rank without a list still runs the model, with weight 0.
        is_idle = rank >= len(batch)
        own = batch[:1] if is_idle else batch[rank::world]
        scores = self._scores([self.pairs(row) for row in own], not is_idle)
        loss = self.loss(list_scores(own, scores, self.loss.needs.teacher_scores))
        return loss * 0 if is_idle else loss

    def _gathered_scores(self, lists: Sequence[Sequence[PairIds]]) -> Float[Tensor, "pair"]:
        """Score all lists, of which each rank computes its share."""
        rank, world = rank_and_world()
        own = lists[rank::world]
        scores = self._scores(own or lists[:1], bool(own))
        sizes = torch.tensor([len(pairs) for pairs in lists])
        is_pair = torch.arange(int(sizes.max())) < sizes[:, None]  # [list, pair]
        is_own = is_pair[rank::world]
        rows = scores.new_zeros(is_own.shape)
        rows[is_own] = scores[: int(is_own.sum())]
        return gather_rows(rows, len(lists))[is_pair]

    def pairs(self, one: TrainingList) -> list[PairIds]:
        query = self.query_ids[one.query]
        return [
            self.model.pairs.join(query, self.skill_ids[skill_id]) for skill_id in one.skill_ids
        ]

    def lengths(self, one: TrainingList) -> list[int]:
        """Tokens of a list's pairs before they are cut."""
        fixed = self.model.pairs.num_fixed + len(self.query_ids[one.query])
        return [fixed + len(self.skill_ids[skill_id]) for skill_id in one.skill_ids]

    def slots(self, batch: Sequence[TrainingList]) -> list[int]:
        """Tokens of each micro-batch of a batch, padding included, where one process computes all of it."""
        lists = [self.pairs(one) for one in batch]
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        return self.slots_of([pair for pairs in lists for pair in pairs], groups)

    def _scores(
        self, lists: Sequence[Sequence[PairIds]], is_counted: bool
    ) -> Float[Tensor, "pair"]:
        pairs = [pair for row in lists for pair in row]
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        direction = self.model.direction()
        return self.run(lambda group: self.model.score(group, direction), pairs, groups, is_counted)


StepModule = EncoderStep | RerankerStep


def _unpadded(
    tokens: Float[Tensor, "text token dim"], texts: Sequence[TokenIds]
) -> list[Float[Tensor, "_ dim"]]:
    """Return the vectors of each text's tokens."""
    return [row[: len(text)] for row, text in zip(tokens, texts, strict=True)]


def _layer_classes(network: Any) -> list[str]:
    """The classes that FSDP2 makes units of: layers, not what holds the embeddings, which a step looks up by itself."""
    table = network.get_input_embeddings()
    holders = {
        type(part).__name__
        for part in network.modules()
        if any(child is table for child in part.modules())
    }
    return [name for name in network._no_split_modules if name not in holders]
