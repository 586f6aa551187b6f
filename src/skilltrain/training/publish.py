"""From a training run to a model folder, at its end and later from any checkpoint, and on to the Hugging Face Hub."""

import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from skilltrain.config import load_recipe, validate
from skilltrain.data.screening.secret_keys import secrets_in, show_beginning
from skilltrain.errors import SkilltrainError
from skilltrain.export import Form
from skilltrain.export.card import Published, RunRecord, model_card
from skilltrain.export.folder import copy_model, save_adapter, save_model
from skilltrain.export.forms import open_model, write_form
from skilltrain.files import read_json, staged_folder, write_text
from skilltrain.models.adapters import merge_adapter
from skilltrain.models.encoder import Encoder
from skilltrain.models.loading import CHECKPOINT_FILE
from skilltrain.models.pooling import max_sim
from skilltrain.models.reranker import Reranker
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
_QUERIES = ("fill in the tax form and sign it", "deploy the web shop", "PDF 合并")
_SKILLS = (
    Skill(
        "1",
        "pdf-forms",
        "Fill in PDF forms",
        "Read the form's fields, then write the values. " * 200,
    ),
    Skill("2", "deploy", "Deploy to Kubernetes", "Build the image, then roll it out."),
)
_TEXT = {".json", ".jinja", ".md", ".txt", ".xml"}


def save_trained(
    config: TrainConfig,
    checkpoint: Path,
    out: Path,
    summary: Mapping[str, Any],
    interpolate: float | None = None,
) -> None:
    """Save the model of a checkpoint with its card, its adapter merged. On the CPU: the GPU may still hold the model.

    `interpolate` is the share of its weights in a mean with the base's.
    """
    model = _model_at(config, checkpoint)
    if interpolate is not None:
        _mix_with_base(model, config, interpolate)
    if config.adapter is not None:
        merge_adapter(model.network)
    card = model_card(
        RunRecord(model.settings, config.model_dump(mode="json"), summary, run=config.out)
    )
    save_model(model.eval(), out, config.model.source, card)


def _model_at(config: TrainConfig, checkpoint: Path) -> Encoder | Reranker:
    model = load_model(config, torch.device("cpu"))
    load_weights(model, "model", checkpoint)
    return model


def _mix_with_base(model: Encoder | Reranker, config: TrainConfig, share: float) -> None:
    """Make the weights of `model` (1 - share) x its base's + share x themselves (WiSE-FT, Wortsman et al. 2022)."""
    try:
        base = load_model(config, torch.device("cpu"), new_head=False).state_dict()
    except SkilltrainError as error:
        what = (
            f"its base has another architecture, and cannot be interpolated with it: {error.what}"
        )
        raise SkilltrainError(
            what, where=config.model.source, fix="export without --interpolate"
        ) from error
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.copy_(torch.lerp(base[name].float(), value.float(), share))


def export_run(
    run: Path,
    out: Path,
    checkpoint: str | None = None,
    interpolate: float | None = None,
    published: Published = Published(),  # noqa: B008
    form: Form | None = None,
) -> dict[str, Any]:
    """Write the model of the training in the folder `run` to the folder `out`; says which one that was.

    `checkpoint` is step-N or best; without it a finished run's own model is copied, and an unfinished run's newest
    checkpoint is used. With `interpolate` the model lies between its base and the checkpoint (WiSE-FT). `form` is
    another than the one that training saves. Raises SkilltrainError for what the run cannot give.
    """
    config, summary = _read(run)
    if published.reports and not (summary and checkpoint is None and interpolate is None):
        what = "a report is of the model that the run ended with"
        raise SkilltrainError(
            what, where="--report", fix="leave out --report, or --checkpoint and --interpolate"
        )
    if interpolate is not None:
        if not 0 <= interpolate <= 1:
            what = (
                f"must be a share from 0 (the base) to 1 (the trained model), found {interpolate}"
            )
            raise SkilltrainError(what, where="--interpolate")
        if config.adapter is not None:
            what = "trained an adapter (LoRA), and only runs that trained all weights can be interpolated"
            raise SkilltrainError(
                what, where=run, fix="train without adapter, or export without --interpolate"
            )
        checkpoint = checkpoint or summary.get("checkpoint")
    found = None if summary and checkpoint is None else _checkpoint(run, checkpoint)
    with staged_folder(out) as staged:
        exported = None
        if found is None:
            copy_model(run, staged)
        else:
            save_trained(config, found, staged, summary, interpolate)
            if interpolate is not None or summary.get("checkpoint") != found.name:
                summary, exported = {}, found.name  # its figures are not the run's
        if form is not None:
            write_form(staged, form)
        settings = open_model(staged, "meta").settings
        facts = RunRecord(
            settings, config.model_dump(mode="json"), summary, exported, interpolate, form, run
        )
        write_text(staged / "README.md", model_card(facts, published))
    return {
        "out": str(out),
        "stage": config.stage,
        "checkpoint": found.name if found else summary.get("checkpoint"),
    }


def export_adapter(run: Path, out: Path, checkpoint: str | None = None) -> dict[str, Any]:
    """Write the adapter (LoRA) of a checkpoint, by default the run's own, not merged, to the folder `out`."""
    config, summary = _read(run)
    if config.adapter is None:
        raise SkilltrainError(
            "trained all weights, no adapter", where=run, fix="export without --adapter"
        )
    found = _checkpoint(run, checkpoint or summary.get("checkpoint"))
    with staged_folder(out) as staged:
        save_adapter(_model_at(config, found), staged, config.model.source)
    return {"out": str(out), "stage": config.stage, "checkpoint": found.name}


def _read(run: Path) -> tuple[TrainConfig, Mapping[str, Any]]:
    """(settings, summary) of a run; the summary is empty while the run is not finished."""
    if not (record := record_of(run)):
        what = f"holds no run: it has no {RUN_FILE}" if run.is_dir() else "no such folder"
        raise SkilltrainError(
            what, where=run, fix="give the folder that a training wrote to (its out=…)"
        )
    recipe = load_recipe(run / RECIPE_FILE)
    if (stage := recipe.get("stage")) not in _CONFIGS:
        raise SkilltrainError(f"is a run of stage {stage}, which trains no model", where=run)
    return validate(_CONFIGS[stage], recipe, run / RECIPE_FILE), record["summary"] if record[
        "finished"
    ] else {}


def _checkpoint(run: Path, name: str | None) -> Path:
    """The checkpoint of that name, or best; the newest without a name."""
    folder = run / CHECKPOINTS
    found = {path.name: path for path in checkpoints(folder)}
    if not found:
        raise SkilltrainError(
            "holds no checkpoint",
            where=folder,
            fix="train for longer, or lower training.save_every",
        )
    chosen = best_checkpoint(folder) if name == "best" else found.get(name or [*found][-1])
    if chosen is None:
        what = "no checkpoint was marked as best" if name == "best" else f"no checkpoint '{name}'"
        raise SkilltrainError(f"{what}; there are {', '.join(found)}", where=folder)
    return chosen


def push_model(
    run: Path,
    published: Published,
    form: Form | None = None,
    public: bool = False,
    only_plan: bool = False,
) -> dict[str, Any]:
    """Upload the model of `run`, or of a folder that `export_run` wrote, to the repository `published.repo`.

    The repository becomes what the folder holds; with `only_plan` nothing is sent. Returns `url`, `files` (sizes by
    name) and `card`. Raises SkilltrainError for what others could not use or should not see.
    """
    assert published.repo is not None
    record = record_of(run)
    if record and not record.get("finished"):
        fix = "continue it with --resume, or export a checkpoint and push that"
        raise SkilltrainError("this training has not finished", where=run, fix=fix)
    if not record and (form or published.license or published.reports):
        fix = "give --form, --license and --report to `skilltrain export`"
        raise SkilltrainError("is no training's folder, and is pushed as it is", where=run, fix=fix)
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        folder = Path(scratch) / "model"
        if record:
            export_run(run, folder, published=published, form=form)
        else:
            copy_model(run, folder)
        check_round_trip(folder)
        files = {
            path.relative_to(folder).as_posix(): path
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        _check_no_secret(files)
        sizes = {name: path.stat().st_size for name, path in files.items()}
        card = files["README.md"].read_text(encoding="utf-8")
        url = None if only_plan else _upload(folder, sizes, published.repo, public)
    return {"url": url, "files": sizes, "card": card}


def check_round_trip(folder: Path) -> None:
    """Raise SkilltrainError unless plain sentence-transformers gives the model's scores: on cut texts, too."""
    model, is_late = (
        open_model(folder),
        read_json(folder / CHECKPOINT_FILE).get("form") == "multi_vector",
    )
    tolerance = (
        0.1 if read_json(folder / "config.json").get("dtype") == "bfloat16" else 1e-4
    )  # of logits of some tens
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
    asked, shown = model.tokenize_queries(_QUERIES), model.tokenize_skills(_SKILLS)
    if not is_late:
        return model(asked) @ model(shown).T
    queries, skills = (
        [model.with_tokens([text], len(text))[0, 1:] for text in some] for some in (asked, shown)
    )
    return max_sim(queries, skills)


def _plain_scores(
    model: Encoder | Reranker, place: str, is_late: bool
) -> Float[Tensor, "query skill"]:
    from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

    texts = [model.settings.template.skill.render(skill) for skill in _SKILLS]
    if isinstance(model, Reranker):
        pairs = [(query, text) for query in _QUERIES for text in texts]
        return (
            CrossEncoder(place, device="cpu")
            .predict(pairs, convert_to_tensor=True)
            .reshape(-1, len(texts))
        )
    plain = (MultiVectorEncoder if is_late else SentenceTransformer)(place, device="cpu")
    return plain.similarity(plain.encode_query([*_QUERIES]), plain.encode_document(texts))


def _check_no_secret(files: Mapping[str, Path]) -> None:
    """Raise SkilltrainError for a text file that holds what looks like a real key or a database's password."""
    for name, path in files.items():
        text = path.read_text(encoding="utf-8") if path.suffix in _TEXT else ""
        for start, end in secrets_in(text):
            what = f"holds what looks like a secret: {show_beginning(text[start:end])}"
            raise SkilltrainError(
                what, where=name, fix="take it out of the recipe, and revoke it; nothing was sent"
            )


def _upload(folder: Path, names: Collection[str], repo: str, public: bool) -> str:
    """Make the repository where need be, and one commit of all files; its address."""
    import httpx2
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api, old = HfApi(library_name="skilltrain"), set[str]()
    try:
        if api.repo_exists(repo):
            info = api.model_info(repo)
            old = {file.rfilename for file in info.siblings or ()} - {".gitattributes"}
            if old and CHECKPOINT_FILE not in old:
                what = "the repository is taken: it holds something else than a model of skilltrain"
                raise SkilltrainError(what, where=repo, fix="choose another --repo")
            if not info.private and not public:
                fix = "add --public, or choose another --repo"
                raise SkilltrainError("the repository is public", where=repo, fix=fix)
        url = api.create_repo(repo, private=not public, exist_ok=True)
        say(f"{url}: uploading")
        # Not upload_folder: it cuts many files into several commits, and what fails would be half there.
        changes = [CommitOperationAdd(name, folder / name) for name in names]
        changes += [CommitOperationDelete(name) for name in sorted(old - {*names})]
        api.create_commit(repo, changes, commit_message="Upload a model of skilltrain")
    except (OSError, ValueError, httpx2.HTTPError) as error:
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 0
        is_refusal = isinstance(error, LocalTokenNotFoundError) or status in (401, 403)
        fix = (
            "set HF_TOKEN to a token that may write there"
            if is_refusal
            else "try again: nothing is half-written"
        )
        raise SkilltrainError(
            f"cannot upload: {printable(str(error), 200)}", where=repo, fix=fix
        ) from error
    return str(url)
