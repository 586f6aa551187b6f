"""Where a reranker looks: attention of the scoring position by field (SkillRouter, section 3.2 and appendix F)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FieldShares:
    """Shares of name, description and body; they sum to 1."""

    name: float
    description: float
    body: float


@dataclass(frozen=True, slots=True)
class FieldAttention:
    """Attention of the last position (of the first for models with a classification token) to the skill's fields.

    Averaged over heads, then normalised over the three fields of each pair, then averaged over pairs. `tokens` is the
    share of the fields in the tokens: what attention without a preference would give.
    """

    model: str
    layers: tuple[FieldShares, ...]
    overall: FieldShares
    tokens: FieldShares
    num_pairs: int
