#!/usr/bin/env python
"""Draw Hit@1 by the number of skills with training requests, from learning_curve.sh's reports.

python benchmarks/learning_curve_plot.py OUT IMAGE

OUT is the folder that learning_curve.sh wrote. The kind of image follows from IMAGE, such as
curve.svg. Bars are 95% bootstrap intervals over the requests.
"""

from argparse import ArgumentParser
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from skilltrain.files import read_jsonl
from skilltrain.metrics.bootstrap import intervals

SYSTEMS = {"bm25": "BM25", "encoder": "encoder", "router": "router"}
"""Titles of the systems that are drawn."""
KINDS = {
    "long requests": ("dev_queries", lambda query_id: not query_id.endswith("-terse")),
    "terse requests": ("dev_queries", lambda query_id: query_id.endswith("-terse")),
    "tasks": ("skillsbench-dev", lambda query_id: True),
}
"""The report of each kind of request, and which of its queries are of this kind."""


def hits_of(folder: Path, system: str, kind: str) -> list[float]:
    """Return Hit@1 of each request of a kind, from the reports in the folder of one encoder."""
    report, is_of_kind = KINDS[kind]
    hits: list[float] = []
    for _, row in read_jsonl(folder / f"report_{report}" / "per_query.jsonl"):
        if row["system"] == system and is_of_kind(row["query_id"]):
            hits.append(row["Hit@1"])
    return hits


def draw(axes: Axes, folders: list[Path], kind: str) -> None:
    """Draw a line for each system, with an interval at each number of skills."""
    sizes = [int(folder.name) for folder in folders]
    for system_index, (system, title) in enumerate(SYSTEMS.items()):
        # [size][request]
        hits_by_size = [hits_of(folder, system, kind) for folder in folders]
        shares = intervals(np.array(hits_by_size).T)
        means = [share.mean for share in shares]
        # Lines are a little apart, so that their bars do not cover each other.
        shifted = [size * 1.03 ** (system_index - 1) for size in sizes]
        below = [share.mean - share.low for share in shares]
        above = [share.high - share.mean for share in shares]
        axes.errorbar(shifted, means, yerr=[below, above], label=title, marker="o", capsize=3)
    axes.set_title(f"{kind} (n = {len(hits_by_size[0])})")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("skills with training requests")
    axes.grid(axis="y", color="#e2e8f0")


def main() -> None:
    """Draw the three kinds of requests side by side."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder that learning_curve.sh wrote")
    parser.add_argument("image", type=Path, help="image to write")
    arguments = parser.parse_args()

    folders = [path for path in arguments.out.iterdir() if path.name.isdigit()]
    folders.sort(key=lambda folder: int(folder.name))
    plt.rcParams["svg.fonttype"] = "none"  # the text of an SVG image stays text
    figure, panels = plt.subplots(
        1, len(KINDS), figsize=(11, 3.8), sharey=True, layout="constrained"
    )
    for axes, kind in zip(panels, KINDS, strict=True):
        draw(axes, folders, kind)
    panels[0].set_ylabel("Hit@1")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=3)
    figure.savefig(arguments.image, metadata={"Date": None})


if __name__ == "__main__":
    main()
