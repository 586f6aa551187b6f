"""Check a model folder and upload it to the Hugging Face Hub."""

import warnings
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skilltrain.data.screening.secret_keys import likely_secrets, mask_secret
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

    This check runs before an upload, so its errors say that nothing was sent. The compared texts
    are a few fixed queries and skills (the probes). One skill is so long that its text is cut.

    Args:
        folder: Folder of the model.

    Raises:
        SkilltrainError: sentence-transformers cannot open the folder, or gives other scores.
    """
    # Outputs of our model: the scores of all pairs, or the vectors of all texts.
    model = open_model(folder)
    # A multi_vector model returns one vector per token instead of one per text.
    is_multi_vector = read_json(folder / CHECKPOINT_FILE).get("form") == "multi_vector"
    outputs = []  # of a reranker: [skill] for each query; of an encoder: [dim] or [token, dim]
    if isinstance(model, Reranker):
        outputs = [model(model.tokenize(query, _PROBE_SKILLS)) for query in _PROBE_QUERIES]
    else:
        texts = model.tokenize_queries(_PROBE_QUERIES) + model.tokenize_skills(_PROBE_SKILLS)
        for ids in texts:  # one at a time, so that no text is padded
            # The rows are the vector of the text, then a vector for each of its tokens.
            [rows] = model.with_tokens([ids], num_tokens=len(ids))
            outputs.append(rows[1:] if is_multi_vector else rows[0])

    try:
        plain_outputs = torch.cat(_plain_outputs(model, str(folder), is_multi_vector))
        difference = (torch.cat(outputs) - plain_outputs.float()).abs().max().item()
    except Exception as error:  # sentence-transformers may raise anything
        problem = f"plain sentence-transformers cannot open it: {printable(str(error), 200)}"
        fix = "nothing was sent"
        raise SkilltrainError("not-portable", problem, where=folder.name, fix=fix) from error

    # Weights in bfloat16 have few digits, so small differences are no fault.
    is_half = read_json(folder / "config.json").get("dtype") == "bfloat16"
    limit = _MAX_DIFFERENCE_BFLOAT16 if is_half else _MAX_DIFFERENCE
    if not difference <= limit:  # also true for NaN
        scores = f"they differ by {difference:.2g}"
        problem = f"gives other scores in plain sentence-transformers: {scores}"
        fix = "nothing was sent; please report this"
        raise SkilltrainError("not-portable", problem, where=folder.name, fix=fix)


def _plain_outputs(model: Encoder | Reranker, folder: str, is_multi_vector: bool) -> list[Tensor]:
    """Compute the outputs of a model folder with sentence-transformers alone.

    A comparison with our own outputs shows whether users without skilltrain get the same model. The
    inputs are the probes: a few fixed queries and skills.

    Args:
        model: The same model, opened by skilltrain. Its template turns a skill into a text.
        folder: Folder of the model in the format of sentence-transformers.
        is_multi_vector: Whether an encoder returns a vector per token.

    Returns:
        For a reranker, one tensor with the scores of all pairs, query by query. For an encoder, a
        tensor for each query, then for each skill: its vector, or the vectors of its tokens.
    """
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

    texts = [model.settings.template.skill.render(skill) for skill in _PROBE_SKILLS]
    if isinstance(model, Reranker):
        # All pairs of a query and a skill, query by query.
        pairs = list(product(_PROBE_QUERIES, texts))
        return [CrossEncoder(folder, device="cpu").predict(pairs, convert_to_tensor=True)]

    encoder_class = MultiVectorEncoder if is_multi_vector else SentenceTransformer
    encoder = encoder_class(folder, device="cpu")
    vectors = list(encoder.encode_query(list(_PROBE_QUERIES)))
    vectors += list(encoder.encode_document(texts))
    # `encode` returns numpy arrays or tensors, depending on the class.
    return [torch.as_tensor(vector) for vector in vectors]


def _check_no_secret(paths: Mapping[str, Path]) -> None:
    """Raise SkilltrainError for the first text file that contains a likely key or password."""
    for name, path in paths.items():
        # Other files, such as weights, hold no text that somebody wrote.
        if path.suffix not in _TEXT_SUFFIXES:
            continue
        text = path.read_text(encoding="utf-8")
        # Only the first secret of a file is named.
        for secret in likely_secrets(text):
            problem = f"holds what looks like a secret: {mask_secret(secret)}"
            fix = "remove it from the recipe, and revoke it; nothing was sent"
            raise SkilltrainError("secret-found", problem, where=name, fix=fix)


def upload(paths: Mapping[str, Path], repo: str, public: bool, may_replace_readme: bool) -> str:
    """Upload a model in one commit, which also deletes all other files of the repository.

    An earlier model of skilltrain in the repository is replaced.

    Args:
        paths: Files by their name in the repository.
        repo: Name on the Hub, OWNER/NAME. The repository is created if it does not exist.
        public: Whether everybody may see the repository.
        may_replace_readme: Whether to upload to an existing repository that holds nothing but a
            README.md, which is replaced. If false, such a repository is refused.

    Returns:
        URL of the repository.

    Raises:
        SkilltrainError: The repository holds something else than a model of skilltrain, or the Hub
            refuses the upload or does not answer.
    """
    from huggingface_hub import (
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        get_token,
        set_client_factory,
    )
    from huggingface_hub.utils import logging

    set_client_factory(_limited_client)
    logging.set_verbosity_error()  # the client's log may hold the token
    api = HfApi(library_name="skilltrain")
    url = f"{api.endpoint}/{repo}"
    try:
        with warnings.catch_warnings(action="ignore"):  # a warning may hold the token
            old_names = _open_repository(api, repo, public, may_replace_readme)
            say(f"{url}: uploading")
            # upload_folder would split many files into several commits.
            changes = [CommitOperationAdd(name, path) for name, path in paths.items()]
            changes += [CommitOperationDelete(name) for name in sorted(old_names.difference(paths))]
            api.create_commit(repo, changes, commit_message="Upload a model of skilltrain")
    except SkilltrainError:
        raise
    except Exception as error:  # the client may raise anything
        message = getattr(error, "server_message", None) or str(error) or type(error).__name__
        token = get_token()
        if token:
            message = message.replace(token, "[key]")
        problem = f"cannot upload: {printable(message, 200)}"
        fix = (
            "HF_TOKEN must be a token that may write there; else try again: nothing is half-written"
        )
        # `from None`, because --debug would show the token.
        raise SkilltrainError("upload-failed", problem, where=repo, fix=fix) from None
    return url


def _limited_client() -> Any:
    """Create the HTTP client that huggingface_hub uses by default, with time limits.

    Without limits, an upload would wait for a silent server forever.
    """
    import httpx2
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = httpx2.Timeout(_HUB_SECONDS, connect=_CONNECT_SECONDS)
    return client


def _open_repository(api: Any, repo: str, public: bool, may_replace_readme: bool) -> set[str]:
    """Create a repository, or check an existing one, and return the names of its files.

    Args:
        api: `HfApi` of huggingface_hub.
        repo: Name on the Hub, OWNER/NAME.
        public: Whether the repository must be public, or else private.
        may_replace_readme: Whether a repository that holds nothing but a README.md may be
            overwritten.

    Raises:
        SkilltrainError: The repository holds something else than a model of skilltrain, or its
            visibility is another one.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = api.model_info(repo, timeout=_HUB_SECONDS)
    except GatedRepoError:  # a kind of RepositoryNotFoundError, but the repository exists
        raise
    except RepositoryNotFoundError:
        api.create_repo(repo, private=not public)
        return set()

    # The Hub itself puts .gitattributes into each new repository.
    names = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
    if names == {"README.md"} and not may_replace_readme:
        problem = "the repository exists and holds a README.md"
        fix = "add --into-existing to replace it, or choose another --repo"
        raise SkilltrainError("repository-taken", problem, where=repo, fix=fix)
    # Every model of skilltrain has a CHECKPOINT_FILE. Other repositories must not be overwritten.
    if names - {"README.md"} and CHECKPOINT_FILE not in names:
        problem = "the repository is taken: it holds something else than a model of skilltrain"
        raise SkilltrainError("repository-taken", problem, where=repo, fix="choose another --repo")
    if public and info.private:
        problem = "the repository is private, and stays so"
        fix = "make it public on its page, or push without --public"
        raise SkilltrainError("repository-visibility", problem, where=repo, fix=fix)
    if not public and not info.private:
        problem = "the repository is public"
        fix = "add --public, or choose another --repo"
        raise SkilltrainError("repository-visibility", problem, where=repo, fix=fix)
    return names
