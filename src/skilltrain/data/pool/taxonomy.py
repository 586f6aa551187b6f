"""What a skill is for: a list of functional categories, and the nearest one for each skill."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

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
    skill_vectors: Float32[np.ndarray, "skill dim"], categories: Sequence[str | None]
) -> tuple[list[Category], Float32[np.ndarray, "category dim"]]:
    """The categories that some skills already have, by name, and the unit mean vector of the members of each."""
    names = sorted({name for name in categories if name is not None})
    means = np.zeros((len(names), skill_vectors.shape[1]), dtype=np.float32)
    for row, name in enumerate(names):
        means[row] = skill_vectors[[category == name for category in categories]].mean(axis=0)
    norms = np.linalg.norm(means, axis=1, keepdims=True)
    return [Category(name, "") for name in names], means / np.maximum(norms, 1e-12)
