"""Where a model lies. No torch here, so that a mistake is reported at once."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine.models.gguf_file import gguf_parts
from dayshift.types import DayshiftError

_FOLDER_FILES = ["*.json", "*.safetensors", "*.jinja"]


def resolve_model(model: str) -> Path:
    """Where a model lies: a GGUF file, or a folder in Hugging Face format.

    `model` is the file, the folder, a folder with one GGUF file in it, or a hub id, of which the
    snapshot is taken. Raises DayshiftError when it is none of these.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return _gguf_in(path) or path
    if path.is_file() and path.suffix == ".gguf":
        return path
    if path.is_file():
        raise DayshiftError(f"model {model} is a file, but no .gguf; give a folder, a .gguf file or a hub id")
    if path.suffix == ".gguf":
        raise DayshiftError(f"model file {model} does not exist")
    if path.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") != 1:
        raise DayshiftError(
            f"model folder {model} does not exist; "
            "give a folder, a .gguf file or a hub id such as Qwen/Qwen3-4B"
        )
    return _snapshot(model, _FOLDER_FILES, revision=None)


def pull_model(repo_id: str, *, file: str | None = None, revision: str | None = None) -> Path:
    """Fetch a model of the hub into its cache; the folder or GGUF file, as `resolve_model` takes it.

    `file`: one GGUF file (of a split one, any part), for a repository that holds several. Raises
    DayshiftError when the repository does not exist, cannot be reached or holds no model.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        names = HfApi().list_repo_files(repo_id, revision=revision)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise _not_fetched(repo_id, error) from error
    gguf_names = sorted(name for name in names if name.endswith(".gguf"))
    if file is not None and file not in gguf_names:
        raise DayshiftError(f"{repo_id} has no file {file}; GGUF files: {', '.join(gguf_names) or 'none'}")
    if file is None and "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return _snapshot(repo_id, _FOLDER_FILES, revision)
    first_parts = sorted({_first_part(name) for name in gguf_names})
    if file is None and len(first_parts) != 1:
        which = (
            f"several GGUF files; name one of them: {', '.join(first_parts)}" if first_parts else "no model"
        )
        raise DayshiftError(f"{repo_id} holds {which}")
    parts = gguf_parts(Path(_first_part(file) if file is not None else first_parts[0]))
    return _snapshot(repo_id, [part.as_posix() for part in parts], revision) / parts[0]


def _first_part(name: str) -> str:
    return gguf_parts(Path(name))[0].as_posix()


def _snapshot(repo_id: str, patterns: list[str], revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise _not_fetched(repo_id, error) from error


def _not_fetched(repo_id: str, error: Exception) -> DayshiftError:
    return DayshiftError(
        f"model {repo_id} is no folder here and could not be fetched from the hub ({type(error).__name__})"
    )


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF file that a folder holds instead of a model in Hugging Face format."""
    files = sorted(folder.glob("*.gguf"))
    if not files or (folder / "config.json").is_file():
        return None
    if len(files) > 1 and tuple(files) != gguf_parts(files[0]):
        names = ", ".join(file.name for file in files)
        raise DayshiftError(f"model folder {folder} holds {len(files)} GGUF files; give one of them: {names}")
    return files[0]
