"""What one forward pass of training computes: micro-batches, gather, scores and loss, all inside the wrapped module."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from skilltrain.losses import EncoderLoss, LateInteraction, RerankerLoss, infonce_in
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.encoder import Encoder
from skilltrain.models.max_sim import max_sim
from skilltrain.models.micro_batches import TokenIds, run_micro_batches, split_to
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.models.tokens import TokenStore, tokenized, tokenizer_identity
from skilltrain.records import Skill
from skilltrain.training.ranks import first_rank_first, gather_rows, highest_on_any_rank, rank_and_world
from skilltrain.training.scores import ScoreContext, check_teacher_scores, encoder_scores, list_scores
from skilltrain.training.training_set import TrainingList, TrainingSet


@dataclass(frozen=True)
class StepSettings:
    """How a step runs the model."""

    token_budget: int
    recompute: bool = False
    in_batch: bool = True
    token_cache: Path | None = None
    varlen: bool = False
    is_sharded: bool = True  # ranks that hold shards of the model (FSDP2, ZeRO-3) must run it equally often
    late_interaction: LateInteraction | None = None


@dataclass
class TokenCount:
    """Tokens that this rank's model has seen, without and with padding."""

    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True)
class Texts:
    """Token ids of texts to encode, the same on every rank."""

    texts: Sequence[TokenIds]


@dataclass(frozen=True)
class Pairs:
    """The pairs of each query to score, the same on every rank."""

    lists: Sequence[Sequence[PairIds]]


class EncoderStep(nn.Module):
    """The encoder's loss on a batch of lists, with every skill of the batch as a candidate of every query.

    Each distinct skill of the batch is encoded once, by one rank; every rank takes its share of the queries.
    """

    def __init__(self, encoder: Encoder, loss: EncoderLoss, data: TrainingSet, settings: StepSettings) -> None:
        super().__init__()
        self.model, self.loss, self.data, self.settings = encoder, loss, data, settings
        self._no_split_modules = _layer_classes(encoder.backbone)
        if settings.recompute:
            checkpoint_layers(encoder.backbone)
        if settings.varlen:
            encoder.attend_by_length()
        self.query_ids, self.skill_ids = _token_ids(
            encoder, data, settings.token_cache, encoder.tokenize_queries, partial(tokenized_skills, encoder)
        )
        self.context = ScoreContext.of(data, loss, settings.in_batch)
        self.count = TokenCount()

    def forward(self, batch: Sequence[TrainingList] | Texts) -> Float[Tensor, "..."]:
        """The loss summed over this rank's queries of the global `batch`, or the vectors [text, dim] of all texts."""
        rank, world = rank_and_world()
        if isinstance(batch, Texts):
            return gather_rows(self._encode(batch.texts[rank::world], batch.texts[:1]), len(batch.texts))
        own = batch[rank::world]
        skill_ids = sorted({skill_id for one in batch for skill_id in one.skill_ids})
        if world > 1:  # dealt by length, ranks get equal work: the slowest of 8 has 1.10 of the mean, else 1.18
            skill_ids.sort(key=lambda skill_id: -len(self.skill_ids[skill_id]))
        texts = [self.query_ids[one.query] for one in own]
        texts += [self.skill_ids[skill_id] for skill_id in skill_ids[rank::world]]
        lengths = [len(self.query_ids[one.query]) for one in batch], [len(self.skill_ids[s]) for s in skill_ids]
        num_tokens = max(map(max, lengths)) if self.settings.late_interaction else 0
        rows, dim = self._encode(texts, [self.query_ids[batch[0].query]], num_tokens), self.model.dim
        of_queries, of_skills = rows[: len(own)], gather_rows(rows[len(own) :], len(skill_ids))
        queries, skills = of_queries[:, :dim], of_skills[:, :dim]
        all_queries = gather_rows(queries, len(batch)) if self.context.needs_sides else None
        scored = encoder_scores(own, batch, queries, all_queries, skill_ids, skills, self.context)
        loss = self.loss(scored)
        if self.settings.late_interaction:
            scores = max_sim(self._tokens(of_queries, lengths[0][rank::world]), self._tokens(of_skills, lengths[1]))
            scored = replace(scored, scores=scores, sides=None, truncated=None)
            loss = loss + self.settings.late_interaction(scored, infonce_in(self.loss).lexical_weight)
        return loss + skills[:0].sum()  # keeps the graph where this rank has no query

    def lengths(self, one: TrainingList) -> list[int]:
        """Tokens of the texts of a list's skills."""
        return [len(self.skill_ids[skill_id]) for skill_id in one.skill_ids]

    def slots(self, batch: Sequence[TrainingList]) -> list[int]:
        """Tokens of each micro-batch of a batch, padding included, where one process computes all of it."""
        lengths = [len(self.query_ids[one.query]) for one in batch]
        lengths += [len(self.skill_ids[skill_id]) for skill_id in {s for one in batch for s in one.skill_ids}]
        groups = self.model.micro_batches(lengths, self.settings.token_budget)
        return [self.model.num_slots([lengths[position] for position in group]) for group in groups]

    def _tokens(self, rows: Float[Tensor, "text width"], lengths: Sequence[int]) -> list[Float[Tensor, "_ dim"]]:
        """The vectors of each text's tokens, which stand behind its own."""
        split = rows.unflatten(1, (-1, self.model.dim))
        return [row[1 : 1 + length] for row, length in zip(split, lengths, strict=True)]

    def _encode(
        self, texts: Sequence[TokenIds], any_text: Sequence[TokenIds], num_tokens: int = 0
    ) -> Float[Tensor, "text width"]:
        """Unit vectors of this rank's texts, and behind each those of as many tokens.

        An idle rank still runs the model, for its part in the exchange.
        """
        used = texts or any_text
        lengths = [len(text) for text in used]
        groups = self.model.micro_batches(lengths, self.settings.token_budget)
        if self.settings.is_sharded:
            groups = split_to(groups, highest_on_any_rank(len(groups), self.model.device))
        if texts:
            self.count.tokens += sum(lengths)
            of_groups = [[lengths[position] for position in group] for group in groups if group]
            self.count.slots += sum(map(self.model.num_slots, of_groups))
        rows = self.model.embed(used) if torch.is_grad_enabled() else used  # see embed_together
        model = self.model
        both = model if not num_tokens else lambda batch: model.with_tokens(batch, num_tokens).flatten(1)
        return run_micro_batches(both, rows, groups)[: len(texts)]


class RerankerStep(nn.Module):
    """The reranker's loss on a batch of lists; every rank takes its share of the lists."""

    def __init__(self, reranker: Reranker, loss: RerankerLoss, data: TrainingSet, settings: StepSettings) -> None:
        super().__init__()
        check_teacher_scores(data, loss)
        self.model, self.loss, self.data, self.settings = reranker, loss, data, settings
        self._no_split_modules = _layer_classes(reranker.network)
        if settings.recompute:
            checkpoint_layers(reranker.network)
        self.query_ids, self.skill_ids = _token_ids(
            reranker,
            data,
            settings.token_cache,
            lambda texts: [*map(reranker.pairs.query, texts)],
            reranker.pairs.skills,
        )
        self.count = TokenCount()

    def forward(self, batch: Sequence[TrainingList] | Pairs) -> Float[Tensor, "..."]:
        """The loss summed over this rank's queries of the global `batch`, or the scores [pair] of all pairs."""
        rank, world = rank_and_world()
        if isinstance(batch, Pairs):
            return self._gathered_scores(batch.lists, rank, world)
        own = batch[rank::world] or batch[:1]  # an idle rank still runs the model, with weight 0
        flat = self._scores([self.pairs(one) for one in own])
        loss = self.loss(list_scores(own, flat, self.loss.needs_teacher_scores))
        return loss if batch[rank::world] else loss * 0

    def pairs(self, one: TrainingList) -> list[PairIds]:
        """Token ids of a list's pairs."""
        query = self.query_ids[one.query]
        return [self.model.pairs.join(query, self.skill_ids[skill_id]) for skill_id in one.skill_ids]

    def lengths(self, one: TrainingList) -> list[int]:
        """Tokens of a list's pairs before they are cut."""
        fixed = self.model.pairs.num_fixed + len(self.query_ids[one.query])
        return [fixed + len(self.skill_ids[skill_id]) for skill_id in one.skill_ids]

    def slots(self, batch: Sequence[TrainingList]) -> list[int]:
        """Tokens of each micro-batch of a batch, padding included, where one process computes all of it."""
        lists = [self.pairs(one) for one in batch]
        pairs = [pair for one in lists for pair in one]
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        return [self.model.num_slots([pairs[position] for position in group]) for group in groups]

    def _gathered_scores(self, lists: Sequence[Sequence[PairIds]], rank: int, world: int) -> Float[Tensor, "pair"]:
        """Every rank scores its share of the lists, padded to the longest list on the wire."""
        own = lists[rank::world]
        longest = max(len(pairs) for pairs in lists)
        flat = self._scores(own or lists[:1])
        rows = flat.new_zeros(len(own), longest)
        for row, scores in enumerate(flat.split([len(pairs) for pairs in own]) if own else ()):
            rows[row, : len(scores)] = scores
        gathered = gather_rows(rows, len(lists))
        return torch.cat([row[: len(pairs)] for row, pairs in zip(gathered, lists, strict=True)])

    def _scores(self, lists: Sequence[Sequence[PairIds]]) -> Float[Tensor, "pair"]:
        pairs = [pair for one in lists for pair in one]
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        if self.settings.is_sharded:
            groups = split_to(groups, highest_on_any_rank(len(groups), self.model.device))
        for group in groups:
            members = [pairs[position] for position in group]
            slots = self.model.num_slots(members) if members else 0
            self.count.slots += slots
            self.count.tokens += slots if self.model.is_packed else sum(map(len, members))
        reranker, direction = self.model, self.model.direction()
        return run_micro_batches(
            lambda group: reranker.score(group, direction),
            reranker.embed(pairs) if torch.is_grad_enabled() else pairs,
            groups,
        )


StepModule = EncoderStep | RerankerStep


def _layer_classes(network: Any) -> list[str]:
    """The classes that FSDP2 makes units of: layers, not what holds the embeddings, which a step looks up by itself."""
    table = network.get_input_embeddings()
    holders = {type(part).__name__ for part in network.modules() if any(child is table for child in part.modules())}
    return [name for name in network._no_split_modules if name not in holders]


def tokenized_skills(encoder: Encoder, skills: Sequence[Skill]) -> list[TokenIds]:
    """Token ids of the skills as the encoder sees them."""
    template, most = encoder.settings.template, encoder.settings.max_tokens
    return encoder.tokenize([template.render_skill(skill) for skill in skills], most)


def _token_ids(
    model: Encoder | Reranker,
    data: TrainingSet,
    cache: Path | None,
    of_queries: Callable[[list[str]], Sequence[TokenIds]],
    of_skills: Callable[[list[Skill]], Sequence[TokenIds]],
) -> tuple[TokenStore, TokenStore]:
    """Token ids of the queries, or their part of a pair, by text, and of the skills by id."""
    identity = f"{tokenizer_identity(model.tokenizer)} {model.settings.model_dump_json()}"
    queries = list(dict.fromkeys(one.query for one in data.lists))
    skills = list(data.skills.values())
    with first_rank_first():
        return (
            tokenized(queries, queries, of_queries, identity, cache),
            tokenized(list(data.skills), skills, of_skills, identity, cache),
        )
