"""One file of a model, wherever the model lies: in a folder, or on the Hub and then in its cache."""

from pathlib import Path

from skilltrain.errors import SkilltrainError
from skilltrain.terminal import say

_OUT_OF_REACH: set[str] = set()
"""Models of which only the cache is asked from now on: huggingface_hub tries for 20 seconds before it gives up."""


def model_file(source: str, name: str, is_needed: bool = False) -> Path | None:
    """The file `name` of a model folder or Hub id, fetched where need be; None where the model has no such file.

    None also where the cache holds the model, has never heard of the file, and the Hub cannot be asked. Then a line
    says so: settings that are only out of reach would change every result.
    Raises SkilltrainError where neither Hub nor cache give anything of the model; and where a file that `is_needed`,
    for another one names it, is out of reach.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HFValidationError, LocalEntryNotFoundError
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()  # as `quietly` does for the model itself
    try:
        return Path(hf_hub_download(source, name, local_files_only=source in _OUT_OF_REACH))
    except HFValidationError as error:
        raise SkilltrainError("cannot load the model: this is no Hub id", where=source) from error
    except LocalEntryNotFoundError as error:  # a kind of EntryNotFoundError that says nothing about the model
        return _from_cache(source, name, is_needed, error)
    except EntryNotFoundError:
        return None
    except OSError as error:  # no such model, no access, a Hub that is out of order
        return _from_cache(source, name, is_needed, error)


def _from_cache(source: str, name: str, is_needed: bool, problem: Exception) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        reason = str(problem).strip().split("\n")[0]
        raise SkilltrainError(
            f"cannot load the model, neither from the cache nor from the Hub: {reason}", where=source
        ) from problem
    _OUT_OF_REACH.add(source)
    found = try_to_load_from_cache(source, name)
    if found is None and is_needed:
        raise SkilltrainError(f"its {name} is not in the cache, and the Hub cannot be asked", where=source)
    if found is None:  # else a path, or the mark that the Hub once said there is none
        say(f"{source}: the Hub cannot be asked for {name}; going on as if the model had none")
    return Path(found) if isinstance(found, str) else None
