"""Check the files of a model, a router or a data set, and upload them to the Hugging Face Hub."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow.parquet as pq
import torch
from pyarrow import feather
from torch import Tensor

from skilltrain.data.screening.secret_keys import likely_secrets, mask_secret, secret_spans
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published
from skilltrain.export.forms import open_model
from skilltrain.files import read_json
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.reranker import Reranker
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
# Functions that return the content of a file as an Arrow table.
_TABLE_READERS = {".parquet": pq.read_table, ".arrow": feather.read_table}
_MAX_DIFFERENCE = 1e-4  # between outputs of the two programs
_MAX_DIFFERENCE_BFLOAT16 = 0.1  # of logits, which reach some tens
_HUB_SECONDS = 60.0  # without a response; the Hub needs some time for a large commit
_CONNECT_SECONDS = 10.0


class RepositoryKind(NamedTuple):
    """Content of a repository that a push writes.

    Attributes:
        noun: Name of the content, for messages.
        type: Type of the repository on the Hub.
        marker: Name of a file that all repositories with this content have. A push overwrites no
            other repository.
    """

    noun: str
    type: Literal["model", "dataset"]
    marker: str


MODEL = RepositoryKind("model", "model", CHECKPOINT_FILE)


@dataclass(frozen=True)
class PushOptions:
    """Settings of a push to a repository.

    Attributes:
        public: Whether everybody may see the repository.
        into_existing: Whether to upload into an existing repository that holds only a README.md,
            which is replaced. If false, such a repository is refused.
        revision: Existing branch to write to, or a pull request such as `refs/pr/3`. None: main.
        tag: New tag of the uploaded commit.
        create_pr: Whether to open a pull request instead of a commit on the branch.
        no_bodies: Whether to send no bodies of skills.
        dry_run: Whether to check everything but send nothing.
    """

    public: bool = False
    into_existing: bool = False
    revision: str | None = None
    tag: str | None = None
    create_pr: bool = False
    no_bodies: bool = False
    dry_run: bool = False


def push_files(
    paths: Mapping[str, Path],
    published: Published,
    options: PushOptions,
    kind: RepositoryKind = MODEL,
) -> dict[str, Any]:
    """Upload files to the Hub, unless a text or a table among them holds a secret.

    Args:
        paths: Files by their name in the repository. One of them is README.md.
        published: Facts of the publication. Only `repo` is used here: the name on the Hub.
        options: How to write to the repository.
        kind: Content of the repository, such as a model or a data set.

    Returns:
        `url` (None if nothing was sent), `files` (size in bytes by name) and `card`.

    Raises:
        SkilltrainError: A file holds a secret, or the Hub refuses the upload.
    """
    assert published.repo is not None
    _check_no_secret(paths)
    sizes = {name: path.stat().st_size for name, path in paths.items()}
    card = paths["README.md"].read_text(encoding="utf-8")
    url = None if options.dry_run else upload(paths, published.repo, options, kind)
    return {"url": url, "files": sizes, "card": card}


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
    """Raise SkilltrainError for the first text that contains a likely key or password.

    Args:
        paths: Files by their name in the repository. Weights and vectors are not searched, because
            they hold no text.
    """
    for name, path in paths.items():
        is_table = path.suffix in _TABLE_READERS
        is_skills = is_table and path.stem == "skills"
        # A table has a text for each row, so `number` is then the number of the row.
        for number, text in enumerate(_texts_in(path), 1):
            # `likely_secrets` finds keys, tokens, all passwords in URLs, and keys after a name.
            secrets = [*likely_secrets(text)]
            if is_skills:
                # Skills show passwords as examples. `secret_spans` finds only keys, tokens and
                # database URLs that look real.
                secrets = [text[start:end] for start, end in secret_spans(text)]
            if secrets:
                where = f"{name}, row {number}" if is_table else name
                problem = f"holds what looks like a secret: {mask_secret(secrets[0])}"
                fix = "remove it from the recipe or the data, and revoke it; nothing was sent"
                raise SkilltrainError("secret-found", problem, where=where, fix=fix)


def _texts_in(path: Path) -> Iterator[str]:
    """Yield the text of a file, or a text for each row of a table.

    Other files, such as weights, hold no text.
    """
    # stems.json holds the single words of a search index. The skills' texts are read from a table.
    if path.name == "stems.json":
        return
    if path.suffix in _TEXT_SUFFIXES:
        yield path.read_text(encoding="utf-8")
    elif path.suffix in _TABLE_READERS:
        for row in _TABLE_READERS[path.suffix](path).to_pylist():
            yield "\n".join(map(str, row.values()))


def upload(
    paths: Mapping[str, Path], repo: str, options: PushOptions, kind: RepositoryKind = MODEL
) -> str:
    """Upload files in one commit, which also deletes all other files of the repository.

    A repository that does not exist is created. Earlier content of the same kind is replaced.

    Args:
        paths: Files by their name in the repository.
        repo: Name on the Hub, OWNER/NAME.
        options: How to write to the repository.
        kind: Content of the repository.

    Returns:
        URL of the repository, or of the new pull request.

    Raises:
        SkilltrainError: The repository holds something else, or has no such revision, or the Hub
            refuses the upload or does not answer.
    """
    from huggingface_hub import (
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        set_client_factory,
    )
    from huggingface_hub.utils import logging

    set_client_factory(_limited_client)
    logging.set_verbosity_error()  # the client's log may hold the token
    api = HfApi(library_name="skilltrain")
    folder = "datasets/" if kind.type == "dataset" else ""
    url = f"{api.endpoint}/{folder}{repo}"
    step = "upload"
    try:
        with warnings.catch_warnings(action="ignore"):  # a warning may hold the token
            old_names = _open_repository(api, repo, options, kind)
            say(f"{url}: uploading")
            # upload_folder would split many files into several commits.
            changes = [CommitOperationAdd(name, path) for name, path in paths.items()]
            changes += [CommitOperationDelete(name) for name in sorted(old_names.difference(paths))]
            commit = api.create_commit(
                repo,
                changes,
                commit_message=f"Upload a {kind.noun} of skilltrain",
                repo_type=kind.type,
                revision=options.revision,
                create_pr=options.create_pr,
            )
            if options.tag:
                step = "tag the uploaded files"
                api.create_tag(repo, tag=options.tag, revision=commit.oid, repo_type=kind.type)
    except SkilltrainError:
        raise
    except Exception as error:  # the client may raise anything
        # `from None`, because --debug would show the token.
        raise _refusal(error, step, repo) from None
    return commit.pr_url or url


def _refusal(error: Exception, step: str, repo: str) -> SkilltrainError:
    """Return the error for a step that the Hub refuses.

    The message of the error leaves out the user's token.

    Args:
        error: Error of the Hub's client.
        step: What the Hub refused, such as `upload`.
        repo: Name on the Hub, OWNER/NAME.
    """
    from huggingface_hub import get_token

    # The client's errors have the Hub's own message, which is the most helpful.
    message = getattr(error, "server_message", None) or str(error) or type(error).__name__
    token = get_token()
    if token:
        message = message.replace(token, "[key]")
    problem = f"cannot {step}: {printable(message, 200)}"
    fix = "HF_TOKEN must be a token that may write there, and --revision must exist; else try again"
    return SkilltrainError("upload-failed", problem, where=repo, fix=fix)


def _limited_client() -> Any:
    """Create the HTTP client that huggingface_hub uses by default, with time limits.

    Without limits, an upload would wait for a silent server forever.
    """
    import httpx2
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = httpx2.Timeout(_HUB_SECONDS, connect=_CONNECT_SECONDS)
    return client


def _open_repository(api: Any, repo: str, options: PushOptions, kind: RepositoryKind) -> set[str]:
    """Create a repository, or check an existing one, and return the names of its files.

    Args:
        api: `HfApi` of huggingface_hub.
        repo: Name on the Hub, OWNER/NAME.
        options: How to write to the repository.
        kind: Content of the repository.

    Raises:
        SkilltrainError: The repository holds something else, has another visibility, or has the tag
            already.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        info = api.repo_info(
            repo, revision=options.revision, repo_type=kind.type, timeout=_HUB_SECONDS
        )
    except GatedRepoError:  # a kind of RepositoryNotFoundError, but the repository exists
        raise
    except RepositoryNotFoundError:
        # A new repository has only the branch main, so a push to another one would fail.
        if options.revision:
            raise
        api.create_repo(repo, repo_type=kind.type, private=not options.public)
        return set()

    # The Hub itself puts .gitattributes into each new repository.
    names = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
    _check_repository(names, info.private, repo, options, kind)
    if options.tag:
        refs = api.list_repo_refs(repo, repo_type=kind.type)
        if options.tag in {ref.name for ref in refs.tags}:
            problem = f"the repository has the tag {options.tag} already"
            raise SkilltrainError("tag-exists", problem, where=repo, fix="choose another --tag")
    return names


def _check_repository(
    names: set[str], is_private: bool, repo: str, options: PushOptions, kind: RepositoryKind
) -> None:
    """Raise SkilltrainError if an existing repository must not be written.

    Args:
        names: Names of its files.
        is_private: Whether only its owner may see it.
        repo: Name on the Hub, OWNER/NAME.
        options: How to write to the repository.
        kind: Content that is to be uploaded.
    """
    # A repository with only a README.md is replaced only if the user asks for that.
    if names == {"README.md"} and not options.into_existing:
        problem = "the repository exists and holds a README.md"
        fix = "add --into-existing to replace it, or choose another --repo"
        raise SkilltrainError("repository-taken", problem, where=repo, fix=fix)
    # Other files may be replaced only if `marker` is among them: skilltrain writes this file with
    # all content of this kind.
    if names - {"README.md"} and kind.marker not in names:
        problem = (
            f"the repository is taken: it holds something else than a {kind.noun} of skilltrain"
        )
        raise SkilltrainError("repository-taken", problem, where=repo, fix="choose another --repo")
    # A push does not change who may see a repository: `public` and `is_private` must be opposites.
    if options.public == is_private:
        visibility = "private" if is_private else "public"
        problem = f"the repository is {visibility}, and stays so"
        fix = "change it on its page, or add or leave out --public"
        raise SkilltrainError("repository-visibility", problem, where=repo, fix=fix)
