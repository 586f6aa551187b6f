"""Routers on the Hugging Face Hub: push the folder of a router, and download it again."""

import shutil
import tempfile
from collections import Counter
from pathlib import Path
from time import sleep
from typing import Any

from skilltrain.arguments import path_of
from skilltrain.data.pool.read import HF_PREFIX
from skilltrain.data.screening import screen_pool
from skilltrain.errors import SkilltrainError
from skilltrain.export.card import Published, write_card
from skilltrain.export.push import PushOptions, RepositoryKind, push_files
from skilltrain.files import LOCAL_FILE, cache_folder, staged_folder, write_text
from skilltrain.models.loading import download_files, model_files
from skilltrain.serving.index import (
    DOWNLOADS,
    LOCAL_PREFIX,
    POINTER,
    RECORD,
    Index,
    current_generation,
    from_stored_path,
)
from skilltrain.terminal import say
from skilltrain.workers import WorkersConfig

_ROUTER = RepositoryKind("router", "model", POINTER)
_CARD = Path(__file__).with_name("router_card.md.j2")
# Files of routers and of their models. Only formats that cannot run code are downloaded. The file
# tokens.bin holds plain numbers: the vectors of tokens. The file flags.parquet is a table.
_PATTERNS = ["*.json", "*.txt", "*.model", "*.safetensors", "*.arrow", "*.npy"]
_PATTERNS += ["index-*/part-*/tokens.bin", "index-*/flags.parquet"]


def push_router(router: Path, published: Published, options: PushOptions) -> dict[str, Any]:
    """Upload a router with its models and a card to the repository `published.repo` on the Hub.

    Args:
        router: Folder of the router.
        published: Name and licence of the repository.
        options: How to write to the repository.

    Returns:
        `url` (None if nothing was sent), `files` (size in bytes by name) and `card`.

    Raises:
        SkilltrainError: The router or one of its models is damaged, a skill holds a secret, or the
            Hub refuses the upload.
    """
    index = Index.open(router)
    index.check_models()
    # The file of a prompt is not uploaded, so the router could not be opened elsewhere.
    if index.record.prompt_files:
        problem = "a ranker reads its prompt from a file, which only this machine has"
        fix = "make a router whose rankers have no prompt file"
        raise SkilltrainError("conflicting-settings", problem, where=router, fix=fix)
    skills = [*index.skills.values()]
    # Rerankers need the bodies of skills, and the indexes hold words of the bodies. So a router
    # whose skills have bodies cannot be pushed with `no_bodies`.
    if options.no_bodies and any(skill.body for skill in skills):
        problem = "its skills have bodies, and its indexes hold their words"
        fix = "make a router of a pool without bodies"
        raise SkilltrainError("private-bodies", problem, where=router, fix=fix)
    rule_flags = screen_pool(skills, WorkersConfig())
    with tempfile.TemporaryDirectory(prefix="skilltrain-push-") as scratch:
        paths = _collect_files(index, Path(scratch))
        paths["README.md"] = Path(scratch, "README.md")
        write_card(
            paths["README.md"],
            _CARD,
            published=published,
            record=index.record,
            licenses=Counter(skill.license for skill in skills),
            num_flagged=len({*rule_flags, *index.findings}),
        )
        return push_files(paths, published, options, _ROUTER)


def _collect_files(index: Index, scratch: Path) -> dict[str, Path]:
    """Return the files of a router by their name in a repository.

    Models inside and outside the router's folder are included. Those outside get a folder in
    `models`. The file of absolute paths, local.json, is left out.

    Args:
        index: Current generation of the router: a folder `index-N` with its record (index.json).
        scratch: Temporary folder, for files that differ from those of the router.

    Returns:
        Local path of each file by its name in the repository.
    """
    router = index.folder.parent
    generation = index.folder.name
    paths = {POINTER: router / POINTER}
    # `record.files` lists all files of the generation but the record itself.
    for name in index.record.files:
        paths[f"{generation}/{name}"] = index.folder / name
    record = (index.folder / RECORD).read_text(encoding="utf-8")
    for stored_path in index.record.models:
        if not stored_path.startswith(("./", LOCAL_PREFIX)):
            continue  # the model is in a package or on the Hub
        # `./` stands for the router's folder. `local:` begins a key of local.json, which has the
        # path of a folder elsewhere. For example, `local:encoder-1a2b` becomes
        # `models/encoder-1a2b`.
        name = stored_path.removeprefix("./").replace(LOCAL_PREFIX, "models/")
        # Let the JSON text of the record name the new place. The quotes make sure that only a whole
        # string is replaced.
        record = record.replace(f'"{stored_path}"', f'"./{name}"')
        folder = Path(from_stored_path(router, stored_path))
        for file in model_files(folder):
            # Code is not downloaded with a router. The model would then seem to have changed.
            if file.suffix == ".py":
                problem = "a model with Python code is not pushed with a router"
                fix = "delete the file if the model opens without it, and make the router again"
                raise SkilltrainError("remote-code", problem, where=file, fix=fix)
            paths[f"{name}/{file.relative_to(folder).as_posix()}"] = file

    # Upload the changed record instead of the router's own.
    paths[f"{generation}/{RECORD}"] = scratch / RECORD
    write_text(scratch / RECORD, record)
    return paths


def local_router(source: Path | str) -> Path:
    """Return the folder of a router. A router on the Hub is downloaded first.

    Args:
        source: Folder, or `hf:OWNER/NAME[@REVISION]`. For a router on the Hub, the returned folder
            is in skilltrain's cache.

    Raises:
        SkilltrainError: The repository has no such revision or holds no router, or neither the Hub
            nor the cache has it.
    """
    reference = str(source)
    if not reference.startswith(HF_PREFIX):
        return path_of(source, "folder")
    snapshot = download_files(reference.removeprefix(HF_PREFIX), _PATTERNS, unused_patterns=[])
    current_generation(snapshot)  # raises an error if the repository holds no router
    # The hash of the commit is the name of the folder.
    say(f"{source}: commit {snapshot.name}")
    folder = cache_folder(DOWNLOADS) / snapshot.name
    # The Hub's cache holds links to files elsewhere, which a router must not have. So copy them.
    while not folder.exists():
        try:
            with staged_folder(folder) as staged:
                # Leave out local.json, which lists absolute paths. Otherwise a stranger's router
                # could point to any folder of this machine.
                ignore = shutil.ignore_patterns(LOCAL_FILE)
                shutil.copytree(snapshot, staged, ignore=ignore, dirs_exist_ok=True)
        except (SkilltrainError, OSError) as error:
            # Another process may be copying the same router, or has just finished.
            if getattr(error, "code", "") != "folder-in-use" and not folder.exists():
                raise
            sleep(0.1)
    return folder
