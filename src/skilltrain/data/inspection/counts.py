"""What is counted over all lists: how candidates became negatives, their ranks, lengths, shares, and who recurs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow.compute as pc
from jaxtyping import Bool, Int64

from skilltrain.data.inspection.material import Material
from skilltrain.data.synthesis.name_leak import words_of

NUM_HUBS = 20
NUM_SHARES = 30
NO_VALUE = "none"


@dataclass(frozen=True)
class Flow:
    """Candidates of each source on their way: mined, dropped by layer, kept, chosen as negatives of a list.

    `mined` and `kept` are None where the runs were not found. `unaccounted`: mined, not kept, and no row says why.
    """

    sources: Sequence[str]
    layers: Sequence[str]
    mined: Counter[str] | None
    dropped: Counter[tuple[str, str]]
    kept: Counter[str] | None
    chosen: Counter[str]

    @property
    def num_dropped(self) -> int:
        """Candidates that filters took out."""
        return self.dropped.total()

    def unaccounted(self, source: str) -> int:
        """Candidates that vanished without a row in DROPPED (below 0: rows for candidates that are still there)."""
        if self.mined is None or self.kept is None:
            return 0
        dropped = sum(count for (name, _), count in self.dropped.items() if name == source)
        return self.mined[source] - dropped - self.kept[source]


def flow(material: Material) -> Flow:
    """The flow by source, sources in the order of mining and layers in the order of filtering."""
    chosen = negatives_by_source(material)
    dropped = Counter((drop.source, drop.layer) for drop in material.drops)
    seen = [*(material.mined or ()), *(material.kept or ()), *chosen, *(source for source, _ in dropped)]
    sources = [name for name in dict.fromkeys([*(quotas_of(material) or ()), *seen]) if name in seen]
    layers = list(dict.fromkeys([*_order_of_layers(material), *(layer for _, layer in dropped)]))
    return Flow(sources, layers, material.mined, dropped, material.kept, chosen)


def _order_of_layers(material: Material) -> list[str]:
    """The layers that recipes name, so that one which dropped nothing is still shown."""
    found: list[str] = []
    for step in reversed([step for step in material.trail.steps if step.filters]):
        layers = step.recipe.get("layers")
        names = [layer.get("name") for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
        found += ["judged", *(str(name) for name in names)]
    return found


def quotas_of(material: Material) -> dict[str, int] | None:
    """Negatives wanted of each source, where lists were built by quotas and say so."""
    found = (step.recipe.get("quotas") for step in material.trail.steps)
    quotas = next((quotas for quotas in found if isinstance(quotas, dict)), None)
    return None if quotas is None else {str(source): int(count) for source, count in quotas.items()}


def negatives_by_source(material: Material) -> Counter[str]:
    """Negatives in lists by source; sources that gave none are left out."""
    numbers = np.bincount(material.entries.source[~material.entries.positive], minlength=len(material.sources))
    return Counter({s: n for s, n in zip(material.sources, numbers.tolist(), strict=True) if n})


def per_list(material: Material, source: str) -> Counter[int]:
    """How many negatives of `source` a list holds → how many lists hold so many."""
    entries = material.entries
    mine = ~entries.positive & (entries.source == material.sources.index(source))
    counts = np.bincount(entries.list[mine], minlength=len(material.query_ids))
    return Counter(counts.tolist())


def ranks(material: Material, source: str | None) -> Counter[int]:
    """Rank → negatives of `source` at that rank of their source; None: positives that a ranking held."""
    entries = material.entries
    if source is None:
        return Counter(entries.rank[entries.positive & (entries.rank > 0)].tolist())
    return Counter(entries.rank[~entries.positive & (entries.source == material.sources.index(source))].tolist())


@dataclass(frozen=True)
class Lengths:
    """Words of each query; characters of the body of each positive and each negative, as often as lists hold them."""

    query_words: Int64[np.ndarray, " list"]
    positive_chars: Int64[np.ndarray, " positive"]
    negative_chars: Int64[np.ndarray, " negative"]


def lengths(material: Material) -> Lengths:
    """Lengths over all lists; a CJK character counts as a word; skills that the pool lacks have no length."""
    entries, chars = material.entries, body_chars(material)
    known = material.known[entries.skill]
    return Lengths(
        query_words=np.array([len(words_of(text)) for text in material.texts if text], dtype=np.int64),
        positive_chars=chars[entries.skill[entries.positive & known]],
        negative_chars=chars[entries.skill[~entries.positive & known]],
    )


def body_chars(material: Material) -> Int64[np.ndarray, " skill"]:
    """Characters of the body of each skill in use."""
    return pc.call_function("utf8_length", [material.skills.column("body")]).to_numpy().astype(np.int64)


@dataclass(frozen=True)
class Share:
    """How many positives and negatives of lists have one value of a column."""

    value: str
    positives: int
    negatives: int


@dataclass(frozen=True)
class Shares:
    """The values of a column by what share of positives and negatives they make up, the largest first.

    `same`: negatives with the value of a positive of their list, of `comparable`: negatives where both have one.
    """

    rows: Sequence[Share]
    num_values: int
    positives: int
    negatives: int
    same: int
    comparable: int


def shares(material: Material, column: str) -> Shares:
    """The shares of `category`, `lang` or `source`."""
    entries, values = material.entries, [value or NO_VALUE for value in material.texts_of(column)]
    counts = {
        positive: Counter(values[row] for row in entries.skill[entries.positive == positive].tolist())
        for positive in (True, False)
    }
    total = {positive: max(1, counter.total()) for positive, counter in counts.items()}
    weight = {v: sum(counts[p][v] / total[p] for p in (True, False)) for v in {*counts[True], *counts[False]}}
    ordered = sorted(weight, key=lambda value: (-weight[value], value))
    numbers = material.codes_of(column)
    has_positive = np.isin(entries.list, entries.list[entries.positive & (numbers[entries.skill] >= 0)])
    negative = ~entries.positive
    return Shares(
        rows=[Share(value, counts[True][value], counts[False][value]) for value in ordered[:NUM_SHARES]],
        num_values=len(ordered),
        positives=counts[True].total(),
        negatives=counts[False].total(),
        same=int((like_a_positive(material, numbers)).sum()),
        comparable=int((negative & has_positive & (numbers[entries.skill] >= 0)).sum()),
    )


def like_a_positive(material: Material, numbers: Int64[np.ndarray, " skill"]) -> Bool[np.ndarray, " entry"]:
    """Which entries are negatives whose skill has the number of a positive of the same list; -1 equals nothing."""
    entries, own = material.entries, numbers[material.entries.skill]
    key = entries.list * (int(numbers.max(initial=0)) + 1) + own
    return ~entries.positive & (own >= 0) & np.isin(key, key[entries.positive & (own >= 0)])


@dataclass(frozen=True)
class Hub:
    """A skill that is a negative of `count` lists, by source, and a positive of `positive_count`."""

    skill: int
    count: int
    positive_count: int
    by_source: Counter[str]


@dataclass(frozen=True)
class Hubs:
    """How often a skill serves as a negative: times → skills, and the most frequent ones."""

    times: Counter[int]
    top: Sequence[Hub]
    num_negatives: int

    @property
    def top_share(self) -> float:
        """The share of all negatives that the most frequent skills make up."""
        return sum(hub.count for hub in self.top) / max(1, self.num_negatives)


def hubs(material: Material) -> Hubs:
    """Hubs over all lists; equal counts in order of id."""
    entries = material.entries
    serve = np.bincount(entries.skill[~entries.positive], minlength=material.skills.num_rows)
    wanted = np.bincount(entries.skill[entries.positive], minlength=material.skills.num_rows)
    skill_ids = material.ids()
    top = sorted(np.flatnonzero(serve).tolist(), key=lambda row: (-serve[row], skill_ids[row]))[:NUM_HUBS]
    found = []
    for row in top:
        sources = entries.source[(entries.skill == row) & ~entries.positive].tolist()
        by_source = Counter(material.sources[source] for source in sources)
        found.append(Hub(row, int(serve[row]), int(wanted[row]), by_source))
    return Hubs(Counter(serve[serve > 0].tolist()), found, int(serve.sum()))
