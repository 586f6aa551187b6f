"""Reading a benchmark from its folder, whichever form it has."""

from collections.abc import Callable, Sequence
from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.evaluation.benchmarks.beir import read_beir
from skilltrain.evaluation.benchmarks.benchmark import Benchmark, as_tier, joined
from skilltrain.evaluation.benchmarks.livemcpbench import ANNOTATIONS, read_livemcpbench, read_livemcpbench_clone
from skilltrain.evaluation.benchmarks.r3 import read_r3_groups, read_r3_skill
from skilltrain.evaluation.benchmarks.skillret import read_skillret
from skilltrain.evaluation.benchmarks.skillrouter import read_skillrouter, read_skillrouter_tier
from skilltrain.evaluation.benchmarks.tables import read_tables
from skilltrain.terminal import say

# The file that tells a form, and what reads it; the first that is there decides.
_READERS: tuple[tuple[str, Callable[[Path, str | None], Benchmark]], ...] = (
    ("tools.jsonl", read_livemcpbench),
    (ANNOTATIONS, read_livemcpbench_clone),
    ("tasks.jsonl", read_skillrouter),
    ("judgements.jsonl", read_r3_groups),
    ("skills_test.jsonl", read_r3_skill),
    ("queries.jsonl", read_beir),
    ("queries.parquet", read_tables),
    ("queries", read_skillret),
    ("../relevance.json", read_skillrouter_tier),
)
_FORMS = (
    "a benchmark holds queries.parquet and judgements.parquet (ours), tasks.jsonl and relevance.json "
    "(SkillRouter), queries.jsonl and qrels/*.tsv (BEIR), queries/, skills/ and qrels/*.jsonl (SkillRet's data), "
    "test.jsonl and skills_test.jsonl (R3-Skill's data), judgements.jsonl (groups), "
    "tasks.jsonl and tools.jsonl, or a clone (LiveMCPBench), or the pool of a tier beside relevance.json (SkillRouter)"
)


def load_benchmark(path: Path | Sequence[Path], split: str | None = None) -> Benchmark:
    """The benchmark in a folder, all of it or one split, in whichever of these forms the folder holds.

    Several folders are tiers that are scored together, as SkillRouter averages easy and hard: `parts` of what comes
    back holds one benchmark each, to be ranked over its own pool (`check_pool`; `joined` puts them together again).
    Their queries are called `task@tier`, have a label `tier`, and those of one task are one cluster of the bootstrap:
    75 tasks over two pools have n = 150 and 75 clusters.

    Our own tables, queries.parquet and judgements.parquet: a required skill is gold with gain 1, a useful one has
    gain 0.5 without being gold; irrelevant and rejected skills gain nothing.

    SkillRouter's files, tasks.jsonl and relevance.json (gold_skills.jsonl may stand beside them): relevance.json
    alone decides what is scored. `core_gt_ids` are gold (`gt_skill_ids` where an entry has none; they differ only by
    auxiliary skills) and `relevance` holds the gains, 3 for gold and 1 for a degraded copy. Entries of task_type
    `generic_only` are skipped, and `excluded: true` in tasks.jsonl (SkillsBench's note on a task's environment) skips
    none, both as in the released evaluation. All queries are of split `test`. Its two tiers are two pools, the
    folders easy and hard beside these files: name one of them as the benchmark (or both), or give it as the pool.
    Without a pool the best order of nDCG holds the degraded copies, which only hard has.

    BEIR's files, corpus.jsonl, queries.jsonl and qrels/{split}.tsv with its header: what scores above 0 is gold, and
    the score is its gain. Queries without a row in the qrels are not scored. The corpus becomes the benchmark's own
    pool (title as name, text as body); without corpus.jsonl the ids are those of a pool you give.

    SkillRet's folder `data`: skills, queries and qrels, each with a file a split. A split has a pool of its own; all
    splits at once are ranked over all their skills, so give split=test for the published protocol.

    R3-Skill's folder `data`, test.jsonl and skills_test.jsonl: `skill_ids` are gold with gain 1. The rows carry no
    id that the released evaluation reads: a query is called by its line, test-17. Groups of judgements in a file
    judgements.jsonl: required skills are gold with gain 1, rejected and irrelevant ones gain nothing.

    LiveMCPBench, as a clone of its repository or as tasks.jsonl and tools.jsonl: a tool is a skill, and the tools
    are the benchmark's own pool. A needed tool whose name several servers offer is met by any of them
    (Relevance.alternatives). A needed tool that is not among the tools cannot be gold, and a task with no other is
    not scored; `notes` count both.

    Raises SkilltrainError, naming file, line and id, for malformed files, an id that stands twice, a query without
    gold, relevance without a query, and relevance of a skill that the benchmark's own pool does not hold.
    """
    paths = [path] if isinstance(path, Path) else path
    found = [_load(one, split) for one in paths]
    return found[0] if len(found) == 1 else joined([as_tier(one) for one in found])


def _load(path: Path, split: str | None) -> Benchmark:
    if not path.is_dir():
        raise SkilltrainError("no such folder; a benchmark is a folder", where=path)
    reader = next((reader for marker, reader in _READERS if (path / marker).exists()), None)
    if reader is None:
        raise SkilltrainError("is not a benchmark", where=path, fix=_FORMS)
    benchmark = reader(path, split)
    for note in benchmark.notes:
        say(f"{benchmark.name}: {note}")
    return benchmark
