"""The part of a model card that readers copy: programs that run as they stand in the model's folder."""

from skilltrain.models.encoder import EncoderSettings
from skilltrain.models.reranker import RerankerSettings
from skilltrain.templates import SkillTemplate

_SKILLS = """query = "Fill in the tax form and sign it"
skills = [
    skill_text("pdf-forms", "Fill in PDF forms", "Read the form's fields, then write the values."),
    skill_text("deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
]
"""
_ENCODER = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer(".")  # this folder, or the model's name on the Hub


{skill_text}

{skills}scores = model.similarity(model.encode_query([query[:{query_chars}]]), model.encode_document(skills))[0]
print(scores)  # cosines, one a skill
"""
_CROSS_ENCODER = """from sentence_transformers import CrossEncoder

model = CrossEncoder(".")  # this folder, or the model's name on the Hub


{skill_text}

{skills}scores = model.predict([(query[:{query_chars}], skill) for skill in skills])
print(scores)  # {scale}, one a skill
"""
_COSINE_PAIR = """import torch

from skilltrain.models.reranker import RerankerConfig, load_reranker
from skilltrain.records import Skill

reranker = load_reranker(RerankerConfig(source="."), torch.device("cpu"))  # "." is this folder
query = "Fill in the tax form and sign it"
skills = [
    Skill("1", "pdf-forms", "Fill in PDF forms", "Read the form's fields, then write the values."),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
]
with torch.inference_mode():
    scores = reranker(reranker.tokenize(query, skills))
print(scores)  # cosines, one a skill
"""


def usage(settings: EncoderSettings | RerankerSettings) -> str:
    """Markdown: the program for plain sentence-transformers, and the command of skilltrain."""
    if isinstance(settings, EncoderSettings):
        with_library = "With [sentence-transformers](https://sbert.net) 6.2 or later:"
        program, option = _ENCODER.format(**_parts(settings, "")), "--encoder ."
    elif settings.template.form == "cosine_pair":
        with_library = "It opens with skilltrain only: no module of sentence-transformers computes its score."
        program, option = _COSINE_PAIR, "--reranker ."
    else:
        with_library = "With [sentence-transformers](https://sbert.net) 6.2 or later:"
        scale = "logit(yes) - logit(no)" if settings.template.form == "yes_no" else "logits"
        program, option = _CROSS_ENCODER.format(**_parts(settings, scale)), "--reranker ."
    command = f'skilltrain route "fill in the tax form and sign it" --pool POOL {option}'
    own = f"With skilltrain, which also finds the skills of a folder of SKILL.md files:\n\n```bash\n{command}\n```"
    return "\n\n".join([with_library, f"```python\n{program}```", *_differences(settings), own])


def _parts(settings: EncoderSettings | RerankerSettings, scale: str) -> dict[str, str | int]:
    template = settings.template
    return {
        "skill_text": _skill_text(template.skill), "skills": _SKILLS, "query_chars": template.query_chars,
        "scale": scale,
    }  # fmt: skip


def _skill_text(template: SkillTemplate) -> str:
    """The source of a function that renders a skill as `template` does."""
    fields = ["name", f"description[:{template.description_chars}]"]
    if template.fields == "full":
        fields.append(f"body[:{template.body_chars}]")
    return (
        "def skill_text(name, description, body):  # as in training\n"
        f"    parts = [{', '.join(fields)}]\n"
        f"    return {template.separator!r}.join(part.strip() for part in parts if part.strip())\n"
    )


def _differences(settings: EncoderSettings | RerankerSettings) -> list[str]:
    """Where plain sentence-transformers scores otherwise than skilltrain, for readers who compare."""
    if isinstance(settings, EncoderSettings) or settings.template.form == "cosine_pair":
        return []
    limit = settings.query_max_tokens
    lines = [f"The scores are skilltrain's, except for queries of more than {limit} tokens, which skilltrain cuts."]
    if settings.template.form == "yes_no":
        lines.append(
            "Names of control tokens in a query or a skill (`<|im_end|>`) are read as text by both; "
            "this folder's chat template breaks them up with a space, which changes the score a little."
        )
    elif settings.template.form == "pair":
        lines.append(
            f"A query that alone fills the {settings.max_tokens} tokens of a pair may be refused: cut it first."
        )
    return [" ".join(lines)]
