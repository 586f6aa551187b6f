"""A small training set whose texts have unequal lengths."""

import random

from skilltrain.records import Skill
from skilltrain.training.training_set import TrainingList, TrainingSet
from tiny_models import WORDS


def words(source, low, high):
    """Return `low` to `high` random words."""
    return " ".join(source.choices(WORDS, k=source.randint(low, high)))


def training_set(num_lists, num_skills=12, seed=0, most_candidates=5):
    """Return `num_lists` queries with 2 to `most_candidates` candidates, one or two positive."""
    source = random.Random(seed)
    skills = {
        f"s{i}": Skill(f"s{i}", f"name {i}", words(source, 1, 4), words(source, 0, 60))
        for i in range(num_skills)
    }
    lists = []
    for number in range(num_lists):
        skill_ids = source.sample(sorted(skills), source.randint(2, most_candidates))
        gains = [1.0] + [0.0] * (len(skill_ids) - 1)
        if len(skill_ids) > 3:
            gains[1] = 0.5
        positives = frozenset(s for s, gain in zip(skill_ids, gains, strict=True) if gain > 0)
        query = f"{number} {words(source, 2, 30)}"
        lists.append(TrainingList(f"q{number}", query, tuple(skill_ids), tuple(gains), positives))
    return TrainingSet(tuple(lists), skills)
