"""The tables of mine_speed: seconds, memory, and how both grow."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NAMES = {
    "st": "sentence-transformers, torch",
    "st-faiss": "sentence-transformers, faiss",
    "ours-semantic": "skilltrain, semantic, exact",
    "ours-semantic-hnsw": "skilltrain, semantic, HNSW",
    "ours-semantic-ivf": "skilltrain, semantic, IVF",
    "ours": "skilltrain, four sources + filter",
    "clusters": "skilltrain, near-duplicate clusters",
}


@dataclass(frozen=True)
class Measurement:
    """One mode at one size; `result` is None where the process ended before its work was done."""

    mode: str
    num_skills: int
    num_queries: int
    peak_bytes: int
    result: dict[str, Any] | None


def report(measured: Sequence[Measurement]) -> str:
    """Two Markdown tables, seconds and memory at every size, with growth exponents over sizes that grow together."""
    sizes = sorted({(one.num_skills, one.num_queries) for one in measured})
    head = " | ".join(f"{skills:,} x {queries:,}" for skills, queries in sizes)
    lines = [f"| seconds (skills x queries) | {head} | grows as |", f"|---|{'---:|' * (len(sizes) + 1)}"]
    memory = [f"| peak memory, GB | {head} | grows as |", f"|---|{'---:|' * (len(sizes) + 1)}"]
    modes = [mode for mode in NAMES if any(one.mode == mode for one in measured)]
    for mode in modes:
        of = {(one.num_skills, one.num_queries): one for one in measured if one.mode == mode}
        row = [of.get(size) for size in sizes]
        lines.append(f"| {NAMES[mode]} | {' | '.join(map(_seconds_cell, row))} | {_growth(row, _seconds)} |")
        memory.append(f"| {NAMES[mode]} | {' | '.join(map(_memory_cell, row))} | {_growth(row, _gigabytes)} |")
    return "\n".join([*lines, "", *memory, "", *_remarks(measured)])


def _seconds(one: Measurement) -> float:
    return one.result["mine_seconds"] + one.result["filter_seconds"] if one.result else float("nan")


def _gigabytes(one: Measurement) -> float:
    return one.peak_bytes / 1e9 if one.result else float("nan")


def _seconds_cell(one: Measurement | None) -> str:
    if one is None or one.result is None:
        return "" if one is None else "died"
    parts = f" ({one.result['mine_seconds']:.1f} + {one.result['filter_seconds']:.1f})" if one.mode == "ours" else ""
    return f"{_seconds(one):.1f}{parts}"


def _memory_cell(one: Measurement | None) -> str:
    if one is None:
        return ""
    return f"{one.peak_bytes / 1e9:.2f}" + ("" if one.result else " (died)")


def _growth(row: Sequence[Measurement | None], value: Any) -> str:
    """n^e by least squares in logarithms, over sizes with the most common number of queries a skill."""
    done = [one for one in row if one is not None and one.result]
    ratios = [round(one.num_queries / one.num_skills, 2) for one in done]
    alike = [one for one, ratio in zip(done, ratios, strict=True) if ratio == max(set(ratios), key=ratios.count)]
    if len(alike) < 2:
        return ""
    logs = np.log([[one.num_skills, value(one)] for one in alike])
    return f"n^{np.polyfit(logs[:, 0], logs[:, 1], 1)[0]:.2f}"


def _remarks(measured: Sequence[Measurement]) -> list[str]:
    """Recall of indexes, and the share of candidates that both sides have in common."""
    lines = []
    for one in measured:
        size = f"{NAMES[one.mode]}, {one.num_skills:,} x {one.num_queries:,}"
        index = one.result["summary"]["index"] if one.result and "summary" in one.result else {}
        if "recall@50" in index:
            lines.append(f"- {size}: recall@50 {index['recall@50']:.3f} (n = {index['num_queries_sampled']} queries)")
        exact = next((o for o in measured if o.mode == "ours-semantic" and o.num_skills == one.num_skills), None)
        if one.mode.startswith("st") and one.result and exact and exact.result:
            shares = _common(one.result["nearest"], exact.result["nearest"])
            if shares:
                lines.append(f"- {size}: {np.mean(shares):.4f} of its candidates are ours (n = {len(shares)} queries)")
    return lines


def _common(theirs: dict[str, list[str]], ours: dict[str, list[str]]) -> list[float]:
    both = [query for query in theirs if query in ours and theirs[query]]
    return [len(set(theirs[query]) & set(ours[query])) / len(theirs[query]) for query in both]
