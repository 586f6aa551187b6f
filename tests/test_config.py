"""Recipes: settings, overrides, YAML, and recipes that are based on another."""

import os
import runpy
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from faults import raises
from skilltrain.config import Config, InputPath, apply_overrides, load_recipe, to_yaml, validate
from skilltrain.errors import SkilltrainError
from skilltrain.runs import input_paths


class Small(Config):
    name: Literal["small"]
    width: int = Field(default=1, ge=1)


class Large(Config):
    name: Literal["large"]
    depth: float = 0.5
    large: bool = True  # a key that is also the section's tag


class Inner(Config):
    rate: float = Field(default=2e-5, gt=0)
    label: str = ""
    mode: Literal["fast", "exact"] = "fast"


class Section(Config):
    inner: Inner = Inner()
    source: InputPath | None = None


class Whole(Config):
    section: Section = Section()
    shape: Annotated[Small | Large, Field(discriminator="name")] = Small(name="small")
    shapes: tuple[Annotated[Small | Large, Field(discriminator="name")], ...] = ()
    weights: dict[str, float] = Field(default={})
    pieces: list[InputPath] = Field(default=[])
    out: Path = Path("out")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"section": {"inner": {"rat": 1}}},
            "unknown key 'section.inner.rat', did you mean 'rate'? allowed here: label, mode, rate",
        ),
        (
            {"zzz": 1},
            "unknown key 'zzz'; allowed here: out, pieces, section, shape, shapes, weights",
        ),
        (
            {"shape": {"name": "large", "large": False, "dept": 1}},
            "unknown key 'shape.dept', did you mean 'depth'? allowed here: depth, large, name",
        ),
        (
            {"shapes": [{"name": "small"}, {"name": "small", "colour": 1}]},
            "unknown key 'shapes.1.colour'; allowed here: name, width",
        ),
        (
            {"shape": {"name": "smal"}},
            "shape.name: unknown choice 'smal', did you mean 'small'? choose from large, small",
        ),
        (
            {"shapes": [{"name": "cube"}]},
            "shapes.0.name: unknown choice 'cube'; choose from large, small",
        ),
        (
            {"shapes": [{"name": "gpt-4.1"}]},  # no import path
            "shapes.0.name: unknown choice 'gpt-4.1'; choose from large, small",
        ),
        ({"shape": {"width": 2}}, "missing key 'shape.name': choose from large, small"),
        (
            {"shape": {"name": "small", "width": 0}},
            "shape.width: must be greater than or equal to 1, found 0",
        ),
        (
            {"section": {"inner": {"rate": "-2e-5"}}},
            "section.inner.rate: must be greater than 0, found '-2e-5'",
        ),
        (
            {"section": {"inner": {"rate": "fast"}}},
            "section.inner.rate: must be a valid number, unable to parse string as a number, "
            "found 'fast'",
        ),
        (
            {"section": {"inner": {"label": 3}}},
            "section.inner.label: must be a valid string, found 3",
        ),
        (
            {"section": {"inner": {"mode": "slow"}}},
            "section.inner.mode: must be 'fast' or 'exact', found 'slow'",
        ),
        ({"weights": None}, "weights: must be a valid dictionary, found null"),
        ({"section": 5}, "section: must be a section of keys (inner, source), found 5"),
        (
            {"section": {"inner": None}},
            "section.inner: must be a section of keys (label, mode, rate), found null",
        ),
        ({"out": None}, "out: must be a path, found null"),
        ({"out": 2024}, "out: must be a path, found 2024 (write it in quotes)"),
        *(
            (
                {"section": {"inner": {"rate": value}}},
                f"section.inner.rate: must be a finite number, found {value!r}",
            )
            for value in (float("inf"), "1e400", float("nan"))
        ),
        (
            # unknown keys come first
            {"section": {"inner": {"rate": -1, "mode": "slow", "labels": ""}}},
            "unknown key 'section.inner.labels', did you mean 'label'? allowed here: label, mode, "
            "rate; 2 more",
        ),
        (
            {"weights": {"a": "b"}},
            "weights.a: must be a valid number, unable to parse string as a number, found 'b'",
        ),
    ],
)
def test_invalid_setting_names_key(values, message):
    with pytest.raises(SkilltrainError) as error:
        validate(Whole, values, "recipe.yaml")

    assert str(error.value) == f"recipe.yaml: {message}"


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("section.inner.rate=2e-5", {"section": {"inner": {"rate": "2e-5", "label": "x"}}}),
        ("a=[1, 2]", {"a": [1, 2]}),
        ("a=", {"a": None}),
        ("a=null", {"a": None}),
        ("a=b=c", {"a": "b=c"}),
        ("new.key=yes please", {"new": {"key": "yes please"}}),
        ("a=2024-06-01", {"a": "2024-06-01"}),
        ("a=*.jsonl", {"a": "*.jsonl"}),
        ("section.inner={rate: 1}", {"section": {"inner": {"rate": 1}}}),
    ],
)
def test_overrides(override, changed):
    values = {"section": {"inner": {"label": "x"}}, "a": 1}

    assert apply_overrides(values, [override]) == values | changed
    assert values == {"section": {"inner": {"label": "x"}}, "a": 1}


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        *(
            (malformed, "an override has the form key=value")
            for malformed in ("a", "=1", ".a=1", "a..b=1", "a.=1")
        ),
        ("a.b=1", r"^a\.b=1: 'a' is a value, not a section$"),
        (
            "a=[1, 2",
            r"^a=\[1, 2, line 1: is not YAML.* "
            r"\(write text with special characters in quotes: a='\"…\"'\)$",
        ),
    ],
)
def test_malformed_override_is_refused(override, fault):
    with pytest.raises(SkilltrainError, match=fault):
        apply_overrides({"a": 1}, [override])


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# Nine levels of aliases, each of which repeats the level before nine times.
_LEVELS = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]" for level in range(1, 9)]
NESTED_ALIASES = "\n".join([f"a0: &a0 [{', '.join('x' * 9)}]", *_LEVELS])


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        *(
            (text, ", line 1: is not YAML")
            for text in ("a: b: c\n", "? [1]\n: 2\n", "a: !!python/object:os.system x\n")
        ),
        *(
            (text, "is not YAML")
            for text in ("a: [1\n", "a: @b\n", "a: 0b_\n", f"a: {'[' * 5000}\n")
        ),
        *(
            (text, "a recipe is a map of keys to values")
            for text in ("", "just words\n", "- 1\n- 2\n")
        ),
        (
            "a: 1\nb:\n  c: 1\n  d: 2\n  c: 3\n",
            r"recipe\.yaml: key 'c' appears twice \(again on line 5\)",
        ),
        *(
            (text, rf"or an alias stands inside its own anchor \(line {line}\)")
            for text, line in (
                ("a: 1\nb: &b [*b]\n", 2),
                ("a: &a {b: {c: *a}}\n", 1),
                (NESTED_ALIASES, 6),
            )
        ),
        ("based_on: missing.yaml\nout: o\n", "cannot read the recipe"),
        ("based_on: recipe.yaml\nout: o\n", "is based on a recipe that is based on another"),
    ],
    ids=repr,
)
def test_recipe_must_be_map_of_values(tmp_path, text, fault):
    with pytest.raises(SkilltrainError, match=fault):
        load_recipe(write(tmp_path, text))


def test_missing_recipe_is_refused(tmp_path):
    with raises("unreadable-file"):
        load_recipe(tmp_path / "none.yaml")


def test_binary_recipe_is_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x81")

    with raises("unreadable-file"):
        load_recipe(tmp_path / "binary.yaml")


def test_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")

    with raises("special-file"):
        load_recipe(tmp_path / "pipe.yaml")


@pytest.fixture
def self_running_recipe(tmp_path):
    text = "out: here  # a comment\nx: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n"
    return write(tmp_path, f'recipe: r"""\n{text}# """; ran = __name__\n')


def test_recipe_that_runs_itself_is_yaml(self_running_recipe):
    values = load_recipe(self_running_recipe, ["out=there"])

    assert values == {"out": "there", "x": {"a": 1, "b": 2}, "y": {"a": 1, "b": 3}}


def test_recipe_that_runs_itself_is_python(self_running_recipe):
    assert runpy.run_path(str(self_running_recipe))["ran"] == "<run_path>"


texts = st.text(max_size=20)
shapes = st.one_of(
    st.builds(Small, name=st.just("small"), width=st.integers(1, 10**9)),
    st.builds(Large, name=st.just("large"), depth=st.floats(allow_nan=False, allow_infinity=False)),
)
paths = st.text(st.characters(blacklist_categories=["Cs", "Cc"]), min_size=1, max_size=12).map(Path)
wholes = st.builds(
    Whole,
    section=st.builds(
        Section,
        inner=st.builds(
            Inner,
            rate=st.floats(1e-300, 1e300),
            label=texts,
            mode=st.sampled_from(["fast", "exact"]),
        ),
        source=st.none() | paths,
    ),
    shape=shapes,
    shapes=st.lists(shapes, max_size=3).map(tuple),
    weights=st.dictionaries(texts, st.floats(allow_nan=False, allow_infinity=False), max_size=3),
    pieces=st.lists(paths, max_size=2),
    out=paths,
)


@given(wholes)
def test_written_yaml_gives_same_settings(tmp_path_factory, config):
    path = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    path.write_text(to_yaml(config), encoding="utf-8")

    assert validate(Whole, load_recipe(path), path) == config


def test_input_paths_are_found_at_any_depth():
    config = Whole(section=Section(source=Path("s")), pieces=[Path("x"), Path("y")])

    assert input_paths(config) == {
        "section.source": Path("s"),
        "pieces.0": Path("x"),
        "pieces.1": Path("y"),
    }
    assert input_paths(Whole()) == {}


# Recipes that are based on another ----------------------------------------------------------------


def test_recipe_changes_its_base(tmp_path):
    (tmp_path / "paper").mkdir()
    (tmp_path / "base.yaml").write_text(
        "stage: x\nmodel: {source: a, template: {cap: 1}}\nlayers: [1, 2]\nout: o\n"
    )
    file = tmp_path / "paper" / "over.yaml"
    file.write_text("based_on: ../base.yaml\nmodel: {template: {cap: null, new: 2}}\nlayers: [3]\n")

    values = load_recipe(file)

    assert values == {
        "stage": "x",
        "model": {"source": "a", "template": {"cap": None, "new": 2}},
        "layers": [3],
        "out": "o",
    }
    assert load_recipe(file, ["model.source=b"])["model"]["source"] == "b"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"section": {"inner": {"old_key": 1}}},
            "unknown key 'section.inner.old_key' (removed: use rate)",
        ),
        ({"section": {"inner": {"mode": "old_mode"}}}, "found 'old_mode' (removed: use exact)"),
        ({"shape": {"name": "old_shape"}}, "unknown choice 'old_shape' (removed: use small)"),
    ],
)
def test_removed_name_says_its_replacement(monkeypatch, values, message):
    removed = {"old_key": "use rate", "old_mode": "use exact", "old_shape": "use small"}
    monkeypatch.setattr("skilltrain.config.REMOVED", removed)

    with pytest.raises(SkilltrainError) as caught:
        validate(Whole, values, "recipe.yaml")

    assert message in str(caught.value)
