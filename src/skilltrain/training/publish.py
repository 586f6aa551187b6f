"""Export the model of a training run as a folder, and push it to the Hugging Face Hub."""

import re
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skilltrain.config import load_recipe, validate
from skilltrain.data.screening.secret_keys import secrets_in, show_beginning
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.card import Published, RunRecord, model_card, rename_model
from skilltrain.export.forms import open_model, write_form
from skilltrain.files import read_json, staged_folder, write_text
from skilltrain.models.adapters import merge_adapter
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.reranker import Reranker
from skilltrain.models.saving import copy_model, save_adapter, save_model
from skilltrain.records import Skill
from skilltrain.runs import CHECKPOINTS, RECIPE_FILE, RUN_FILE, record_of
from skilltrain.terminal import say
from skilltrain.texts import printable
from skilltrain.training.checkpoint import best_checkpoint, checkpoints, load_weights
from skilltrain.training.settings import (
    TrainConfig,
    TrainEncoderConfig,
    TrainRerankerConfig,
    load_model,
)

_CONFIGS: dict[str, type[TrainEncoderConfig] | type[TrainRerankerConfig]] = {
    "train_encoder": TrainEncoderConfig,
    "train_reranker": TrainRerankerConfig,
}
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
_URL_PASSWORD = re.compile(r"https?://[^/\s:@\"']+:[^/\s@\"']+@")
_HUB_SECONDS = 60.0  # of silence; the Hub needs some time for a large commit
_CONNECT_SECONDS = 10.0


def save_trained(
    config: TrainConfig,
    checkpoint: Path,
    out: Path,
    summary: Mapping[str, Any],
    adapter_only: bool = False,
) -> None:
    """Save the model of a checkpoint with its card. An adapter (LoRA) is merged, or saved alone.

    Runs on the CPU, because the GPU may still hold the model.
    """
    model = load_model(config, torch.device("cpu"))
    load_weights(model, "model", checkpoint)
    if adapter_only:
        save_adapter(model, out, config.model.source)
        return
    if config.adapter is not None:
        merge_adapter(model.network)
    record = RunRecord(model.settings, config.model_dump(mode="json"), summary, run=config.out)
    save_model(model.eval(), out, config.model.source, model_card(record))


def export_run(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    published: Published = Published(),  # noqa: B008
    form: Form | None = None,
    adapter_only: bool = False,
) -> dict[str, Any]:
    """Write the model of a training run to the folder `out`.

    Args:
        run: Folder of a training run, finished or not.
        out: Folder to write; absent or empty.
        checkpoint: `step-N` or `best`. By default the final model of a finished run, or the newest
            checkpoint of an unfinished run.
        published: Facts for the model card that the run does not know.
        form: Form of the model, if not the one that training saves.
        adapter_only: Whether to write the adapter (LoRA) alone, without a card.

    Returns:
        `out`, `stage` and `checkpoint`, the checkpoint that the weights are from.

    Raises:
        SkilltrainError: The run has no such checkpoint, form, adapter or report.
    """
    config, summary = _read_run(run)
    if published.reports and (checkpoint is not None or not summary):
        fault = "a report is about the final model of a finished run"
        raise SkilltrainError(fault, where="--report", fix="leave out --report or --checkpoint")
    if adapter_only and config.adapter is None:
        fault = "trained all weights, no adapter"
        raise SkilltrainError(fault, where=run, fix="export without --adapter")
    name = summary.get("checkpoint")
    exported = None
    with staged_folder(out) as staged:
        if summary and checkpoint is None and not adapter_only:
            copy_model(run, staged)
        else:
            source = _find_checkpoint(run, checkpoint or name)
            if source.name != name:
                summary = {}  # its results are not those of this checkpoint
                name = exported = source.name
            save_trained(config, source, staged, summary, adapter_only)
        if form is not None:
            write_form(staged, form)
        if not adapter_only:
            settings = open_model(staged, "meta").settings
            recipe = config.model_dump(mode="json")
            record = RunRecord(settings, recipe, summary, exported, form, run)
            write_text(staged / "README.md", model_card(record, published))
    return {"out": str(out), "stage": config.stage, "checkpoint": name}


def _read_run(run: Path) -> tuple[TrainConfig, Mapping[str, Any]]:
    """Return settings and summary of a run; the summary of an unfinished run is empty."""
    record = record_of(run)
    if not record:
        fix = "give the folder that a training wrote to (its out=…)"
        raise SkilltrainError(f"holds no training run: no {RUN_FILE}", where=run, fix=fix)
    recipe = load_recipe(run / RECIPE_FILE)
    stage = recipe.get("stage")
    if stage not in _CONFIGS:
        raise SkilltrainError(f"is a run of stage {stage}, which trains no model", where=run)
    config = validate(_CONFIGS[stage], recipe, run / RECIPE_FILE)
    return config, record["summary"] if record["finished"] else {}


def _find_checkpoint(run: Path, name: str | None) -> Path:
    """Return the checkpoint called `name` (`best` is one, too); without a name the newest."""
    folder = run / CHECKPOINTS
    paths = {path.name: path for path in checkpoints(folder)}
    if not paths:
        fix = "train for longer, or lower training.save_every"
        raise SkilltrainError("holds no checkpoint", where=folder, fix=fix)
    name = name or [*paths][-1]
    path = best_checkpoint(folder) if name == "best" else paths.get(name)
    if path is None:
        fault = f"no checkpoint '{name}'; there are {', '.join(paths)}"
        raise SkilltrainError(fault, where=folder)
    return path


def push_model(
    run: Path,
    published: Published,
    form: Form | None = None,
    public: bool = False,
    into_existing: bool = False,
    only_plan: bool = False,
) -> dict[str, Any]:
    """Upload a model to the repository `published.repo` on the Hub, in one commit.

    Afterwards the repository holds these files and no others.

    Args:
        run: Folder of a finished training run, or one that `export_run` wrote.
        published: Facts for the model card that the run does not know.
        form: Form of the model, if not the one that training saves.
        public: Whether the repository is public.
        into_existing: Whether a repository that holds only a README.md may be written.
        only_plan: Whether everything is checked but nothing is sent.

    Returns:
        `url`, `files` (size in bytes by name) and `card`.

    Raises:
        SkilltrainError: The model would not work elsewhere, holds a secret, or the Hub refuses it.
    """
    assert published.repo is not None
    record = record_of(run)
    if record and not record.get("finished"):
        fix = "continue it with --resume, or export a checkpoint and push that"
        raise SkilltrainError("this training has not finished", where=run, fix=fix)
    if not record and (form or published.license or published.reports):
        fix = "give --form, --license and --report to `skilltrain export`"
        raise SkilltrainError("is no training's folder, and is pushed as it is", where=run, fix=fix)
    for name in (CHECKPOINT_FILE, "config.json", "README.md"):
        if not (run / name).is_file():
            fix = "give a finished training run, or an export of one (without --adapter)"
            raise SkilltrainError(f"holds no model to push: no {name}", where=run, fix=fix)
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        folder = Path(scratch) / "model"
        if record:
            export_run(run, folder, published=published, form=form)
        else:
            copy_model(run, folder)
            rename_model(folder / "README.md", published.repo)
        check_round_trip(folder)
        paths = {name: folder / name for name in read_json(folder / CHECKPOINT_FILE)["files"]}
        _check_no_secret(paths)
        sizes = {name: path.stat().st_size for name, path in paths.items()}
        card = paths["README.md"].read_text(encoding="utf-8")
        url = None if only_plan else _upload(paths, published.repo, public, into_existing)
    return {"url": url, "files": sizes, "card": card}


@torch.inference_mode()
def check_round_trip(folder: Path) -> None:
    """Check that plain sentence-transformers computes what the model does, also for cut texts.

    Raises:
        SkilltrainError: It cannot open the folder, or gives other scores.
    """
    model = open_model(folder)
    is_late = read_json(folder / CHECKPOINT_FILE).get("form") == "multi_vector"
    if isinstance(model, Reranker):
        outputs = [model(model.tokenize(query, _PROBE_SKILLS)) for query in _PROBE_QUERIES]
    else:
        texts = model.tokenize_queries(_PROBE_QUERIES) + model.tokenize_skills(_PROBE_SKILLS)
        rows = [model.with_tokens([ids], len(ids))[0] for ids in texts]
        outputs = [vectors[1:] if is_late else vectors[0] for vectors in rows]
    try:
        plain = torch.cat([*_plain_outputs(model, str(folder), is_late)])
        difference = (torch.cat(outputs) - plain.float()).abs().max().item()
    except Exception as error:  # its readers raise anything
        fault = f"plain sentence-transformers cannot open it: {printable(str(error), 200)}"
        raise SkilltrainError(fault, where=folder.name, fix="nothing was sent") from error
    is_half = read_json(folder / "config.json").get("dtype") == "bfloat16"
    if not difference <= (0.1 if is_half else 1e-4):  # NaN, too; logits reach some tens
        fault = (
            f"gives other scores in plain sentence-transformers: they differ by {difference:.2g}"
        )
        fix = "nothing was sent; please report this"
        raise SkilltrainError(fault, where=folder.name, fix=fix)


def _plain_outputs(model: Encoder | Reranker, folder: str, is_late: bool) -> Iterable[Tensor]:
    """Scores by query of a reranker; vectors of queries, then skills of an encoder."""
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

    texts = [model.settings.template.skill.render(skill) for skill in _PROBE_SKILLS]
    if isinstance(model, Reranker):
        pairs = [(query, text) for query in _PROBE_QUERIES for text in texts]
        scores = CrossEncoder(folder, device="cpu").predict(pairs, convert_to_tensor=True)
        return scores[None]
    plain = (MultiVectorEncoder if is_late else SentenceTransformer)(folder, device="cpu")
    rows = [*plain.encode_query([*_PROBE_QUERIES]), *plain.encode_document(texts)]
    return [torch.as_tensor(row) for row in rows]


def _check_no_secret(paths: Mapping[str, Path]) -> None:
    """Raise SkilltrainError for a text file that holds what looks like a real key or password."""
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8") if path.suffix in _TEXT_SUFFIXES else ""
        spans = [*secrets_in(text), *(match.span() for match in _URL_PASSWORD.finditer(text))]
        for start, end in spans:
            fault = f"holds what looks like a secret: {show_beginning(text[start:end])}"
            fix = "take it out of the recipe, and revoke it; nothing was sent"
            raise SkilltrainError(fault, where=name, fix=fix)


def _upload(paths: Mapping[str, Path], repo: str, public: bool, into_existing: bool) -> str:
    """Send all files in one commit; return the repository's address."""
    from huggingface_hub import (
        CommitOperationAdd,
        CommitOperationDelete,
        HfApi,
        get_token,
        set_client_factory,
    )
    from huggingface_hub.utils import logging

    set_client_factory(_limited_client)
    logging.set_verbosity_error()  # a warning of the Hub may hold the token
    api = HfApi(library_name="skilltrain")
    url = f"{api.endpoint}/{repo}"
    try:
        with warnings.catch_warnings(action="ignore"):  # as above
            old_names = _open_repository(api, repo, public, into_existing)
            say(f"{url}: uploading")
            # upload_folder would cut many files into several commits.
            changes = [CommitOperationAdd(name, path) for name, path in paths.items()]
            changes += [CommitOperationDelete(name) for name in sorted(old_names - {*paths})]
            api.create_commit(repo, changes, commit_message="Upload a model of skilltrain")
    except SkilltrainError:
        raise
    except Exception as error:  # a broken Hub makes the client raise anything
        message = getattr(error, "server_message", None) or str(error) or type(error).__name__
        message = message.replace(get_token() or "[key]", "[key]")
        fault = f"cannot upload: {printable(message, 200)}"
        fix = (
            "HF_TOKEN must be a token that may write there; else try again: nothing is half-written"
        )
        raise SkilltrainError(fault, where=repo, fix=fix) from None  # --debug would show the token
    return url


def _limited_client() -> Any:
    """Make the Hub's own HTTP client, with time limits."""
    import httpx2
    from huggingface_hub.utils._http import default_client_factory

    client = default_client_factory()
    client.timeout = httpx2.Timeout(_HUB_SECONDS, connect=_CONNECT_SECONDS)
    return client


def _open_repository(api: Any, repo: str, public: bool, into_existing: bool) -> set[str]:
    """Create a repository, or check an existing one; return the names of its files.

    Raises:
        SkilltrainError: It holds something else than a model of skilltrain, or is not as public as
            it should be.
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
    if names == {"README.md"} and not into_existing:
        fix = "add --into-existing to replace it, or choose another --repo"
        raise SkilltrainError("the repository exists and holds a README.md", where=repo, fix=fix)
    if names - {"README.md"} and CHECKPOINT_FILE not in names:
        fault = "the repository is taken: it holds something else than a model of skilltrain"
        raise SkilltrainError(fault, where=repo, fix="choose another --repo")
    if public and info.private:
        fix = "make it public on its page, or push without --public"
        raise SkilltrainError("the repository is private, and stays so", where=repo, fix=fix)
    if not public and not info.private:
        fix = "add --public, or choose another --repo"
        raise SkilltrainError("the repository is public", where=repo, fix=fix)
    return names
