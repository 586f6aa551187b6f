"""Recipes use rankers of other packages by import path or entry point."""

import json
import sys
from pathlib import Path

import pytest

from benchmark_folders import write_ours, write_pool
from skilltrain.config import validate
from skilltrain.errors import SkilltrainError
from skilltrain.plugins import plugin_paths
from skilltrain.records import Skill
from skilltrain.retrieval.cascade import SystemConfig
from skilltrain.retrieval.rankers import flatten_rankers
from small_library import skilltrain, succeeds

MODULE = '''
"""Ranks skills by the length of their bodies."""

from skilltrain.retrieval.rankers import Keep, RankerConfig


class ByLength(RankerConfig):
    kind: str
    longest_first: bool = True
    keep: Keep = None

    def open(self, opened):
        return self

    def over(self, skills):
        return Ranker(self, skills)


class Ranker:
    def __init__(self, config, skills):
        self.config = config
        self.lengths = {skill_id: len(skill.body) for skill_id, skill in skills.items()}

    def rank(self, queries, candidates, keep):
        sign = 1.0 if self.config.longest_first else -1.0
        pairs = [(skill_id, sign * length) for skill_id, length in self.lengths.items()]
        best = sorted(pairs, key=lambda pair: -pair[1])[:keep]
        return {query.query_id: best for query in queries}
'''
SKILLS = [Skill(f"s{number}", "pdf", "fill a form", "x" * number) for number in range(1, 6)]


@pytest.fixture
def by_length(tmp_path, monkeypatch) -> str:
    """The import path of a ranker that lies in a module on sys.path."""
    (tmp_path / "length_ranker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield "length_ranker:ByLength"
    sys.modules.pop("length_ranker", None)


def evaluate(folder: Path, ranker: str) -> list[str]:
    """The arguments of an evaluation of one ranker over five skills."""
    write_pool(folder / "pool", SKILLS)
    write_ours(folder / "queries", [("q1", "fill a form", "test")], {"q1": {"s5": "required"}})
    systems = f"[{{name: outside, rankers: [{ranker}]}}]"
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"stage: evaluate\npool: {folder}/pool\nbenchmark: {folder}/queries\n"
        f"systems: {systems}\nout: {folder}/report\n"
    )
    return ["evaluate", str(recipe)]


def test_ranker_of_another_package_is_evaluated(tmp_path, by_length):
    arguments = evaluate(tmp_path, f"{{kind: '{by_length}'}}")

    succeeds(*arguments)

    metrics = json.loads((tmp_path / "report" / "metrics.json").read_text())
    assert "outside" in json.dumps(metrics)
    recipe = (tmp_path / "report" / "recipe.yaml").read_text()
    assert f"- kind: {by_length}\n    longest_first: true\n    keep: null\n" in recipe


@pytest.mark.parametrize(
    ("ranker", "fault"),
    [
        (
            "{kind: 'nowhere:Ranker'}",
            "cannot import nowhere:Ranker: ModuleNotFoundError: ",
        ),
        ("{kind: 'length_ranker:Absent'}", "module 'length_ranker' has no attribute 'Absent'"),
        ("{kind: 'length_ranker:Ranker'}", "no subclass of skilltrain.retrieval.rankers.Ranker"),
        (
            "{kind: 'length_ranker:ByLength', longest: true}",
            "unknown key 'systems.0.rankers.0.longest', did you mean 'longest_first'? "
            "allowed here: keep, kind, longest_first",
        ),
    ],
)
def test_faulty_plugin_is_refused_in_one_line(tmp_path, by_length, ranker, fault):
    arguments = evaluate(tmp_path, ranker)

    outcome = skilltrain(*arguments)

    assert fault in outcome.only_line


def test_leg_of_fuse_may_come_from_outside(by_length):
    legs = [{"kind": "lexical"}, {"kind": by_length, "longest_first": False}]

    system = validate(SystemConfig, {"name": "x", "rankers": [{"kind": "fuse", "of": legs}]}, "")

    kinds = [ranker.kind for ranker in flatten_rankers(system.rankers)]
    assert kinds == ["fuse", "lexical", by_length]


def test_ranker_that_only_chooses_is_no_leg():
    values = {"name": "x", "rankers": [{"kind": "fuse", "of": [{"kind": "select"}]}]}

    with pytest.raises(SkilltrainError) as caught:
        validate(SystemConfig, values, "recipe")

    choices = "choose from api, dense, late, lexical, rerank, saved"
    assert f"unknown choice 'select'; {choices}" in caught.value.problem


def test_schema_lists_the_settings_of_all_rankers():
    schema = json.dumps(json.loads(succeeds("recipes", "schema", "evaluate").out))

    for kind in plugin_paths("ranker"):
        assert f'"const": "{kind}"' in schema
    assert '"token_budget"' in schema
    assert '"specificity"' in schema
