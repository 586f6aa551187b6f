"""Skills as several chunks: their windows, their scores, and the window that an encoder is trained on."""

import json
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
from test_dense import counted

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
    windows = TEN.windows(SKILL, Chunks(**chunks))

    assert [TEN.render(window) for window in windows] == [
        f"n | d | {SKILL.body.rstrip()[s : s + 10]}" for s in starts
    ]
    assert windows[0] == SKILL
    assert {window.skill_id for window in windows} == {"s"}


def test_one_window_is_all_where_the_body_is_short_or_not_seen():
    many = Chunks(windows=5)

    assert SkillTemplate(body_chars=24).windows(SKILL, many) == [SKILL]
    assert TEN.model_copy(update={"fields": "nd"}).windows(SKILL, many) == [SKILL]
    assert SkillTemplate(body_chars=0).windows(SKILL, Chunks()) == [SKILL]


# The encoder --------------------------------------------------------------------------------------

FIFTY = {"template": EncoderTemplate(skill=SkillTemplate(description_chars=20, body_chars=50))}


def source(model_folders, **settings):
    return EncoderSource(
        source=str(model_folders["bert"]), precision="float32", **FIFTY, **settings
    )


def test_one_window_is_a_skills_vector_and_more_take_it_from_the_cache(
    model_folders, tmp_path, monkeypatch
):
    encoder = open_encoder(source(model_folders, cache=tmp_path))
    chunks = encoder.encode_chunks([LONG, SHORT])

    np.testing.assert_array_equal(chunks.vectors, encoder.encode_skills([LONG, SHORT]))
    assert chunks.is_one_each
    assert chunks.starts.tolist() == [0, 1, 2]

    encoder = open_encoder(
        source(model_folders, cache=tmp_path, chunks={"windows": 3, "overlap": 10, "pool": "top2"})
    )
    seen = counted(encoder, monkeypatch)
    chunks = encoder.encode_chunks([LONG, SHORT])

    assert len(seen) == 2
    assert chunks.starts.tolist() == [0, 3, 4]
    assert chunks.pool == "top2"

    alone = [
        Skill("x", "clip", "find the clip", LONG.body[start : start + 50]) for start in (0, 40, 80)
    ]

    np.testing.assert_allclose(chunks.vectors[:3], encoder.encode_skills(alone), atol=1e-6)


@pytest.mark.parametrize("pool", ["max", "top2"])
def test_a_system_ranks_by_the_best_windows(model_folders, pool):
    settings = {"source": str(model_folders["bert"]), "precision": "float32", **FIFTY}
    chunks = Chunks(windows=3, pool=pool)
    ranker = DenseConfig(**settings, chunks=chunks).open({}).over({"long": LONG, "short": SHORT})
    query = Query("q", "deploy pods", "", "", "")
    cosines = np.sort((ranker.index.encode([query.text]) @ ranker.index.chunks.vectors.T)[0, :3])
    long = cosines[-1] if pool == "max" else cosines[-2:].mean()

    found = ranker.rank([query], None, 2)["q"]

    assert dict(found)["long"] == pytest.approx(long, abs=1e-6)
    assert ranker.rank([query], {"q": [("short", 0.0), ("long", 0.0)]}, 2)["q"] == found


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"chunks": {"windows": 0}}, "invalid-setting"),
        ({"chunks": {"windows": 2, "pool": "mean"}}, "unknown-choice"),
        (FIFTY | {"chunks": {"windows": 2, "overlap": 50}}, "conflicting-settings"),
        ({"chunks": {"windows": 2}}, "conflicting-settings"),
    ],
)
def test_windows_that_make_no_sense_are_one_line(model_folders, settings, code):
    with raises(code) as error:
        config = validate(
            EncoderConfig, {"source": str(model_folders["bert"]), **settings}, "recipe"
        )
        load_encoder(config, torch.device("cpu"))
    assert "\n" not in str(error.value)


def test_a_saved_model_keeps_its_windows_and_its_card_tells_them(model_folders, tmp_path):
    given = EncoderConfig(
        source=str(model_folders["bert"]), **FIFTY, chunks=Chunks(windows=3, overlap=5)
    )
    encoder = load_encoder(given, torch.device("cpu"))
    save_model(encoder, tmp_path, base="owner/base")

    again = load_encoder(EncoderConfig(source=str(tmp_path)), torch.device("cpu"))

    assert again.settings == encoder.settings
    assert again.settings.chunks.windows == 3

    card = model_card(RunRecord(encoder.settings, {"model": {"source": "owner/base"}}, {}))

    assert "the first 50 characters of a body. skilltrain reads up to 3 such windows" in card

    plain = encoder.settings.model_copy(update={"chunks": Chunks()})

    assert "windows" not in model_card(RunRecord(plain, {"model": {"source": "owner/base"}}, {}))


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


def test_lists_name_the_window_that_bm25_likes_best():
    data = on_best_windows(DATA, SETTINGS)
    shown = [[data.skills[key].body[:12] for key in one.skill_ids] for one in data.lists]

    assert shown == [
        ["deploy pods.", "audio video"],
        ["audio video", "translate it"],
        ["table chart.", "merge files."],  # no window has a word of it: the first
        ["deploy data.", "audio video"],
    ]
    assert [data.skills[key].skill_id for one in data.lists for key in one.skill_ids] == [
        *"abbacacb"
    ]
    assert [one.gains for one in data.lists] == [one.gains for one in DATA.lists]
    assert on_best_windows(DATA, SETTINGS) == data
    assert on_best_windows(DATA, EncoderSettings()) is DATA


def test_another_window_of_a_query_s_skill_is_no_negative():
    data = on_best_windows(DATA, SETTINGS)
    keys = sorted({key for one in data.lists for key in one.skill_ids})

    assert [data.skills[key].skill_id for key in keys] == ["a", "a", "a", "b", "c", "c"]

    negative = in_batch_negatives(data.lists, keys, ScoreContext.of(data, InfoNCE(), in_batch=True))

    # q1 wants a, q3 and q4 want c: the two are one cluster. q2 wants b; its own candidate (a's last) is told elsewhere.
    assert negative.tolist() == [
        [False, False, False, False, False, False],
        [True, True, False, False, True, True],
        [False, False, False, True, False, False],
        [False, False, False, False, False, False],
    ]


def test_the_model_in_training_ranks_by_the_best_windows(open_encoder_of):
    skills = [Skill("a", "a", "d", "three words here"), Skill("b", "b", "d", "one")]
    template = EncoderTemplate(skill=SkillTemplate(body_chars=6))
    encoder = open_encoder_of(
        "bert", template=template, chunks=Chunks(windows=3, overlap=0, pool="top2")
    )
    vectors = torch.tensor([[1.0, 0], [0.5, 0], [0, 1], [1, 0], [0.625, 0]])
    by_id = {skill.skill_id: skill for skill in skills}
    open_own = encoder_opener(encoder, [Query("q", "find", "", "", "")], by_id)

    own = open_own(lambda inputs: vectors)

    assert own.rank([Query("q", "find", "", "", "")], None, 2) == {"q": [("a", 0.75), ("b", 0.625)]}


# The stages ---------------------------------------------------------------------------------------

TWO_WINDOWS = ChunkVectors(
    np.array([[0, 1], [1, 0], [0.6, 0.8], [0.8, 0.6]], np.float32), starts_of([2, 1, 1])
)
QUERY = np.array([[1, 0]], np.float32)


def test_mining_ranks_by_the_best_window():
    positions, scores = TWO_WINDOWS.nearest(QUERY, 3)

    assert positions.tolist() == [[0, 2, 1]]
    np.testing.assert_allclose(scores, [[1, 0.8, 0.6]], atol=1e-6)


def test_a_ceiling_is_by_the_best_window(monkeypatch):
    known = SimpleNamespace(
        encode_chunks=lambda skills: TWO_WINDOWS, encode_queries=lambda texts: QUERY
    )
    monkeypatch.setattr(filter_layers, "open_encoder", lambda _: known)
    skills = [
        Skill(skill_id, "", "", "") for skill_id in "abcd"
    ]  # c is in no list, and has no vector
    pairs = np.array([(row, 0, row, 3, 1) for row in (0, 1)], dtype=PAIR)

    pool = FilterPool(skills, pairs, [], ["q"], EncoderSource(source="x"), None, WorkersConfig())

    np.testing.assert_allclose(
        CeilingLayer(relative_margin=0.0).check(pool, pairs), [1, np.nan], atol=1e-6
    )


def test_the_stage_encode_encodes_all_windows(model_folders, tmp_path):
    write_table([LONG, SHORT], SKILLS, tmp_path / "pool")
    encoder = source(model_folders, cache=tmp_path / "vectors", chunks={"windows": 9})
    recipe = {"stage": "encode", "pool": str(tmp_path / "pool"), "out": str(tmp_path / "out")}
    recipe["encoder"] = encoder.model_dump(mode="json")
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    summary = json.loads(succeeds("encode", tmp_path / "recipe.yaml", "--json").out)

    num_chunks = -(-len(LONG.body) // 50) + 1

    assert summary["num_chunks_encoded"] == summary["num_chunks"] == num_chunks
