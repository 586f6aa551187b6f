"""Chunks of skills: their windows, their scores and the window an encoder trains on."""

import json
import math
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from faults import raises
from skilltrain.config import validate
from skilltrain.data import filter_layers
from skilltrain.data.filter_layers import PAIR, CeilingLayer, FilterPool
from skilltrain.export.card import RunRecord, model_card
from skilltrain.losses import InfoNCE
from skilltrain.models.encoder import EncoderConfig, EncoderSettings, load_encoder
from skilltrain.models.saving import save_model
from skilltrain.records import Query, Skill
from skilltrain.retrieval.dense import DenseConfig, EncoderSource, open_encoder
from skilltrain.retrieval.nearest import ChunkVectors, starts_of
from skilltrain.tables import SKILLS, write_table
from skilltrain.templates import Chunks, EncoderTemplate, SkillTemplate
from skilltrain.training.dev import encoder_opener
from skilltrain.training.scores import ScoreContext, in_batch_negatives
from skilltrain.training.training_set import TrainingList, TrainingSet, on_best_windows
from skilltrain.workers import WorkersConfig
from small_library import succeeds
from test_dense import record_encoded_texts

TEN = SkillTemplate(body_chars=10)
SKILL = Skill("s", "n", "d", "0123456789abcdefghijABCD\n ")  # 24 characters and white space
LONG = Skill(
    "long", "clip", "find the clip", " ".join(f"task {n} deploy pods {n}" for n in range(8))
)
SHORT = Skill("short", "audio", "find the audio", "deploy data")


@pytest.mark.parametrize(
    ("chunks", "starts"),
    [
        ({}, [0]),
        ({"windows": 2}, [0, 10]),
        ({"windows": 9}, [0, 10, 20]),
        ({"windows": 9, "overlap": 3}, [0, 7, 14]),  # 14 to 24 is the end
        ({"windows": 3, "overlap": 4}, [0, 6, 12]),  # 18 would be the fourth
        ({"windows": 4, "overlap": 4}, [0, 6, 12, 18]),
    ],
)
def test_windows_by_hand(chunks, starts):
    body = SKILL.body.rstrip()

    windows = TEN.windows(SKILL, Chunks(**chunks))

    texts = [TEN.render(window) for window in windows]
    assert texts == [f"n | d | {body[start : start + 10]}" for start in starts]
    assert windows[0] == SKILL
    assert {window.skill_id for window in windows} == {"s"}


@pytest.mark.parametrize(
    ("template", "windows"),
    [
        (SkillTemplate(body_chars=24), 5),
        (SkillTemplate(body_chars=10, fields="nd"), 5),
        (SkillTemplate(body_chars=0), 1),
    ],
)
def test_short_or_hidden_body_has_one_window(template, windows):
    assert template.windows(SKILL, Chunks(windows=windows)) == [SKILL]


# The encoder --------------------------------------------------------------------------------------

FIFTY = {"template": EncoderTemplate(skill=SkillTemplate(description_chars=20, body_chars=50))}


def source(model_folders, **settings):
    return EncoderSource(
        source=str(model_folders["bert"]), precision="float32", **FIFTY, **settings
    )


@pytest.fixture
def one_window(model_folders, tmp_path):
    """An encoder of one window a skill, and the chunks that it encoded into the cache."""
    encoder = open_encoder(source(model_folders, cache=tmp_path))
    return encoder, encoder.encode_chunks([LONG, SHORT])


@pytest.fixture
def three_windows(one_window, model_folders, tmp_path):
    """An encoder of three windows a skill with the same cache."""
    chunks = {"windows": 3, "overlap": 10, "pool": "top2"}
    return open_encoder(source(model_folders, cache=tmp_path, chunks=chunks))


def test_one_window_gives_skill_vector(one_window):
    encoder, chunks = one_window

    np.testing.assert_array_equal(chunks.vectors, encoder.encode_skills([LONG, SHORT]))
    assert len(chunks.starts) - 1 == 2
    assert chunks.starts.tolist() == [0, 1, 2]


def test_first_window_comes_from_cache(three_windows, monkeypatch):
    texts = record_encoded_texts(three_windows, monkeypatch)

    chunks = three_windows.encode_chunks([LONG, SHORT])

    assert len(texts) == 2
    assert chunks.starts.tolist() == [0, 3, 4]
    assert chunks.pool == "top2"


def test_window_vector_is_that_of_its_text(three_windows):
    bodies = [LONG.body[start : start + 50] for start in (0, 40, 80)]
    windows = [Skill("x", LONG.name, LONG.description, body) for body in bodies]

    chunks = three_windows.encode_chunks([LONG, SHORT])

    vectors = three_windows.encode_skills(windows)
    np.testing.assert_allclose(chunks.vectors[:3], vectors, atol=1e-6)


@pytest.mark.parametrize("pool", ["max", "top2"])
def test_system_ranks_by_best_windows(model_folders, pool):
    config = DenseConfig(
        source=str(model_folders["bert"]),
        precision="float32",
        chunks=Chunks(windows=3, pool=pool),
        **FIFTY,
    )
    ranker = config.open({}).over({"long": LONG, "short": SHORT})
    query = Query("q", "deploy pods", "", "", "")
    query_vectors = ranker.index.encode([query.text])
    cosines = np.sort((query_vectors @ ranker.index.chunks.vectors.T)[0, :3])
    expected = cosines[-1] if pool == "max" else cosines[-2:].mean()

    ranking = ranker.rank([query], None, 2)["q"]

    assert dict(ranking)["long"] == pytest.approx(expected, abs=1e-6)
    candidates = {"q": [("short", 0.0), ("long", 0.0)]}
    assert ranker.rank([query], candidates, 2)["q"] == ranking


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"chunks": {"windows": 0}}, "invalid-setting"),
        ({"chunks": {"windows": 2, "pool": "mean"}}, "unknown-choice"),
        (FIFTY | {"chunks": {"windows": 2, "overlap": 50}}, "conflicting-settings"),
        ({"chunks": {"windows": 2}}, "conflicting-settings"),
    ],
)
def test_invalid_windows_are_refused(model_folders, settings, code):
    with raises(code) as error:
        config = validate(
            EncoderConfig, {"source": str(model_folders["bert"]), **settings}, "recipe"
        )
        load_encoder(config, torch.device("cpu"))

    assert "\n" not in str(error.value)


@pytest.fixture
def windowed_encoder(model_folders):
    """An encoder that reads three windows of a skill."""
    config = EncoderConfig(
        source=str(model_folders["bert"]), **FIFTY, chunks=Chunks(windows=3, overlap=5)
    )
    return load_encoder(config, torch.device("cpu"))


def test_saved_model_keeps_windows(windowed_encoder, tmp_path):
    save_model(windowed_encoder, tmp_path, base="owner/base")

    loaded = load_encoder(EncoderConfig(source=str(tmp_path)), torch.device("cpu"))

    assert loaded.settings == windowed_encoder.settings
    assert loaded.settings.chunks.windows == 3


def test_model_card_describes_windows(windowed_encoder):
    recipe = {"model": {"source": "owner/base"}}
    settings = windowed_encoder.settings
    plain = settings.model_copy(update={"chunks": Chunks()})

    card = model_card(RunRecord(settings, recipe, {}))

    assert "the first 50 characters of a body. skilltrain reads up to 3 such windows" in card
    assert "windows" not in model_card(RunRecord(plain, recipe, {}))


# Training -----------------------------------------------------------------------------------------

SETTINGS = EncoderSettings(
    template=EncoderTemplate(skill=SkillTemplate(body_chars=12)), chunks=Chunks(windows=3)
)
A = Skill("a", "pdf", "", "merge files.deploy pods.translate it")  # three windows of 12 characters
B = Skill("b", "clip", "", "audio video")
C = Skill("c", "", "", "table chart.deploy data.")
DATA = TrainingSet(
    (
        TrainingList("q1", "deploy the pods", ("a", "b"), (1.0, 0.0), frozenset("a")),
        TrainingList("q2", "translate a clip", ("b", "a"), (1.0, 0.0), frozenset("b")),
        TrainingList("q3", "nothing of this", ("c", "a"), (1.0, 0.0), frozenset("c")),
        TrainingList("q4", "deploy data", ("c", "b"), (1.0, 0.0), frozenset("c")),
    ),
    {"a": A, "b": B, "c": C},
    {"a": 7, "c": 7},
)


@pytest.fixture(scope="module")
def windowed_data():
    return on_best_windows(DATA, SETTINGS)


def test_lists_hold_best_window_by_bm25(windowed_data):
    keys = chain(*(training_list.skill_ids for training_list in windowed_data.lists))

    windows = [windowed_data.skills[key] for key in keys]

    assert [window.skill_id for window in windows] == [*"abbacacb"]
    assert [window.body[:12] for window in windows] == [
        *("deploy pods.", "audio video"),
        *("audio video", "translate it"),
        *("table chart.", "merge files."),  # no window has a word of it: the first
        *("deploy data.", "audio video"),
    ]


def test_best_windows_keep_gains(windowed_data):
    gains = [training_list.gains for training_list in windowed_data.lists]

    assert gains == [training_list.gains for training_list in DATA.lists]


def test_best_windows_are_reproducible(windowed_data):
    assert on_best_windows(DATA, SETTINGS) == windowed_data


def test_lists_without_windows_stay_as_they_are():
    assert on_best_windows(DATA, EncoderSettings()) is DATA


def test_other_window_of_positive_is_no_negative(windowed_data):
    lists = windowed_data.lists
    keys = sorted(set().union(*[training_list.skill_ids for training_list in lists]))
    skill_ids = [windowed_data.skills[key].skill_id for key in keys]
    context = ScoreContext.of(windowed_data, InfoNCE(), in_batch=True)

    negative = in_batch_negatives(lists, keys, context)

    assert skill_ids == ["a", "a", "a", "b", "c", "c"]
    # q1 has the positive a, q3 and q4 have c: a and c are one cluster. q2 has b; its own candidate
    # (the last window of a) is counted elsewhere.
    assert negative.tolist() == [
        [False, False, False, False, False, False],
        [True, True, False, False, True, True],
        [False, False, False, True, False, False],
        [False, False, False, False, False, False],
    ]


def test_model_in_training_ranks_by_best_windows(open_encoder_of):
    skills = {
        "a": Skill("a", "a", "d", "three words here"),
        "b": Skill("b", "b", "d", "one"),
    }
    template = EncoderTemplate(skill=SkillTemplate(body_chars=6))
    chunks = Chunks(windows=3, overlap=0, pool="top2")
    encoder = open_encoder_of("bert", template=template, chunks=chunks)
    vectors = torch.tensor([[1.0, 0], [0.5, 0], [0, 1], [1, 0], [0.625, 0]])
    queries = [Query("q", "find", "", "", "")]

    ranker = encoder_opener(encoder, queries, skills)(lambda inputs: vectors)

    assert ranker.rank(queries, None, 2) == {"q": [("a", 0.75), ("b", 0.625)]}


# The stages ---------------------------------------------------------------------------------------

TWO_WINDOWS = ChunkVectors(
    np.array([[0, 1], [1, 0], [0.6, 0.8], [0.8, 0.6]], np.float32), starts_of([2, 1, 1])
)
QUERY = np.array([[1, 0]], np.float32)


def test_mining_ranks_by_best_window():
    positions, scores = TWO_WINDOWS.nearest(QUERY, 3)

    assert positions.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(scores, [[1, 0.8, 0.6]], atol=1e-6)


def test_ceiling_is_by_best_window(monkeypatch):
    encoder = SimpleNamespace(
        encode_chunks=lambda skills: TWO_WINDOWS, encode_queries=lambda texts: QUERY
    )
    monkeypatch.setattr(filter_layers, "open_encoder", lambda _: encoder)
    # d is the known positive; c is in no list and has no vector.
    skills = [Skill(skill_id, "", "", "") for skill_id in "abcd"]
    pairs = np.array([(row, 0, row, 3, 1) for row in (0, 1)], dtype=PAIR)
    pool = FilterPool(skills, pairs, [], ["q"], EncoderSource(source="x"), None, WorkersConfig())

    scores = CeilingLayer(relative_margin=0.0).check(pool, pairs)

    np.testing.assert_allclose(scores, [1, np.nan], atol=1e-6)


def test_encode_stage_encodes_all_windows(model_folders, tmp_path):
    write_table([LONG, SHORT], SKILLS, tmp_path / "pool")
    encoder = source(model_folders, cache=tmp_path / "vectors", chunks={"windows": 9})
    recipe = {
        "stage": "encode",
        "pool": str(tmp_path / "pool"),
        "out": str(tmp_path / "out"),
        "encoder": encoder.model_dump(mode="json"),
    }
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")

    summary = json.loads(succeeds("encode", tmp_path / "recipe.yaml", "--json").out)

    num_chunks = math.ceil(len(LONG.body) / 50) + 1
    assert summary["num_chunks_encoded"] == summary["num_chunks"] == num_chunks
