"""Where a checkpoint and its vision-language model lie. No torch here, so that a mistake shows at once."""

from __future__ import annotations

from pathlib import Path

from dayshift.types import DayshiftError

_CHECKPOINT_FILES = ("*.json", "*.safetensors")
_VLM_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json")
BUNDLED_VLM = "vlm"


def find_checkpoint(source: str | Path) -> Path:
    """The folder `source`, or the hub's snapshot of that id. Raises DayshiftError when there is neither."""
    return _find("policy checkpoint", str(source), _CHECKPOINT_FILES)


def find_vlm(checkpoint: Path, name: str) -> Path:
    """The folder with the configuration and tokenizer of a checkpoint's vision-language model.

    A folder `vlm/` inside the checkpoint goes first, so that a checkpoint can be moved; then `name`,
    the checkpoint's `vlm_model_name`: a folder or a hub id. The VLM's own weights are never needed.
    """
    bundled = checkpoint / BUNDLED_VLM
    return bundled if bundled.is_dir() else _find("vision-language model", name, _VLM_FILES)


def _find(what: str, source: str, files: tuple[str, ...]) -> Path:
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if source.startswith((".", "~", "/")) or source.count("/") != 1:
        raise DayshiftError(
            f"{what} {source} does not exist; give a folder or a hub id such as lerobot/smolvla_base"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=list(files)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DayshiftError(
            f"{what} {source} is no folder here and could not be fetched from the hub "
            f"({type(error).__name__})"
        ) from error
