"""Where a model lies. No torch here, so that a mistake is reported at once."""

from __future__ import annotations

from pathlib import Path

from dayshift.engine.models.gguf_file import gguf_parts
from dayshift.types import DayshiftError


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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DayshiftError(
            f"model {model} is no folder here and could not be fetched from the hub ({type(error).__name__})"
        ) from error


def _gguf_in(folder: Path) -> Path | None:
    """The GGUF file that a folder holds instead of a model in Hugging Face format."""
    files = sorted(folder.glob("*.gguf"))
    if not files or (folder / "config.json").is_file():
        return None
    if len(files) > 1 and tuple(files) != gguf_parts(files[0]):
        names = ", ".join(file.name for file in files)
        raise DayshiftError(f"model folder {folder} holds {len(files)} GGUF files; give one of them: {names}")
    return files[0]
