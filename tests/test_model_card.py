"""Model cards: their programs, their numbers, and that they do not reveal the machine."""

import json
import re
import shlex

import numpy as np
import pytest
import torch
import yaml

from faults import raises
from skilltrain.export.card import Published, RunRecord, model_card, rename_model
from skilltrain.files import shareable
from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.pairs import RerankerSettings
from skilltrain.models.saving import save_model
from skilltrain.records import Skill
from skilltrain.templates import EncoderTemplate, RerankerTemplate, SkillTemplate
from small_library import succeeds
from tiny_models import save_bert

QUERY = "Fill in the tax form and sign it"
SKILLS = [
    Skill("1", "pdf-forms", "Fill in PDF forms", "Read the form's fields, then write the values."),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
]
SUMMARY = {
    "num_lists": 32283,
    "num_skills": 51234,
    "num_pairs": 645660,
    "num_positives": 37979,
    "num_parameters": 595776512,
    "num_steps": 2018,
    "num_tokens": 123456789,
    "seconds": 3725.4,
    "last_loss": 0.41237,
    "checkpoint": "step-1900",
    "dev": {"MRR@10": {"mean": 0.6914, "low": 0.6203, "high": 0.7588, "n": 120}},
}


def run_program(card, folder, monkeypatch):
    """Run the programs of a model's card in the model's folder; return the scores of the last."""
    monkeypatch.chdir(folder)
    variables = {}
    for program in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        exec(program, variables)
    return np.asarray(variables["scores"])


def record(settings, **facts):
    recipe = {"model": {"source": "owner/base"}} | facts.pop("recipe", {})
    return RunRecord(**{"settings": settings, "recipe": recipe, "summary": {}} | facts)


def front_matter(card):
    return yaml.safe_load(card.split("---")[1])


CUT = SkillTemplate(description_chars=12, body_chars=20, separator=" \n| ")


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("bert", EncoderTemplate(query_prompt="query: ", skill_prompt="passage: ")),
        ("qwen3", EncoderTemplate(instruction="Find", query_chars=15, skill=CUT)),
        (
            "bert_reranker",
            RerankerTemplate(query_chars=9, skill=SkillTemplate(fields="description")),
        ),
        (
            "qwen3_reranker",
            RerankerTemplate(form="yes_no", skill=SkillTemplate(fields="nd", description_chars=7)),
        ),
        (
            "qwen3_reranker",
            RerankerTemplate(form="yes_no", skill=SkillTemplate(labelled=True, separator="\n")),
        ),
    ],
)
def test_program_gives_our_scores(
    tmp_path, open_encoder_of, open_reranker_of, monkeypatch, name, template
):
    is_encoder = isinstance(template, EncoderTemplate)
    model = (open_encoder_of if is_encoder else open_reranker_of)(name, template=template)
    save_model(model, tmp_path, base=name, card=model_card(record(model.settings)))
    with torch.inference_mode():
        if is_encoder:
            texts = [template.render_skill(skill) for skill in SKILLS]
            vectors = model(model.tokenize(texts, model.settings.max_tokens))
            expected = (model(model.tokenize_queries([QUERY])) @ vectors.T)[0]
        else:
            expected = model(model.tokenize(QUERY, SKILLS))

    scores = run_program(
        (tmp_path / "README.md").read_text(encoding="utf-8"), tmp_path, monkeypatch
    )

    assert np.allclose(scores, expected.numpy(), atol=1e-5)


def test_encoder_card_shows_the_run():
    recipe = {"loss": {"name": "infonce"}}

    card = model_card(record(EncoderSettings(), recipe=recipe, summary=SUMMARY))

    front = front_matter(card)
    assert front["library_name"] == "sentence-transformers"
    assert front["base_model"] == "owner/base"
    assert front["pipeline_tag"] == "sentence-similarity"
    assert "agent-skills" in front["tags"]
    for line in (
        "| lists | 32,283 |",
        "| skills | 51,234 |",
        "| positives | 37,979 |",
        "| steps | 2,018 |",
        "| tokens | 123,456,789 |",
        "| seconds | 3,725 |",
        "| last loss | 0.4124 |",
        "| checkpoint | step-1900 |",
        "| development queries | **this model** | MRR@10 | 0.691 | 0.620 to 0.759 | 120 |",
        "loss:\n  name: infonce\n",
        "untrusted text",
        '--encoder "."',
    ):
        assert line in card


def test_card_states_facts(open_encoder_of):
    template = EncoderTemplate(instruction="Find skills", skill_prompt="passage: ")
    model = open_encoder_of("bert", template=template)

    card = model_card(record(model.settings, model=model))

    num_parameters = f"{model.network.num_parameters():,}"
    for line in (
        f"| architecture | BertModel, {num_parameters} parameters |",
        f"| vectors | one per text, {model.dim} dimensions, of length 1 |",
        "| similarity | cosine |",
        f"| pooling | {model.settings.pooling} |",
        "tokens of a skill, ",
        "| text before a query | `Instruct: Find skills\\nQuery:` |",
        "| text before a skill | `passage: ` |",
        "| fields of a skill | name, description, body |",
    ):
        assert line in card


def test_card_states_versions_and_machine(tmp_path):
    provenance = {"skilltrain": "1", "torch": "2", "transformers": "5", "python": "3.11"}
    provenance |= {"device": "H100 | SXM", "num_processes": 2}
    (tmp_path / "run.json").write_text(json.dumps({"provenance": provenance}))

    card = model_card(record(EncoderSettings(), run=tmp_path))

    assert "| trained with | skilltrain 1, torch 2, transformers 5, Python 3.11 |" in card
    assert "| trained on | H100 \\| SXM, 2 processes |" in card


def test_card_shows_server_requests():
    settings = EncoderSettings(template=EncoderTemplate(instruction="Find it's\nbest"))

    card = model_card(record(settings), Published("our-team/x"))

    requests = [json.loads(text) for text in re.findall(r"-d '(.*)'", card)]
    assert requests == [
        {"model": "our-team/x", "input": [f"{settings.template.query_prefix()}{QUERY}"]},
        {"inputs": [QUERY], "prompt_name": "query"},
    ]
    assert 'vllm serve "our-team/x"' in card
    assert 'text-embeddings-router --model-id "our-team/x"' in card


def test_card_warns_of_servers_without_bidirectional_attention():
    card = model_card(record(EncoderSettings(bidirectional=True)))

    assert "`is_causal: false`" in card
    assert "is_causal" not in model_card(record(EncoderSettings()))
    assert "first.\n\n```bash\nvllm serve" in card


def test_server_adds_no_empty_prompt():
    card = model_card(record(EncoderSettings()))

    assert "prompt_name" not in card
    assert f'"inputs": ["{QUERY}"]' in card


def test_card_says_how_model_was_trained():
    recipe = {"adapter": {"rank": 8}, "late_interaction": {"weight": 1.0}}

    card = model_card(record(EncoderSettings(), recipe=recipe))

    assert {"lora", "late-interaction"} <= set(front_matter(card)["tags"])
    assert "also trained for late interaction" in card
    assert "late interaction" not in model_card(record(EncoderSettings()))


@pytest.mark.parametrize(
    ("settings", "facts", "is_served"),
    [
        (EncoderSettings(), {}, True),
        (EncoderSettings(), {"form": "multi_vector"}, False),
        (RerankerSettings(), {}, True),
        (RerankerSettings(template=RerankerTemplate(form="yes_no")), {}, False),
    ],
)
def test_card_marks_commands_of_servers(settings, facts, is_served):
    card = model_card(record(settings, **facts))

    assert ("text-embeddings-inference" in front_matter(card)["tags"]) is is_served
    assert ("text-embeddings-router" in card) is is_served
    assert ("were not run with this model" in card) is is_served


def test_model_with_code_is_not_for_tei():
    recipe = {"model": {"source": "owner/base", "trust_remote_code": True}}

    card = model_card(record(EncoderSettings(), recipe=recipe))

    assert "text-embeddings-inference" not in front_matter(card)["tags"]


def test_card_of_onnx_form_has_its_tag():
    assert "onnx" in front_matter(model_card(record(EncoderSettings(), form="onnx")))["tags"]
    assert "onnx" not in front_matter(model_card(record(EncoderSettings())))["tags"]


@pytest.mark.parametrize("name", ["bert", "bert_reranker"])
def test_route_command_of_card_runs(tmp_path, open_encoder_of, open_reranker_of, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    skill = {"name": "pdf-forms", "description": "Fill in a tax form", "body": "Read the form."}
    (tmp_path / "pool.jsonl").write_text(json.dumps(skill))
    model = (open_encoder_of if name == "bert" else open_reranker_of)(name)
    card = model_card(record(model.settings))
    save_model(model, tmp_path / "model", base=name, card=card)
    (command,) = re.findall(r"^skilltrain (route .*)$", card, re.MULTILINE)

    monkeypatch.chdir(tmp_path / "model")
    arguments = shlex.split(command.replace("POOL", str(tmp_path / "pool.jsonl")))

    assert "pdf-forms" in succeeds(*arguments).out


def test_revision_of_base_is_left_out():
    recipe = {"model": {"source": "owner/base@v2"}}

    card = model_card(record(EncoderSettings(), recipe=recipe))

    assert front_matter(card)["base_model"] == "owner/base"
    assert "from owner/base@v2" in card


def test_base_model_may_be_given(tmp_path, monkeypatch):
    base = save_bert(tmp_path / "first", reranker=False)
    (tmp_path / "owner" / "minilm").mkdir(parents=True)  # a local folder of the same name
    monkeypatch.chdir(tmp_path)
    published = Published(base_model="owner/minilm")

    card = model_card(record(EncoderSettings(), recipe={"model": {"source": str(base)}}), published)

    assert front_matter(card)["base_model"] == "owner/minilm"
    assert "# Agent skill encoder, from owner/minilm" in card
    with raises("invalid-repository"):
        Published(base_model="minilm")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Apache 2.0", "apache-2.0"),
        ("Apache-2.0", "apache-2.0"),
        ("MIT", "mit"),
        ("CC BY 4.0", "cc-by-4.0"),
        ("GPL 3.0", "gpl-3.0"),
    ],
)
def test_license_that_the_hub_refuses(name, nearest):
    with raises("invalid-license") as caught:
        Published(license=name)

    assert f"the nearest id is {nearest};" in str(caught.value)


def test_the_template_is_filled_in():
    card = model_card(record(RerankerSettings(), summary=SUMMARY, form="onnx"))

    prose = re.sub(r"```.*?```", "code", card, flags=re.DOTALL)

    assert "{" not in prose
    assert "\n\n\n" not in prose


def test_checkpoint_card_shows_no_results():
    card = model_card(record(RerankerSettings(), exported="step-40"))

    front = front_matter(card)
    assert front["pipeline_tag"] == "text-ranking"
    assert "cross-encoder" in front["tags"]
    assert "weights of checkpoint `step-40`" in card
    assert "Not evaluated" in card
    assert '--reranker "."' in card


def test_local_base_is_named_by_its_last_part(tmp_path):
    base = save_bert(tmp_path / "somebody" / "first", reranker=False)

    card = model_card(record(EncoderSettings(), recipe={"model": {"source": str(base)}}))

    assert "base_model" not in front_matter(card)
    assert "`first`" in card
    assert "source: first\n" in card
    assert "somebody" not in card


def test_inputs_are_shown_with_counts(tmp_path):
    for name, summary in (
        ("pool", {"num_skills": 1234, "seconds": 0.5, "dropped": {"a": 1}}),
        ("lists|x", {"num_lists": 80, "folder": str(tmp_path)}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps({"summary": summary}))
    run = tmp_path / "run"
    run.mkdir()
    sources = [str(tmp_path / "lists|x"), str(tmp_path / "gone")]
    inputs = {"data.pool": "a" * 64, "data.lists.0": "b" * 64, "data.lists.1": "c" * 64}
    recipe = {"data": {"pool": str(tmp_path / "pool"), "lists": sources}}
    (run / "run.json").write_text(json.dumps({"recipe": recipe, "inputs": inputs}))

    card = model_card(record(EncoderSettings(), run=run))

    assert (
        f"| data.pool | pool | `{'a' * 16}` | skills 1,234; seconds 0.5 |\n"
        f"| data.lists.0 | lists\\|x | `{'b' * 16}` | lists 80 |\n"
        f"| data.lists.1 | gone | `{'c' * 16}` |  |\n"
    ) in card
    assert str(tmp_path) not in card


def test_renaming_reaches_every_program(tmp_path):
    file = tmp_path / "README.md"
    for first, form in ((None, "multi_vector"), ("our-team/old", None)):
        file.write_text(model_card(record(EncoderSettings(), form=form), Published(first)))

        rename_model(file, "our-team/new")

        card = file.read_text()
        assert 'Encoder("our-team/new")' in card or 'Transformer("our-team/new")' in card
        assert 'source: "our-team/new"' in card or '--encoder "our-team/new"' in card
        assert '"."' not in card and '"our-team/old"' not in card


def test_a_rewritten_card_is_left_alone(tmp_path):
    file = tmp_path / "README.md"
    file.write_text('# Ours\nopen(".")\n')

    rename_model(file, "our-team/new")

    assert file.read_text() == '# Ours\nopen(".")\n'


@pytest.mark.parametrize(
    "name",
    [
        "sr-emb",
        "owner/x..y",
        "owner/x--y",
        f"owner/{'x' * 120}",
        "owner/x.git",
        "a/b/c",
        "owner/name\n",
    ],
)
def test_name_that_the_hub_refuses(name):
    with raises("invalid-repository") as caught:
        Published(name)

    assert "(write OWNER/NAME)" in str(caught.value)


def test_paths_are_cut_to_their_last_part():
    home = "/".join(["", "home", "ada"])
    windows = "C:\\Users\\ada"
    settings = {
        "a": "/data/x/pool",
        "b": ["~/runs/one", home, f"{home}/pool", f"{windows}\\pool", windows, "~ada"],
        "c": "runs/one",
        "d": None,
        "separator": "/",
        "e": ("\n\n", 0.5, True),
    }

    assert shareable(settings) == {
        "a": "pool",
        "b": ["one", "~", "pool", "pool", "~", "~"],
        "c": "runs/one",
        "d": None,
        "separator": "/",
        "e": ["\n\n", 0.5, True],
    }


def test_paths_of_one_name_stay_apart():
    assert shareable({"/a/q": 1, "/b/q": 2}) == {"q": 1, "q (2)": 2}
