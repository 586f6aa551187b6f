"""From a training run to a repository on the Hugging Face Hub: what others could not use is not sent."""

import tempfile
from collections.abc import Collection, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.data.screening.reading import Reading
from skilltrain.data.screening.secret_keys import database_passwords, secret_keys, show_beginning
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.folder import copy_model
from skilltrain.export.forms import open_model
from skilltrain.export.published import Published
from skilltrain.files import read_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.max_sim import max_sim
from skilltrain.models.reranker import Reranker
from skilltrain.records import Skill
from skilltrain.runs import RUN_FILE
from skilltrain.terminal import say
from skilltrain.texts import printable
from skilltrain.training.export_run import export_run

_QUERIES = ("fill in the tax form and sign it", "deploy the web shop", "PDF 合并")
_SKILLS = (
    Skill("1", "pdf-forms", "Fill in PDF forms", "Read the form's fields, then write the values. " * 200),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
)
_TEXT = {".json", ".jinja", ".md", ".txt", ".xml"}


def push_model(
    run: Path, published: Published, form: Form | None = None, public: bool = False, only_plan: bool = False
) -> dict[str, Any]:
    """Upload the model of `run`, or of a folder that `export_run` wrote, to the repository `published.repo`.

    The repository becomes what the folder holds; with `only_plan` nothing is sent. Returns `url`, `files` (sizes in
    bytes by name) and `card`. Raises SkilltrainError for a run that has not finished or a damaged folder, a model to
    which plain sentence-transformers gives other scores, a file that holds a key, a repository that is public without
    `public` or holds something else, and whatever the Hub refuses.
    """
    published.check()
    assert published.repo is not None
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        folder = Path(scratch) / "model"
        _write_model(run, folder, published, form)
        check_round_trip(folder)
        files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
        check_no_secret(files)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        card = files["README.md"].read_text(encoding="utf-8")
        url = None if only_plan else _upload(folder, sizes, published.repo, public)
    return {"url": url, "files": sizes, "card": card}


def _write_model(run: Path, folder: Path, published: Published, form: Form | None) -> None:
    is_run = (run / RUN_FILE).is_file()
    if is_run and not read_json(run / RUN_FILE).get("finished"):
        fix = "continue it with --resume, or export a checkpoint and push that"
        raise SkilltrainError("this training has not finished", where=run, fix=fix)
    if not is_run and (form or published.license or published.reports):
        fix = "give --form, --license and --report to `skilltrain export`"
        raise SkilltrainError("is no training's folder, and is pushed as it is", where=run, fix=fix)
    if is_run:
        export_run(run, folder, published=published, form=form)
    else:
        folder.mkdir()
        copy_model(run, folder)


def check_round_trip(folder: Path) -> None:
    """Raise SkilltrainError unless plain sentence-transformers gives the model's scores: on cut texts, too."""
    model, is_late = open_model(folder), read_json(folder / CHECKPOINT_FILE).get("form") == "multi_vector"
    tolerance = 0.1 if read_json(folder / "config.json").get("dtype") == "bfloat16" else 1e-4  # of logits of some tens
    try:
        plain = _plain_scores(model, str(folder), is_late)
    except Exception as error:  # its readers raise anything
        what = f"plain sentence-transformers cannot open it: {printable(str(error), 200)}"
        raise SkilltrainError(what, where=folder.name, fix="nothing was sent") from error
    most = (_scores(model, is_late) - plain.float()).abs().max().item()
    if not most <= tolerance:
        what = f"plain sentence-transformers gives other scores: they differ by up to {most:.2g}"
        raise SkilltrainError(what, where=folder.name, fix="nothing was sent; please report this")


@torch.inference_mode()
def _scores(model: Encoder | Reranker, is_late: bool) -> Float[Tensor, "query skill"]:
    if isinstance(model, Reranker):
        return torch.stack([model(model.tokenize(query, _SKILLS)) for query in _QUERIES])
    texts = [model.settings.template.render_skill(skill) for skill in _SKILLS]
    asked, shown = model.tokenize_queries(_QUERIES), model.tokenize(texts, model.settings.max_tokens)
    if not is_late:
        return model(asked) @ model(shown).T
    queries, skills = ([model.with_tokens([text], len(text))[0, 1:] for text in some] for some in (asked, shown))
    return max_sim(queries, skills)


def _plain_scores(model: Encoder | Reranker, place: str, is_late: bool) -> Float[Tensor, "query skill"]:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

    texts = [model.settings.template.skill.render(skill) for skill in _SKILLS]
    if isinstance(model, Reranker):
        pairs = [(query, text) for query in _QUERIES for text in texts]
        return CrossEncoder(place, device="cpu").predict(pairs, convert_to_tensor=True).reshape(-1, len(texts))
    plain = (MultiVectorEncoder if is_late else SentenceTransformer)(place, device="cpu")
    return plain.similarity(plain.encode_query([*_QUERIES]), plain.encode_document(texts))


def check_no_secret(files: Mapping[str, Path]) -> None:
    """Raise SkilltrainError for a text file that holds what looks like a real key or a database's password."""
    for name, path in files.items():
        text = path.read_text(encoding="utf-8") if path.suffix in _TEXT else ""
        reading = Reading(text, text, None)
        for start, end in chain(secret_keys(reading), database_passwords(reading)):
            what = f"holds what looks like a secret: {show_beginning(text[start:end])}"
            raise SkilltrainError(what, where=name, fix="take it out of the recipe, and revoke it; nothing was sent")


def _upload(folder: Path, names: Collection[str], repo: str, public: bool) -> str:
    """Make the repository where need be, and one commit of all files; its address."""
    import httpx2
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi(library_name="skilltrain")
    try:
        old = _names_in(api, repo, public)
        url = api.create_repo(repo, private=not public, exist_ok=True)
        say(f"{url}: uploading")
        changes = [CommitOperationAdd(name, folder / name) for name in names]
        changes += [CommitOperationDelete(name) for name in sorted(old - {*names})]
        api.create_commit(repo, changes, commit_message="Upload a model of skilltrain")
    except (OSError, ValueError, httpx2.HTTPError) as error:
        is_refusal = isinstance(error, LocalTokenNotFoundError) or (
            isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
        )
        fix = "set HF_TOKEN to a token that may write there" if is_refusal else "try again: nothing is half-written"
        raise SkilltrainError(f"cannot upload: {printable(str(error), 200)}", where=repo, fix=fix) from error
    return str(url)


def _names_in(api: Any, repo: str, public: bool) -> set[str]:
    """The files of a repository, if there is one. Raises SkilltrainError for one whose content is not skilltrain's, or
    that more people may read than asked.
    """
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        info = api.model_info(repo)
    except RepositoryNotFoundError:
        return set()
    names = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
    if names and CHECKPOINT_FILE not in names:
        what = "the repository is taken: it holds something else than a model of skilltrain"
        raise SkilltrainError(what, where=repo, fix="choose another --repo")
    if not info.private and not public:
        raise SkilltrainError("the repository is public", where=repo, fix="add --public, or choose another --repo")
    return names
