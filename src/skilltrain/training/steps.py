"""Modules that hold a model and its loss, and compute the loss of a batch of training lists."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
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
from skilltrain.losses import (
    LateInteraction,
    Loss,
    Needs,
    ScoredBatch,
    call_loss,
    flatten_loss,
)
from skilltrain.models.activations import checkpoint_layers
from skilltrain.models.encoder import Encoder
from skilltrain.models.micro_batches import (
    Groups,
    TokenIds,
    run_micro_batches,
    run_twice,
    split_groups,
)
from skilltrain.models.pooling import max_sim
from skilltrain.models.reranker import PairIds, Reranker
from skilltrain.models.tokens import tokenize_texts, tokenizer_identity
from skilltrain.training.scores import (
    InBatchMask,
    ScoreContext,
    encoder_scores,
    list_scores,
)
from skilltrain.training.training_set import TrainingList, TrainingSet

ModelT = TypeVar("ModelT", Encoder, Reranker)


@dataclass(frozen=True)
class StepSettings:
    """How a step runs the model.

    Attributes:
        token_budget: Maximum number of tokens of a micro-batch.
        recompute: Whether the backward pass computes the layers again, to save memory.
        in_batch: Whether skills of other queries are negatives.
        in_batch_mask: Which of these skills are left out.
        token_cache: Folder that keeps token ids between runs.
        varlen: Whether the encoder's texts are packed without padding.
        two_pass: Whether the backward pass runs every micro-batch a second time (GradCache).
        is_sharded: Whether ranks hold shards of the model (FSDP2, ZeRO-3). All ranks must then run
            it equally often.
        late_interaction: Additional loss on token vectors.
    """

    token_budget: int
    recompute: bool = False
    in_batch: bool = True
    in_batch_mask: InBatchMask = "clusters"
    token_cache: Path | None = None
    varlen: bool = False
    two_pass: bool = False
    is_sharded: bool = True
    late_interaction: LateInteraction | None = None


class TextsToEncode:
    """Token ids of texts to encode, the same on every rank.

    This is a plain class, because FSDP2 copies each dataclass and list among the inputs of a
    module, with all that it holds.
    """

    def __init__(self, texts: Sequence[TokenIds]) -> None:
        self.texts = texts


class PairsToScore:
    """Pairs to score, by query, the same on every rank. See `TextsToEncode` for the plain class."""

    def __init__(self, lists: Sequence[Sequence[PairIds]]) -> None:
        self.lists = lists


class _Step(nn.Module, Generic[ModelT]):
    """A model with its loss. DDP or FSDP2 wraps it, so only `forward` may run the model.

    Attributes:
        query_token_ids: Token ids by query text. For a reranker, those of the query's part of a
            pair.
        skill_token_ids: Token ids by skill id. For a reranker, those of the skill's part of a pair.
        count: Number of `tokens` and of `padded_tokens` (tokens and padding) that this rank has
            computed.
        scalars: Sums of the numbers that the loss has recorded for the log, by name.
    """

    def __init__(
        self, model: ModelT, loss: Loss, data: TrainingSet, settings: StepSettings
    ) -> None:
        """Tokenise all queries and skills of `data`, or read their token ids from the cache."""
        super().__init__()
        self.model = model
        self.loss = loss
        self.data = data
        self.settings = settings
        self.count = Counter[str]()
        self.scalars: dict[str, Tensor] = {}
        # accelerate reads this attribute to shard the model (FSDP2).
        self._no_split_modules = _layer_classes(model.network)
        if settings.recompute:
            checkpoint_layers(model.network)

        # Besides the texts, token ids depend on the tokenizer and the settings. So both are part of
        # the cache file's name.
        identity = f"{tokenizer_identity(model.tokenizer)} {model.settings.model_dump_json()}"
        cache = settings.token_cache
        # `tokenize_texts` takes texts by key, and returns token ids by key. The key of a query is
        # its text, by which the step looks up the token ids.
        query_by_text = {training_list.query: training_list.query for training_list in data.lists}
        self.query_token_ids = made_by_first_rank(
            lambda: tokenize_texts(query_by_text, model.tokenize_queries, identity, cache)
        )
        self.skill_token_ids = made_by_first_rank(
            lambda: tokenize_texts(data.skills, model.tokenize_skills, identity, cache)
        )

    def loss_of(self, scored: ScoredBatch, weight: float = 1.0) -> Float[Tensor, ""]:
        """Return the loss of a batch, and keep the numbers that it records for the log.

        Args:
            scored: Scores of the batch.
            weight: 0 for a rank without lists, whose loss and numbers do not count.
        """
        loss = weight * call_loss(self.loss, scored)
        for name, value in scored.scalars.items():
            self.scalars[name] = self.scalars.get(name, 0.0) + weight * value
        return loss

    def run(
        self,
        function: Callable[[list], Tensor],
        items: Sequence[Any],
        groups: Groups,
        is_counted: bool,
    ) -> Float[Tensor, "item ..."]:
        """Run the model on texts or pairs, one micro-batch at a time.

        Args:
            function: Runs the model on one micro-batch, and returns one row per item.
            items: Texts or pairs.
            groups: Positions of the items of each micro-batch.
            is_counted: Whether to add the tokens of the items to `self.count`.
        """
        model = self.model
        if self.settings.is_sharded:
            # All ranks must run the model equally often, so split groups until this rank has as
            # many as the rank with the most.
            max_groups = highest_on_any_rank(len(groups), model.device)
            groups = split_groups(groups, max_groups)
        if is_counted:
            padded_tokens = sum(self.padded_tokens_of(items, groups))
            # `padded_tokens_of` counts the tokens that the model computes. A packed model has no
            # padding, so this count is its number of tokens. It computes the common beginning of
            # pairs once, so the sum of the lengths would be too high.
            tokens = padded_tokens if model.is_packed else sum(map(len, items))
            self.count.update(padded_tokens=padded_tokens, tokens=tokens)
        if self.settings.two_pass and torch.is_grad_enabled():
            # Two-pass training saves memory: the backward pass runs each micro-batch again. Do not
            # call `embed` for all items here, because all their embeddings would stay in memory.
            function = partial(run_twice, function, device=model.device)
        elif torch.is_grad_enabled():
            # Look up the token embeddings of all items at once, because each lookup has a gradient
            # as large as the embeddings of the whole vocabulary.
            items = model.embed(items)
        return run_micro_batches(function, items, groups)

    def padded_tokens_of(self, items: Sequence[Any], groups: Groups) -> list[int]:
        """Return the number of tokens with padding of each micro-batch of texts or pairs."""
        return [
            self.model.num_slots([items[position] for position in group])
            for group in groups
            if group  # a group may be empty
        ]


class EncoderStep(_Step[Encoder]):
    """The encoder's loss on a batch of lists. One rank encodes each distinct skill, once."""

    def __init__(
        self, encoder: Encoder, loss: Loss, data: TrainingSet, settings: StepSettings
    ) -> None:
        super().__init__(encoder, loss, data, settings)
        if settings.varlen:
            encoder.enable_packing()
        self.context = ScoreContext.of(data, loss, settings.in_batch, settings.in_batch_mask)

    def forward(self, batch: Sequence[TrainingList] | TextsToEncode) -> Float[Tensor, "..."]:
        """Return the loss of a batch, summed over the queries of this rank.

        For `TextsToEncode`, return the vectors [text, dim] of all texts.

        Args:
            batch: Lists of all ranks, or texts.
        """
        if isinstance(batch, TextsToEncode):
            rank, world = rank_and_world()
            # With n ranks, each rank encodes every n-th text.
            vectors, _ = self._encode(batch.texts[rank::world], any_text=batch.texts[0])
            return gather_rows(vectors, len(batch.texts))
        return self._loss(batch)

    def _loss(self, batch: Sequence[TrainingList]) -> Float[Tensor, ""]:
        """Return the loss of a batch, summed over the queries of this rank.

        Args:
            batch: Lists of all ranks. A list has a query and its candidates.
        """
        # Collect the token ids of the queries and distinct skills of all ranks.
        skill_ids = self._distinct_skills(batch)
        queries = [self.query_token_ids[training_list.query] for training_list in batch]
        skills = [self.skill_token_ids[skill_id] for skill_id in skill_ids]
        late_interaction = self.settings.late_interaction
        # The late loss reads token vectors, padded to the longest text. 0: no token vectors.
        padded_length = max(map(len, [*queries, *skills])) if late_interaction else 0

        # Encode this rank's share: with n ranks, every n-th query and every n-th skill.
        rank, world = rank_and_world()
        local_queries = queries[rank::world]
        local_texts = [*local_queries, *skills[rank::world]]
        # All ranks must run the model. A rank without texts encodes `any_text` without using it.
        # `vectors` are [text, dim]. `tokens` are token vectors, not token ids: [text, token, dim].
        vectors, tokens = self._encode(
            local_texts, any_text=queries[0], padded_length=padded_length
        )
        num_queries = len(local_queries)

        # Compare this rank's queries with the skills of all ranks.
        # `gather_rows` restores the order of `skills` from the shares of all ranks.
        query_vectors = vectors[:num_queries]  # [local query, dim]
        skill_vectors = gather_rows(vectors[num_queries:], len(skills))  # [skill, dim]
        # Some losses also compare queries or skills with the queries of all ranks.
        all_queries = None
        if self.context.needs.directions:
            all_queries = gather_rows(query_vectors, len(batch))  # [query of all ranks, dim]
        # `scored` holds the score of each local query and each skill, and the mask of positives.
        local_lists = batch[rank::world]
        scored = encoder_scores(
            local_lists, batch, query_vectors, all_queries, skill_ids, skill_vectors, self.context
        )
        loss = self.loss_of(scored)

        # Add the late loss, which compares token vectors (MaxSim).
        if late_interaction:
            query_tokens = _without_padding(tokens[:num_queries], local_queries)
            skill_tokens = _without_padding(gather_rows(tokens[num_queries:], len(skills)), skills)
            scores = max_sim(query_tokens, skill_tokens)  # [query, skill]
            # If a part of the loss reads no teacher scores, the late loss gets the candidates of
            # this part. They include in-batch negatives, which have no teacher score.
            parts = flatten_loss(self.loss)
            needs_teacher = all(part.needs.teacher_scores for part in parts)
            valid = scored.for_needs(Needs(teacher_scores=needs_teacher)).valid
            # The late loss has its own scores, and the labels of `scored`. It uses neither text
            # vectors nor teacher scores, so these are not copied.
            late_scored = ScoredBatch(scores, scored.gains, valid, positive=scored.positive)
            loss = loss + late_interaction(late_scored)
        return loss

    def _distinct_skills(self, batch: Sequence[TrainingList]) -> list[str]:
        """Return the ids of the batch's skills, in an order that gives all ranks equal work."""
        skill_ids = sorted(_skill_ids(batch))
        _, world = rank_and_world()
        if world > 1:
            # With 8 ranks, the slowest takes 1.10 times the mean time; unsorted, 1.18 times.
            skill_ids.sort(key=lambda skill_id: -len(self.skill_token_ids[skill_id]))
        return skill_ids

    def lengths(self, training_list: TrainingList) -> list[int]:
        """Return the number of tokens of each skill of a list."""
        return [len(self.skill_token_ids[skill_id]) for skill_id in training_list.skill_ids]

    def padded_tokens(self, batch: Sequence[TrainingList]) -> list[int]:
        """Return the number of tokens with padding of each micro-batch, all on one process."""
        texts = [self.query_token_ids[training_list.query] for training_list in batch]
        texts += [self.skill_token_ids[skill_id] for skill_id in _skill_ids(batch)]
        groups = self.model.micro_batches(texts, self.settings.token_budget)
        return self.padded_tokens_of(texts, groups)

    def _encode(
        self, texts: Sequence[TokenIds], any_text: TokenIds, padded_length: int = 0
    ) -> tuple[Float[Tensor, "text dim"], Float[Tensor, "text token dim"]]:
        """Encode the texts of this rank.

        Args:
            texts: Token ids of each text. A rank may have no texts.
            any_text: Text that is encoded if there are no texts. Every rank must run the model,
                because ranks exchange weights and gradients.
            padded_length: Number of token vectors per text. 0: only the texts' vectors are needed.

        Returns:
            Unit vectors of the texts, and unit vectors of the tokens of each text. A text with
            fewer than `padded_length` tokens ends with zero vectors.
        """
        model = self.model
        has_texts = len(texts) > 0
        inputs = texts if has_texts else [any_text]
        groups = model.micro_batches(inputs, self.settings.token_budget)

        # `with_tokens` returns the text's vector, followed by the vectors of the tokens.
        has_tokens = padded_length > 0
        function = partial(model.with_tokens, num_tokens=padded_length) if has_tokens else model
        vectors = self.run(function, inputs, groups, is_counted=has_texts)
        vectors = vectors[: len(texts)]  # without `any_text`
        if not has_tokens:
            vectors = vectors[:, None]  # from [text, dim] to [text, 1, dim]

        # Separate the vectors [text, 1 + token, dim]. There may be 0 tokens.
        text_vectors = vectors[:, 0]  # [text, dim]
        token_vectors = vectors[:, 1:]  # [text, token, dim]
        return text_vectors, token_vectors


class RerankerStep(_Step[Reranker]):
    """The reranker's loss on a batch of lists."""

    def forward(self, batch: Sequence[TrainingList] | PairsToScore) -> Float[Tensor, "..."]:
        """Return the loss of a batch, summed over the queries of this rank.

        For `PairsToScore`, return the scores [pair] of all pairs.

        Args:
            batch: Lists of all ranks, or pairs.
        """
        if isinstance(batch, PairsToScore):
            return self._gathered_scores(batch.lists)

        # Every rank must run the model forward and backward. A rank without a list takes the first
        # list instead, but its loss gets weight 0, and its tokens are not counted.
        rank, world = rank_and_world()
        has_list = rank < len(batch)
        local_lists = batch[rank::world] if has_list else batch[:1]
        pairs = [self.make_pairs(training_list) for training_list in local_lists]
        scores = self._scores(pairs, is_counted=has_list)
        scored = list_scores(local_lists, scores, self.loss.needs.teacher_scores)
        # Multiply the loss by 0 on a rank without a list. A constant 0 would have no backward pass.
        return self.loss_of(scored, weight=float(has_list))

    def _gathered_scores(self, lists: Sequence[Sequence[PairIds]]) -> Float[Tensor, "pair"]:
        """Score all lists. Each rank scores some of them, and returns the scores of all."""
        # Every rank must run the model. A rank without a list scores the first list, and drops its
        # scores when it arranges them in rows.
        rank, world = rank_and_world()
        local_lists = lists[rank::world]
        has_list = len(local_lists) > 0
        scores = self._scores(local_lists if has_list else lists[:1], is_counted=has_list)  # [pair]

        # Arrange the scores of this rank in rows of equal length, one per list.
        sizes = torch.tensor([len(pairs) for pairs in lists])
        is_pair = torch.arange(int(sizes.max())) < sizes[:, None]  # [list, column]
        is_local_pair = is_pair[rank::world]  # [list of this rank, column]
        num_local_pairs = int(is_local_pair.sum())  # 0 without a list
        rows = scores.new_zeros(is_local_pair.shape)
        rows[is_local_pair] = scores[:num_local_pairs]

        # Exchange the rows, which restores the order of `lists`. Then drop the padding.
        all_rows = gather_rows(rows, len(lists))  # [list, column]
        return all_rows[is_pair]

    def make_pairs(self, training_list: TrainingList) -> list[PairIds]:
        """Return the pair of the query and each skill of a list."""
        query = self.query_token_ids[training_list.query]
        join = self.model.pair_tokenizer.join
        return [join(query, self.skill_token_ids[skill_id]) for skill_id in training_list.skill_ids]

    def lengths(self, training_list: TrainingList) -> list[int]:
        """Return the number of tokens of each pair of a list before truncation.

        A pair has the tokens of the query, the tokens of the skill, and the fixed tokens of the
        template.
        """
        query = self.query_token_ids[training_list.query]
        skills = [self.skill_token_ids[skill_id] for skill_id in training_list.skill_ids]
        num_fixed = self.model.pair_tokenizer.num_fixed + len(query)
        return [num_fixed + len(skill) for skill in skills]

    def padded_tokens(self, batch: Sequence[TrainingList]) -> list[int]:
        """Return the number of tokens with padding of each micro-batch, all on one process."""
        lists = [self.make_pairs(training_list) for training_list in batch]
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        return self.padded_tokens_of([*chain.from_iterable(lists)], groups)

    def _scores(
        self, lists: Sequence[Sequence[PairIds]], is_counted: bool
    ) -> Float[Tensor, "pair"]:
        """Return the scores of all pairs, list after list.

        Args:
            lists: Pairs of each list.
            is_counted: Whether to add the tokens of the pairs to `self.count`.
        """
        groups = self.model.micro_batches(lists, self.settings.token_budget)
        score = partial(self.model.score, score_vector=self.model.score_vector())
        return self.run(score, [*chain.from_iterable(lists)], groups, is_counted)


StepModule = EncoderStep | RerankerStep


def _skill_ids(batch: Sequence[TrainingList]) -> set[str]:
    return set(chain.from_iterable(training_list.skill_ids for training_list in batch))


def _without_padding(
    tokens: Float[Tensor, "text token dim"], texts: Sequence[TokenIds]
) -> list[Float[Tensor, "_ dim"]]:
    """Return the token vectors of each text, without those of padding."""
    return [vectors[: len(text)] for vectors, text in zip(tokens, texts, strict=True)]


def _layer_classes(network: Any) -> list[str]:
    """Return the names of the layer classes that FSDP2 shards as units.

    Classes that contain the table of token embeddings are left out, because `embed` reads the table
    outside of their `forward`.
    """
    table = network.get_input_embeddings()
    classes_with_table = set()
    for module in network.modules():
        if any(child is table for child in module.modules()):
            classes_with_table.add(type(module).__name__)
    return [name for name in network._no_split_modules if name not in classes_with_table]
