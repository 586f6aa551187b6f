"""What one forward pass of training computes: micro-batches, gather, scores and loss, all inside the wrapped module."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from skilltrain.losses import Loss, ScoredBatch
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import TokenIds, map_micro_batches
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.records import name_key
from skilltrain.training.gather import gather_rows, rank_and_world
from skilltrain.training.training_set import TrainingList, TrainingSet


class EncoderStep(nn.Module):
    """The encoder's loss on a batch of lists, with every skill of the batch as a candidate of every query.

    A skill that is known to answer a query, or bears the name of one that does, is no negative of it. Each distinct
    skill of the batch is encoded once, by one rank; every rank takes its share of the queries.
    """

    def __init__(
        self, encoder: Encoder, loss: Loss, data: TrainingSet, token_budget: int, recompute: bool, in_batch: bool
    ) -> None:
        super().__init__()
        self.encoder, self.loss, self.data = encoder, loss, data
        self.token_budget, self.recompute, self.in_batch = token_budget, recompute, in_batch
        self.query_ids = _tokenize_queries(encoder, data)
        self.skill_ids = _tokenize_skills(encoder, data)
        self.num_tokens = 0

    def forward(self, batch: Sequence[TrainingList]) -> Float[Tensor, ""]:
        """The loss summed over this rank's queries of the global `batch`."""
        rank, world = rank_and_world()
        own = batch[rank::world]
        skill_ids = sorted({skill_id for one in batch for skill_id in one.skill_ids})
        texts = [self.query_ids[one.query] for one in own]
        texts += [self.skill_ids[skill_id] for skill_id in skill_ids[rank::world]]
        self.num_tokens += sum(len(text) for text in texts)
        idle = not texts  # an idle rank still runs the model, for its part in the gradient's exchange
        used = texts or [self.query_ids[batch[0].query]]
        vectors = map_micro_batches(self.encoder, used, self.token_budget, self.recompute)[: 0 if idle else None]
        skills = gather_rows(vectors[len(own) :], len(skill_ids))
        gains, valid = candidate_labels(own, skill_ids, self.data, self.in_batch)
        with torch.autocast(vectors.device.type, enabled=False):  # bfloat16 would round cosines to 1/256
            scores = vectors[: len(own)] @ skills.T
        loss = self.loss(ScoredBatch(scores, gains.to(scores), valid.to(scores.device)))
        return loss + skills[:0].sum()  # keeps the graph where this rank has no query


def candidate_labels(
    lists: Sequence[TrainingList], skill_ids: Sequence[str], data: TrainingSet, in_batch: bool
) -> tuple[Float[Tensor, "query skill"], Bool[Tensor, "query skill"]]:
    """(gains, valid) of every skill of a batch for each query: its own list, and the other lists' skills as in-batch
    negatives except those known, or likely by their name, to answer the query.
    """
    column = {skill_id: position for position, skill_id in enumerate(skill_ids)}
    names = [name_key(data.skills[skill_id].name) for skill_id in skill_ids]
    gains = torch.zeros(len(lists), len(skill_ids))
    valid = torch.zeros(len(lists), len(skill_ids), dtype=torch.bool)
    for row, one in enumerate(lists):
        if in_batch:
            twins = {name_key(data.skills[s].name) for s in one.positives if s in data.skills}
            safe = [s not in one.positives and name not in twins for s, name in zip(skill_ids, names, strict=True)]
            valid[row] = torch.tensor(safe)
        own = torch.tensor([column[skill_id] for skill_id in one.skill_ids])
        gains[row, own] = torch.tensor(one.gains)
        valid[row, own] = True
    return gains, valid


class RerankerStep(nn.Module):
    """The reranker's loss on a batch of lists; every rank takes its share of the lists."""

    def __init__(self, reranker: Reranker, loss: Loss, data: TrainingSet, token_budget: int, recompute: bool) -> None:
        super().__init__()
        self.reranker, self.loss, self.data = reranker, loss, data
        self.token_budget, self.recompute = token_budget, recompute
        self.num_tokens = 0

    def forward(self, batch: Sequence[TrainingList]) -> Float[Tensor, ""]:
        """The loss summed over this rank's queries of the global `batch`."""
        rank, world = rank_and_world()
        own = batch[rank::world] or batch[:1]  # an idle rank still runs the model, with weight 0
        pairs: list[PairIds] = []
        for one in own:
            pairs += self.reranker.tokenize(one.query, [self.data.skills[skill_id] for skill_id in one.skill_ids])
        self.num_tokens += sum(len(pair) for pair in pairs)
        flat = map_micro_batches(self.reranker, pairs, self.token_budget, self.recompute)
        longest = max(len(one.gains) for one in own)
        scores, gains = flat.new_zeros(len(own), longest), flat.new_zeros(len(own), longest)
        valid = torch.zeros(len(own), longest, dtype=torch.bool, device=flat.device)
        rows = flat.split([len(one.gains) for one in own])
        for row, (one, row_scores) in enumerate(zip(own, rows, strict=True)):
            scores[row, : len(row_scores)] = row_scores
            gains[row, : len(one.gains)] = gains.new_tensor(one.gains)
            valid[row, : len(one.gains)] = True
        loss = self.loss(ScoredBatch(scores, gains, valid))
        return loss if batch[rank::world] else loss * 0


def _tokenize_queries(encoder: Encoder, data: TrainingSet) -> Mapping[str, TokenIds]:
    texts = list(dict.fromkeys(one.query for one in data.lists))
    return dict(zip(texts, encoder.tokenize_queries(texts), strict=True))


def _tokenize_skills(encoder: Encoder, data: TrainingSet) -> Mapping[str, TokenIds]:
    settings = encoder.settings
    texts = [settings.template.skill.render(skill) for skill in data.skills.values()]
    return dict(zip(data.skills, encoder.tokenize(texts, settings.max_tokens), strict=True))
