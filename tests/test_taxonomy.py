from pathlib import Path

import numpy as np
import pytest

from skilltrain.data.pool.taxonomy import (
    DEFAULT_TAXONOMY,
    Category,
    assign_categories,
    load_taxonomy,
    mean_vectors,
)
from skilltrain.errors import SkilltrainError


def test_packaged_taxonomy_has_about_fifty_distinct_categories():
    taxonomy = load_taxonomy(DEFAULT_TAXONOMY)
    assert 45 <= len(taxonomy) <= 60
    assert len({category.description for category in taxonomy}) == len(taxonomy)
    assert all(len(category.description) > 40 for category in taxonomy)


def test_load_keeps_the_order(tmp_path: Path):
    file = tmp_path / "t.yaml"
    file.write_text("- name: b\n  description: Two\n    lines\n- name: a\n  description: One\n")
    assert load_taxonomy(file) == [
        Category(name="b", description="Two lines"), Category(name="a", description="One"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is a list of entries"),
        ("name: a", "is a list of entries"),
        ("- name: a\n", r"entry 1: missing key 'description'"),
        ("- name: a\n  description: x\n- b\n", "is a list of entries"),
        ("- name: a\n  description:\n", r"entry 1: description: must be"),
        ("- name: a\n  description: x\n- name: a\n  description: y\n", "category 'a' stands twice"),
        ("- name: a\n  description: ' '\n", r"entry 1: description: "),
        ("- name: a\n  description: x\n  more: y\n", r"entry 1: unknown key 'more'"),
        ("- name: a: b\n", "is not YAML"),
    ],
)
def test_wrong_taxonomies_name_the_entry(tmp_path: Path, text: str, message: str):
    file = tmp_path / "t.yaml"
    file.write_text(text)
    with pytest.raises(SkilltrainError, match=message):
        load_taxonomy(file)
    with pytest.raises(SkilltrainError, match="cannot read"):
        load_taxonomy(tmp_path / "none.yaml")


def test_nearest_category_by_hand():
    names = ["x", "y"]
    skills = np.array([[0.6, 0.8], [0.8, 0.6], [2**-0.5, 2**-0.5]], dtype=np.float32)
    assert assign_categories(skills, np.eye(2, dtype=np.float32), names) == ["y", "x", "x"]
    assert assign_categories(skills[:0], np.eye(2, dtype=np.float32), names) == []
    with pytest.raises(ValueError, match="1 category vectors for 2"):
        assign_categories(skills, np.eye(2, dtype=np.float32)[:1], names)


def test_categories_of_other_skills_are_unit_means_by_name():
    vectors = np.array([[1, 0], [0, 1], [0, 1], [0.6, 0.8]], dtype=np.float32)
    names, means = mean_vectors(vectors[:3], ["b", "b", "a"])
    assert names == ["a", "b"]
    np.testing.assert_allclose(means, [[0, 1], [2**-0.5, 2**-0.5]], rtol=1e-6)
    assert assign_categories(vectors[3:], means, names) == ["b"]  # 0.99 against 0.8
