"""Reranking: the candidates of each query, ordered by the reranker."""

from collections.abc import Mapping, Sequence

import torch
from pydantic import Field

from skilltrain.config import Config
from skilltrain.models.loading import Precision, default_device
from skilltrain.models.micro_batches import map_micro_batches
from skilltrain.models.reranker import Reranker, RerankerConfig, load_reranker
from skilltrain.records import Skill
from skilltrain.templates import RerankerTemplate
from skilltrain.terminal import track


class RerankerSource(Config):
    """A reranker to order candidates with."""

    source: str = Field(description="folder, Hub id owner/name, or package:NAME (a package that ships a model)")
    max_tokens: int | None = Field(default=None, ge=32, description="token limit of a (query, skill) pair")
    template: RerankerTemplate | None = Field(default=None, description="the texts the model sees")
    precision: Precision = Field(default="auto", description="auto: bfloat16 where the hardware has it")
    token_budget: int = Field(default=4096, ge=64, description="padded tokens a micro-batch")


def open_reranker(source: RerankerSource) -> Reranker:
    """The reranker ready to score, on the GPU where there is one."""
    config = RerankerConfig(
        source=source.source, max_tokens=source.max_tokens, template=source.template, precision=source.precision
    )
    return load_reranker(config, default_device())


@torch.inference_mode()
def rerank(
    reranker: Reranker,
    queries: Mapping[str, str],
    candidates: Mapping[str, Sequence[str]],
    skills: Mapping[str, Skill],
    token_budget: int,
) -> dict[str, list[tuple[str, float]]]:
    """query_id → [(skill_id, score)], best first; ties keep the candidates' order."""
    result: dict[str, list[tuple[str, float]]] = {}
    for query_id, skill_ids in track(candidates.items(), "reranking", len(candidates)):
        pairs = reranker.tokenize(queries[query_id], [skills[skill_id] for skill_id in skill_ids])
        scores = map_micro_batches(reranker, pairs, token_budget, recompute=False).tolist() if pairs else []
        scored = zip(skill_ids, scores, strict=True)
        result[query_id] = sorted(scored, key=lambda pair: -pair[1])
    return result
