"""Where a model lies. No torch here, so that a mistake is reported at once."""

from __future__ import annotations

from pathlib import Path

from dayshift.types import DayshiftError


def resolve_model(model: str) -> Path:
    """The folder of a model: `model` itself, or the hub's snapshot of that id.

    Raises DayshiftError when there is neither.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or model.startswith(("./", "../", "~")) or model.count("/") != 1:
        raise DayshiftError(
            f"model folder {model} does not exist; give a folder or a hub id such as Qwen/Qwen3-4B"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DayshiftError(
            f"model {model} is no folder here and could not be fetched from the hub ({type(error).__name__})"
        ) from error
