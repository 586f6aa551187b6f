"""What a skill is for: a list of functional categories, and the nearest one for each skill."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import Float32
from pydantic import AfterValidator, Field

from skilltrain.config import Config, parse_yaml, validate
from skilltrain.errors import SkilltrainError

DEFAULT_TAXONOMY = Path(__file__).with_name("taxonomy.yaml")


Line = Annotated[str, AfterValidator(lambda text: " ".join(text.split())), Field(pattern=r"\S")]


class Category(Config):
    """One functional category; the description says what its skills do, in the words they would use."""

    name: Line
    description: Line


def load_taxonomy(path: Path) -> list[Category]:
    """The categories of a YAML file, a list of `- name: …` with `description: …`, in its order.

    Raises SkilltrainError naming the entry that is not of this form or whose name stands twice.
    """
    try:
        entries = parse_yaml(path.read_text(encoding="utf-8-sig"), path)
    except (OSError, UnicodeDecodeError) as error:
        raise SkilltrainError(f"cannot read the taxonomy: {error}", where=path) from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise SkilltrainError("a taxonomy is a list of entries with name and description", where=path)
    categories = [validate(Category, entry, f"{path}, entry {number}") for number, entry in enumerate(entries, 1)]
    for name, count in Counter(category.name for category in categories).items():
        if count > 1:
            raise SkilltrainError(f"category '{name}' stands twice", where=path)
    return categories


def assign_categories(
    skill_vectors: Float32[np.ndarray, "skill dim"],
    category_vectors: Float32[np.ndarray, "category dim"],
    names: Sequence[str],
) -> list[str]:
    """The name of the nearest category for each skill, by inner product; ties go to the earlier category."""
    if len(category_vectors) != len(names) or not names:
        raise ValueError(f"{len(category_vectors)} category vectors for {len(names)} categories")
    nearest: list[int] = (skill_vectors @ category_vectors.T).argmax(axis=1).tolist()
    return [names[place] for place in nearest]


def mean_vectors(
    vectors: Float32[np.ndarray, "skill dim"], names: Sequence[str]
) -> tuple[list[str], Float32[np.ndarray, "category dim"]]:
    """The categories that skills already have, in order of name, and the unit mean vector of the members of each."""
    categories = sorted(set(names))
    place = {name: number for number, name in enumerate(categories)}
    sums = np.zeros((len(categories), vectors.shape[1]))
    np.add.at(sums, [place[name] for name in names], vectors)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return categories, (sums / np.maximum(norms, 1e-12)).astype(np.float32)
