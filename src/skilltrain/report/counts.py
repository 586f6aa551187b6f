"""What is counted over all lists: how candidates became negatives, their ranks, lengths, shares, and who recurs."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int64

from skilltrain.records import Skill
from skilltrain.report.material import UNKNOWN, Material, codes
from skilltrain.texts import words_of

NUM_HUBS, NUM_SHARES = 20, 30
NO_VALUE = "none"


@dataclass(frozen=True)
class Flow:
    """Candidates of each source on their way: mined, dropped by (source, layer), kept, chosen as negatives of a list.

    `mined` and `kept` are None where the runs were not found.
    """

    sources: tuple[str, ...]
    layers: tuple[str, ...]
    mined: Counter[str] | None
    dropped: Counter[tuple[str, str]]
    kept: Counter[str] | None
    chosen: Counter[str]

    def unaccounted(self, source: str) -> int:
        """Candidates that vanished without a row in DROPPED (below 0: rows for candidates that are still there)."""
        if self.mined is None or self.kept is None:
            return 0
        dropped = sum(count for (name, _), count in self.dropped.items() if name == source)
        return self.mined[source] - dropped - self.kept[source]


def flow(material: Material) -> Flow:
    """The flow by source, sources in the order of mining and layers in the order of filtering."""
    entries = material.entries
    negatives = np.bincount(entries.source[~entries.positive], minlength=len(material.sources)).tolist()
    chosen = Counter({source: n for source, n in zip(material.sources, negatives, strict=True) if n})
    dropped = Counter((drop.source or UNKNOWN, drop.filter) for drop in material.drops)
    seen = [*(material.mined or ()), *(material.kept or ()), *chosen, *(source for source, _ in dropped)]
    sources = [name for name in dict.fromkeys([*quotas_of(material), *seen]) if name in seen]
    layers = dict.fromkeys([*_layers_of(material), *(layer for _, layer in dropped)])
    return Flow(tuple(sources), tuple(layers), material.mined, dropped, material.kept, chosen)


def _layers_of(material: Material) -> list[str]:
    """The layers that recipes name, so that one which dropped nothing is still shown."""
    found: list[str] = []
    for step in reversed([step for step in material.trail.steps if step.filters]):
        layers = step.recipe.get("layers")
        names = [layer.get("name") for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
        found += ["judged", *map(str, names)]
    return found


def quotas_of(material: Material) -> dict[str, int]:
    """Negatives wanted of each source, where lists were built by quotas and say so."""
    found = (step.recipe.get("quotas") for step in material.trail.steps)
    quotas = next((quotas for quotas in found if isinstance(quotas, dict)), {})
    return {str(source): int(count) for source, count in quotas.items()}


def per_list(material: Material, source: str) -> Counter[int]:
    """How many negatives of `source` a list holds → how many lists hold so many, the most frequent first."""
    entries = material.entries
    mine = ~entries.positive & (entries.source == material.sources.index(source))
    counts = Counter(np.bincount(entries.list[mine], minlength=len(material.query_ids)).tolist())
    return Counter(dict(counts.most_common()))


def ranks(material: Material, source: str | None) -> Int64[np.ndarray, " entry"]:
    """The rank of each negative in the ranking of `source`; None: of each positive that a ranking held."""
    entries = material.entries
    if source is None:
        return entries.rank[entries.positive & (entries.rank > 0)]
    return entries.rank[~entries.positive & (entries.source == material.sources.index(source))]


def query_words(material: Material) -> Int64[np.ndarray, " list"]:
    """Words of each query; a CJK character counts as a word."""
    return np.array([len(words_of(text)) for text in material.texts if text], dtype=np.int64)


def body_lengths(material: Material) -> dict[str, Int64[np.ndarray, " entry"]]:
    """Characters of the bodies of positives and of negatives, as often as lists hold them; unknown skills have none."""
    entries = material.entries
    known = material.known[entries.skill]
    own = material.body_chars[entries.skill]
    return {"positives": own[entries.positive & known], "negatives": own[~entries.positive & known]}


@dataclass(frozen=True)
class Shares:
    """The values of a column by what share of positives and negatives they make up, the largest first.

    `rows` are (value, positives, negatives). `same`: negatives with the value of a positive of their list, of
    `comparable`: negatives where both have one.
    """

    rows: tuple[tuple[str, int, int], ...]
    num_values: int
    positives: int
    negatives: int
    same: int
    comparable: int

    def highest(self) -> float:
        """The largest share in the rows."""
        shares = [(p / max(1, self.positives), n / max(1, self.negatives)) for _, p, n in self.rows]
        return max((max(pair) for pair in shares), default=1.0)


def shares(material: Material, column: Callable[[Skill], str | None]) -> Shares:
    """The shares of what `column` says of a skill (its category, its language)."""
    entries, values = material.entries, [column(skill) for skill in material.skills]
    positive, negative = (_counted(values, entries.skill[entries.positive == side]) for side in (True, False))
    num_positive, num_negative = positive.total(), negative.total()
    weight = {
        value: positive[value] / max(1, num_positive) + negative[value] / max(1, num_negative)
        for value in {*positive, *negative}
    }
    ordered = sorted(weight, key=lambda value: (-weight[value], value))
    numbers = codes(values)
    has_value = numbers[entries.skill] >= 0
    has_positive = np.isin(entries.list, entries.list[entries.positive & has_value])
    return Shares(
        rows=tuple((value, positive[value], negative[value]) for value in ordered[:NUM_SHARES]),
        num_values=len(ordered),
        positives=num_positive,
        negatives=num_negative,
        same=int(material.like_a_positive(numbers).sum()),
        comparable=int((~entries.positive & has_positive & has_value).sum()),
    )


def _counted(values: list[str | None], skills: Int64[np.ndarray, " entry"]) -> Counter[str]:
    return Counter(values[skill] or NO_VALUE for skill in skills.tolist())


@dataclass(frozen=True)
class Hub:
    """A skill that is a negative of `count` lists, by source, and a positive of `positive_count`."""

    skill: Skill
    count: int
    positive_count: int
    by_source: Mapping[str, int]


@dataclass(frozen=True)
class Hubs:
    """How often a skill serves as a negative: times → skills, and the most frequent ones with their share."""

    times: Counter[int]
    top: tuple[Hub, ...]
    top_share: float


def hubs(material: Material) -> Hubs:
    """Hubs over all lists; equal counts in order of id."""
    entries, skills = material.entries, material.skills
    serve, wanted = material.num_lists(positive=False), material.num_lists(positive=True)
    top = sorted(np.flatnonzero(serve).tolist(), key=lambda place: (-serve[place], skills[place].skill_id))[:NUM_HUBS]
    found: list[Hub] = []
    for place in top:
        sources = entries.source[(entries.skill == place) & ~entries.positive].tolist()
        by_source = Counter(material.sources[source] for source in sources)
        found.append(Hub(skills[place], int(serve[place]), int(wanted[place]), dict(by_source.most_common())))
    share = sum(hub.count for hub in found) / max(1, int(serve.sum()))
    return Hubs(Counter(serve[serve > 0].tolist()), tuple(found), share)
