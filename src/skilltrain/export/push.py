"""Check a model folder and upload it to the Hugging Face Hub.

Notes:
    - One of the compared texts is so long that it is cut. Each text is encoded alone, without
      padding.
    - sentence-transformers and the client of the Hub may raise any exception.
    - The client's log, its warnings and its errors may hold the token, so they are hidden or
      masked.
    - An upload is a single commit. `upload_folder` would split many files into several commits.
    - A GatedRepoError is a kind of RepositoryNotFoundError, but the repository exists.
"""

import re
import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skilltrain.data.screening.secret_keys import looks_random, mask_secret, secret_spans
from skilltrain.errors import SkilltrainError
from skilltrain.export.forms import open_model
from skilltrain.files import read_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.reranker import Reranker
from skilltrain.models.saving import listed_files
from skilltrain.records import Skill
from skilltrain.terminal import say
from skilltrain.texts import printable

_PROBE_QUERIES = ("fill in the tax form and sign it", "deploy the web shop", "PDF 合并")
_PROBE_SKILLS = (
    Skill(
        "1",
        "pdf-forms",
        "Fill in PDF forms",
        "Read the form's fields, then write the values. " * 200,
    ),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
)
_TEXT_SUFFIXES = {".json", ".jinja", ".md", ".txt", ".xml"}
_URL_PASSWORD = re.compile(r"https?://[^/\s:@\"']+:[^/\s@\"']+@")  # https://USER:PASSWORD@
_NAMED_KEY = re.compile(  # aws_secret_access_key = KEY, ?api_key=KEY, https://KEY@
    r"(?:(?:secret_access_key|api_?key|(?:access|auth)_token|[?&]token|password)\W{1,8}"
    r"|https?://(?=[\w-]{12,200}@))(?P<key>[\w/+.-]{12,200})",
    re.IGNORECASE,
)
_MAX_DIFFERENCE = 1e-4  # between outputs of the two programs
_MAX_DIFFERENCE_BFLOAT16 = 0.1  # of logits, which reach some tens
_HUB_SECONDS = 60.0  # without a response; the Hub needs some time for a large commit
_CONNECT_SECONDS = 10.0


def check_folder(folder: Path) -> dict[str, Path]:
    """Check that a model folder can be published; return its files by name.

    Raises:
        SkilltrainError: The model would not work elsewhere, or a file holds a secret.
    """
    check_round_trip(folder)
    paths = {name: folder / name for name in listed_files(folder)}
    _check_no_secret(paths)
    return paths


@torch.inference_mode()
def check_round_trip(folder: Path) -> None:
    """Check that sentence-transformers without skilltrain computes the outputs of our model.

    Raises:
        SkilltrainError: sentence-transformers cannot open the folder, or gives other scores.
    """
    model = open_model(folder)
    is_multi_vector = read_json(folder / CHECKPOINT_FILE).get("form") == "multi_vector"
    outputs = torch.cat(_our_outputs(model, is_multi_vector))
    try:
        plain_outputs = torch.cat(_plain_outputs(model, str(folder), is_multi_vector))
        difference = (outputs - plain_outputs.float()).abs().max().item()
    except Exception as error:
        problem = f"plain sentence-transformers cannot open it: {printable(str(error), 200)}"
        fix = "nothing was sent"
        raise SkilltrainError("not-portable", problem, where=folder.name, fix=fix) from error

    is_half = read_json(folder / "config.json").get("dtype") == "bfloat16"
    limit = _MAX_DIFFERENCE_BFLOAT16 if is_half else _MAX_DIFFERENCE
    if not difference <= limit:  # also true for NaN
        problem = (
            f"gives other scores in plain sentence-transformers: they differ by {difference:.2g}"
        )
        fix = "nothing was sent; please report this"
        raise SkilltrainError("not-portable", problem, where=folder.name, fix=fix)


def _our_outputs(model: Encoder | Reranker, is_multi_vector: bool) -> list[Tensor]:
    """Compute the outputs of our model for all probe queries and probe skills."""
    if isinstance(model, Reranker):
        return [model(model.tokenize(query, _PROBE_SKILLS)) for query in _PROBE_QUERIES]
    outputs = []
    for ids in model.tokenize_queries(_PROBE_QUERIES) + model.tokenize_skills(_PROBE_SKILLS):
        # [1 + tokens, dim], the text's vector first
        [vectors] = model.with_tokens([ids], num_tokens=len(ids))
        outputs.append(vectors[1:] if is_multi_vector else vectors[0])
    return outputs


def _plain_outputs(model: Encoder | Reranker, folder: str, is_multi_vector: bool) -> list[Tensor]:
    """Compute the outputs of a saved model with sentence-transformers alone.

    Args:
        model: Our model, whose template renders the skills.
        folder: Folder of the model.
        is_multi_vector: Whether an encoder returns a vector per token.

    Returns:
        Vectors of each query, then of each skill; or all scores of a reranker.
    """
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

    texts = [model.settings.template.skill.render(skill) for skill in _PROBE_SKILLS]
    if isinstance(model, Reranker):
        pairs = list(product(_PROBE_QUERIES, texts))
        return [CrossEncoder(folder, device="cpu").predict(pairs, convert_to_tensor=True)]

    encoder_class = MultiVectorEncoder if is_multi_vector else SentenceTransformer
    encoder = encoder_class(folder, device="cpu")
    vectors = list(encoder.encode_query(list(_PROBE_QUERIES)))
    vectors += list(encoder.encode_document(texts))
    return [torch.as_tensor(vector) for vector in vectors]


def _check_no_secret(paths: Mapping[str, Path]) -> None:
    """Raise SkilltrainError for the first text file that contains a likely key or password."""
    for name, path in paths.items():
        if path.suffix not in _TEXT_SUFFIXES:
            continue
        text = path.read_text(encoding="utf-8")
        spans = list(secret_spans(text))
        spans += [match.span() for match in _URL_PASSWORD.finditer(text)]
        named_keys = _NAMED_KEY.finditer(text)
        spans += [match.span("key") for match in named_keys if looks_random(match["key"])]
        if spans:
            start, end = spans[0]
            problem = f"holds what looks like a secret: {mask_secret(text[start:end])}"
            fix = "remove it from the recipe, and revoke it; nothing was sent"
            raise SkilltrainError("secret-found", problem, where=name, fix=fix)


def upload(paths: Mapping[str, Path], repo: str, public: bool, may_replace_readme: bool) -> str:
    """Upload a model in one commit, which also deletes all other files of the repository.

    Args:
        paths: Files by their name in the repository.
        repo: OWNER/NAME on the Hub. A missing repository is created.
        public: Whether everybody may see the repository.
        may_replace_readme: Whether the only file of a repository may be a README.md.

    Returns:
        URL of the repository.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, set_client_factory
    from huggingface_hub.utils import logging

    set_client_factory(_limited_client)
    logging.set_verbosity_error()
    api = HfApi(library_name="skilltrain")
    url = f"{api.endpoint}/{repo}"
    try:
        with warnings.catch_warnings(action="ignore"):
            old_names = _open_repository(api, repo, public, may_replace_readme)
            say(f"{url}: uploading")
            changes = [CommitOperationAdd(name, path) for name, path in paths.items()]
            changes += [CommitOperationDelete(name) for name in sorted(old_names.difference(paths))]
            api.create_commit(repo, changes, commit_message="Upload a model of skilltrain")
    except SkilltrainError:
        raise
    except Exception as error:
        raise _upload_error(error, repo) from None
    return url


def _upload_error(error: Exception, repo: str) -> SkilltrainError:
    """Return our error for any error of the Hub's client, without the token."""
    from huggingface_hub import get_token

    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    token = get_token()
    if token:
        message = message.replace(token, "[key]")
    problem = f"cannot upload: {printable(message, 200)}"
    fix = "HF_TOKEN must be a token that may write there; else try again: nothing is half-written"
    return SkilltrainError("upload-failed", problem, where=repo, fix=fix)


def _limited_client() -> Any:
    """Create the HTTP client that huggingface_hub uses by default, with time limits."""
    import httpx2
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = httpx2.Timeout(_HUB_SECONDS, connect=_CONNECT_SECONDS)
    return client


def _open_repository(api: Any, repo: str, public: bool, may_replace_readme: bool) -> set[str]:
    """Create a repository, or check an existing one, and return the names of its files.

    Args:
        api: `HfApi` of huggingface_hub.
        repo: OWNER/NAME on the Hub.
        public: Whether the repository must be public.
        may_replace_readme: Whether the only file may be a README.md.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = api.model_info(repo, timeout=_HUB_SECONDS)
    except GatedRepoError:
        raise
    except RepositoryNotFoundError:
        api.create_repo(repo, private=not public)
        return set()

    names = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
    if names == {"README.md"} and not may_replace_readme:
        problem = "the repository exists and holds a README.md"
        fix = "add --into-existing to replace it, or choose another --repo"
        raise SkilltrainError("repository-taken", problem, where=repo, fix=fix)
    if names - {"README.md"} and CHECKPOINT_FILE not in names:
        problem = "the repository is taken: it holds something else than a model of skilltrain"
        raise SkilltrainError("repository-taken", problem, where=repo, fix="choose another --repo")
    is_public = not info.private
    problem = "the repository is public"
    fix = "add --public, or choose another --repo"
    if not is_public:
        problem = "the repository is private, and stays so"
        fix = "make it public on its page, or push without --public"
    if is_public != public:
        raise SkilltrainError("repository-visibility", problem, where=repo, fix=fix)
    return names
