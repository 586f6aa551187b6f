"""What one forward pass of training computes: micro-batches, gather, scores and loss, all inside the wrapped module."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from skilltrain.losses import EncoderLoss, LateInteraction, RerankerLoss
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import Groups, TokenIds, run_micro_batches, split_to
from skilltrain.models.pooling import max_sim
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.models.tokens import tokenize_texts, tokenizer_identity
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

    `query_ids` are token ids of the queries, or of their part of a pair, by text; `skill_ids` those of skills by id.
    """

    def __init__(
        self,
        model: ModelT,
        loss: EncoderLoss,
        data: TrainingSet,
        settings: StepSettings,
        of_queries: Callable[[list[str]], Sequence[TokenIds]],
        of_skills: Callable[[list[Skill]], Sequence[TokenIds]],
    ) -> None:
        super().__init__()
        self.model, self.loss, self.data, self.settings = model, loss, data, settings
        self.count = Counter[
            str
        ]()  # tokens that this rank's model has seen, and slots: with padding
        self._no_split_modules = _layer_classes(model.network)
        if settings.recompute:
            checkpoint_layers(model.network)
        about = (
            f"{tokenizer_identity(model.tokenizer)} {model.settings.model_dump_json()}",
            settings.token_cache,
        )
        queries = {one.query: one.query for one in data.lists}
        self.query_ids = made_by_first_rank(lambda: tokenize_texts(queries, of_queries, *about))
        self.skill_ids = made_by_first_rank(lambda: tokenize_texts(data.skills, of_skills, *about))

    def run(
        self,
        function: Callable[[list], Tensor],
        items: Sequence[Any],
        groups: Groups,
        is_counted: bool,
    ) -> Float[Tensor, "item ..."]:
        """`function`, which runs the model, over texts or pairs in micro-batches."""
        model = self.model
        if self.settings.is_sharded:
            groups = split_to(groups, highest_on_any_rank(len(groups), model.device))
        if is_counted:
            slots = sum(self.slots_of(items, groups))
            self.count.update(
                slots=slots, tokens=slots if model.is_packed else sum(map(len, items))
            )
        return run_micro_batches(
            function, model.embed(items) if torch.is_grad_enabled() else items, groups
        )

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
        self, encoder: Encoder, loss: EncoderLoss, data: TrainingSet, settings: StepSettings
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
            return gather_rows(
                self._encode(batch.texts[rank::world], batch.texts[0]), len(batch.texts)
            )
        own, late = batch[rank::world], self.settings.late_interaction
        skill_ids = sorted({skill_id for one in batch for skill_id in one.skill_ids})
        if (
            world > 1
        ):  # dealt by length, ranks get equal work: the slowest of 8 has 1.10 of the mean, else 1.18
            skill_ids.sort(key=lambda skill_id: -len(self.skill_ids[skill_id]))
        queries, skills = (
            [self.query_ids[one.query] for one in batch],
            [self.skill_ids[s] for s in skill_ids],
        )
        num_tokens = max(map(len, [*queries, *skills])) if late else 0
        rows = self._encode([*queries[rank::world], *skills[rank::world]], queries[0], num_tokens)
        of_queries, of_skills = rows[: len(own)], gather_rows(rows[len(own) :], len(skill_ids))
        dim = self.model.dim
        vectors = of_queries[:, :dim]
        everyones = gather_rows(vectors, len(batch)) if self.context.needs_sides else None
        scored = encoder_scores(
            own, batch, vectors, everyones, skill_ids, of_skills[:, :dim], self.context
        )
        loss = self.loss(scored)
        if late:
            scores = max_sim(
                _tokens(of_queries, queries[rank::world], dim), _tokens(of_skills, skills, dim)
            )
            loss = loss + late(replace(scored, scores=scores, sides=None, truncated=None))
        return loss + of_skills[:0, :dim].sum()  # keeps the graph where this rank has no query

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
    ) -> Float[Tensor, "text width"]:
        """Unit vectors of this rank's texts, and behind each those of as many tokens."""
        model, used = (
            self.model,
            texts or [any_text],
        )  # an idle rank still runs the model, for its part in the exchange
        groups = model.micro_batches(used, self.settings.token_budget)
        function = (
            (lambda batch: model.with_tokens(batch, num_tokens).flatten(1)) if num_tokens else model
        )
        return self.run(function, used, groups, bool(texts))[: len(texts)]


class RerankerStep(_Step[Reranker]):
    """The reranker's loss on a batch of lists."""

    def __init__(
        self, reranker: Reranker, loss: RerankerLoss, data: TrainingSet, settings: StepSettings
    ) -> None:
        pairs = reranker.pairs
        super().__init__(
            reranker, loss, data, settings, lambda texts: [*map(pairs.query, texts)], pairs.skills
        )

    def forward(self, batch: Sequence[TrainingList] | Pairs) -> Float[Tensor, "..."]:
        """The loss summed over this rank's queries of the global `batch`, or the scores [pair] of all pairs."""
        rank, world = rank_and_world()
        if isinstance(batch, Pairs):
            lists, share = batch.lists, batch.lists[rank::world]
            flat = self._scores(share or lists[:1], bool(share))
            rows = flat.new_zeros(
                len(share), max(map(len, lists))
            )  # padded to the longest list on the wire
            for row, scores in enumerate(flat.split([*map(len, share)]) if share else ()):
                rows[row, : len(scores)] = scores
            gathered = zip(gather_rows(rows, len(lists)), lists, strict=True)
            return torch.cat([row[: len(pairs)] for row, pairs in gathered])
        is_idle = rank >= len(batch)
        own = (
            batch[:1] if is_idle else batch[rank::world]
        )  # an idle rank still runs the model, with weight 0
        flat = self._scores([self.pairs(one) for one in own], not is_idle)
        loss = self.loss(list_scores(own, flat, self.loss.needs_teacher_scores))
        return loss * 0 if is_idle else loss

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
        model, pairs = self.model, [pair for one in lists for pair in one]
        groups, direction = (
            model.micro_batches(lists, self.settings.token_budget),
            model.direction(),
        )
        return self.run(lambda group: model.score(group, direction), pairs, groups, is_counted)


StepModule = EncoderStep | RerankerStep


def _tokens(
    rows: Float[Tensor, "text width"], texts: Sequence[TokenIds], dim: int
) -> list[Float[Tensor, "_ dim"]]:
    """The vectors of each text's tokens, which stand behind its own."""
    split = rows.unflatten(1, (-1, dim))
    return [row[1 : 1 + len(text)] for row, text in zip(split, texts, strict=True)]


def _layer_classes(network: Any) -> list[str]:
    """The classes that FSDP2 makes units of: layers, not what holds the embeddings, which a step looks up by itself."""
    table = network.get_input_embeddings()
    holders = {
        type(part).__name__
        for part in network.modules()
        if any(child is table for child in part.modules())
    }
    return [name for name in network._no_split_modules if name not in holders]
