"""What a skill is for: a list of functional categories, and the nearest one for each skill."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64

from skilltrain.config import parse_yaml
from skilltrain.errors import SkilltrainError

DEFAULT_TAXONOMY = Path(__file__).with_name("taxonomy.yaml")


@dataclass(frozen=True, slots=True)
class Category:
    """One functional category; the description says what its skills do, in the words they would use."""

    name: str
    description: str


def load_taxonomy(path: Path) -> list[Category]:
    """The categories of a YAML file, a list of `- name: …` with `description: …`, in its order.

    Raises SkilltrainError naming the entry that is not of this form or whose name stands twice.
    """
    try:
        entries = parse_yaml(path.read_text(encoding="utf-8-sig"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise SkilltrainError(f"cannot read the taxonomy: {error}", where=path) from error
    if not isinstance(entries, list) or not entries:
        raise SkilltrainError("a taxonomy is a list of entries with name and description", where=path)
    categories: dict[str, Category] = {}
    for number, entry in enumerate(entries, 1):
        place = f"{path}, entry {number}"
        if not isinstance(entry, dict) or set(entry) != {"name", "description"}:
            raise SkilltrainError("an entry has exactly the keys name and description", where=place)
        name, description = (" ".join(str(entry[key] or "").split()) for key in ("name", "description"))
        if not name or not description:
            raise SkilltrainError("name and description must not be empty", where=place)
        if name in categories:
            raise SkilltrainError(f"category '{name}' stands twice", where=place)
        categories[name] = Category(name, description)
    return list(categories.values())


def assign_categories(
    skill_vectors: Float32[np.ndarray, "skill dim"],
    category_vectors: Float32[np.ndarray, "category dim"],
    taxonomy: Sequence[Category],
) -> list[str]:
    """The name of the nearest category for each skill, by inner product; ties go to the earlier category."""
    if len(category_vectors) != len(taxonomy) or not taxonomy:
        raise ValueError(f"{len(category_vectors)} category vectors for {len(taxonomy)} categories")
    if not len(skill_vectors):
        return []
    nearest = (skill_vectors @ category_vectors.T).argmax(axis=1)
    return [taxonomy[position].name for position in nearest]


def categories_from_members(
    members: Iterable[tuple[Float32[np.ndarray, "skill dim"], Sequence[str]]],
) -> tuple[list[Category], Float32[np.ndarray, "category dim"]]:
    """The categories that skills already have, by name, and the unit mean vector of the members of each.

    `members` are blocks of skills: their vectors, and the category of each.
    """
    sums: dict[str, Float64[np.ndarray, " dim"]] = {}
    for vectors, names in members:
        for name in set(names):
            total = vectors[[own == name for own in names]].sum(axis=0, dtype=np.float64)
            sums[name] = sums[name] + total if name in sums else total
    categories = [Category(name, "") for name in sorted(sums)]
    means = np.stack([sums[category.name] for category in categories])
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return categories, (means / np.maximum(norms, 1e-12)).astype(np.float32)
