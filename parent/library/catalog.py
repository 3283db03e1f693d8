"""The models below `data_dir/models`: which there are, their facts and names, and who is meant by a name.

A model is a folder `NAME` or `ORG/NAME`; folders with a leading dot are unfinished work and never seen. A
broken model is listed with its error, not hidden. Reads headers and small JSON files, never a tensor.
"""

import difflib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from parent.library.families import config_fault, family_fault
from shared.checkpoint import inspect, kv_bytes_per_token
from shared.errors import ErrorCode, Refused, refuse


class Card(msgspec.Struct, frozen=True, omit_defaults=True):
    """`mlxd.json` in a model folder: what an import knew and the checkpoint itself does not say."""

    name: str = ""
    aliases: list[str] = []
    origin: str = ""
    dtype: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder. With `error` set the facts are empty and it cannot be served."""

    id: str
    path: Path
    aliases: list[str] = []
    family: str = ""
    bytes: int = 0
    context: int = 0
    dtype: str = ""
    quantization: str = ""
    kv_bytes_per_token: int = 0  # at float32 on a CPU, else at 16 bit
    origin: str = ""
    note: str = ""  # why this dtype, in a few words
    error: str = ""
    unsupported: bool = False  # with `error`: nothing is wrong with the files, mlxd cannot serve such a model


def models_dir(data_dir: Path) -> Path:
    """Where finished models lie."""
    return data_dir / "models"


def scan(data_dir: Path) -> list[ModelEntry]:
    """Every model of the library, by id."""
    root = models_dir(data_dir)
    return [read_entry(folder, folder.relative_to(root).as_posix()) for folder in _model_folders(root)]


def _model_folders(root: Path) -> Iterator[Path]:
    for folder in _visible_folders(root):
        if _looks_like_a_model(folder):
            yield folder
        else:  # an organisation
            yield from (inner for inner in _visible_folders(folder) if _looks_like_a_model(inner))


def _visible_folders(root: Path) -> list[Path]:
    try:
        return sorted(item for item in root.iterdir() if item.is_dir() and not item.name.startswith("."))
    except OSError:  # absent, removed meanwhile, or not ours to read: nothing to list
        return []


def _looks_like_a_model(folder: Path) -> bool:
    if (folder / "config.json").exists() or (folder / "mlxd.json").exists():
        return True
    return any(folder.glob("*.safetensors"))


def read_entry(folder: Path, model_id: str) -> ModelEntry:
    """The facts of one model folder; a fault becomes `error`."""
    card = Card()
    try:
        card = _read_card(folder)
        facts = inspect(folder)
        if fault := family_fault(facts.model_type):
            raise refuse(ErrorCode.UNSUPPORTED, fault)
        if fault := config_fault(facts.config):
            raise refuse(
                ErrorCode.BAD_CHECKPOINT, f"{folder / 'config.json'}: {fault}; download the model again"
            )
    except Refused as refused:
        unsupported = refused.failure.code == ErrorCode.UNSUPPORTED
        return _unusable(folder, model_id, card, str(refused), unsupported=unsupported)
    except Exception as error:  # files of strangers: whatever they hold, the other models must be listed
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return _unusable(
            folder, model_id, card, f"{folder}: not understood ({problem}); download the model again"
        )
    dtype = float_type(facts.dtypes)
    return ModelEntry(
        id=model_id,
        path=folder,
        aliases=_aliases(card, model_id),
        family=facts.model_type,
        bytes=facts.weights_bytes,
        context=facts.context,
        dtype=dtype,
        quantization=facts.quantization,
        kv_bytes_per_token=kv_bytes_per_token(facts, 4 if runs_in_float32() else 2),
        origin=card.origin,
        note=dtype_note(dtype, facts.quantization, float32=runs_in_float32()),
    )


def _unusable(
    folder: Path, model_id: str, card: Card, error: str, *, unsupported: bool = False
) -> ModelEntry:
    aliases = _aliases(card, model_id)
    return ModelEntry(id=model_id, path=folder, aliases=aliases, error=error, unsupported=unsupported)


_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def float_type(dtypes: Mapping[str, int]) -> str:
    """The float type that most bytes have (of a quantized model: the scales'); "" without any."""
    floats = {name: size for name, size in dtypes.items() if name in _FLOAT_TYPES}
    return _FLOAT_TYPES[max(floats, key=lambda name: floats[name])] if floats else ""


def _read_card(folder: Path) -> Card:
    try:
        return msgspec.json.decode((folder / "mlxd.json").read_bytes(), type=Card)
    except FileNotFoundError:
        return Card()
    except (OSError, msgspec.MsgspecError) as error:
        problem = f"{folder / 'mlxd.json'} cannot be read ({error}); repair or delete that file"
        raise refuse(ErrorCode.BAD_CHECKPOINT, problem) from None


def _aliases(card: Card, model_id: str) -> list[str]:
    names = [card.name, *card.aliases]
    return [name for name in dict.fromkeys(names) if name and name != model_id]


def runs_in_float32() -> bool:
    """mlx's CPU backend, our Linux default, is fastest and exact in float32."""
    return sys.platform != "darwin"


def dtype_note(dtype: str, quantization: str, *, float32: bool) -> str:
    """Why a model of this type is as it is, or what happens to it when it is served here."""
    if not float32:
        return ""
    if quantization:
        return "served with float32 scales and activations: on the CPU 16-bit ones are slow and inexact"
    if dtype == "float32":
        return "float32 is the fastest type on mlx's CPU backend; 4-bit with float16 scales takes 100 times as long"
    return "widened to float32 when served, the fastest type on mlx's CPU backend"


def resolve(name: str, entries: list[ModelEntry]) -> ModelEntry:
    """The model meant by an id, an alias, the last part of an id, or the path of a model folder.

    Raises `Refused` (model_not_found) with near matches, or naming the candidates of an unclear name.
    """
    if not name.strip():  # as a path it would be the current folder
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND, "the model's name is empty; `mlxd ls` lists names", param="model"
        )
    for entry in entries:
        if name == entry.id or name in entry.aliases:
            return entry
    wanted = name.casefold()
    matches = [entry for entry in entries if wanted in _short_names(entry)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        meant = ", ".join(entry.id for entry in matches)
        raise refuse(
            ErrorCode.MODEL_NOT_FOUND, f"{name!r} may mean {meant}; write the whole name", param="model"
        )
    if folder := folder_of(name):
        return read_entry(folder, folder.name)
    raise refuse(ErrorCode.MODEL_NOT_FOUND, _not_found(name, entries), param="model")


def folder_of(name: str) -> Path | None:
    """The folder that `name` is the path of, if there is one."""
    try:
        folder = Path(name).expanduser().absolute()
        return folder if name.strip() and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, or ~somebody who is not here
        return None


def _short_names(entry: ModelEntry) -> list[str]:
    whole = [entry.id, *entry.aliases]
    return [name.casefold() for name in (*whole, *(name.rpartition("/")[2] for name in whole))]


def _not_found(name: str, entries: list[ModelEntry]) -> str:
    if "/" in name and name.startswith((".", "/", "~")):
        return f"there is no model folder {name}"
    if not entries:
        return f"there is no model {name!r}, and none at all yet; `mlxd pull starter` fetches one"
    names = [known for entry in entries for known in (entry.id, *entry.aliases)]
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
    if near:
        return f"there is no model {name!r}; did you mean {' or '.join(near)}?"
    return f"there is no model {name!r}; there is {', '.join(entry.id for entry in entries)}"


def default_entry(entries: list[ModelEntry]) -> ModelEntry:
    """The model to serve when none was named: the starter, else the only one that can be served.

    Raises `Refused` when there is none or the choice is not obvious.
    """
    usable = [entry for entry in entries if not entry.error]
    if len(usable) == 1:
        return usable[0]
    for entry in usable:
        if "starter" in entry.aliases:
            return entry
    if not usable:
        broken = f"; {entries[0].id} is broken: {entries[0].error}" if entries else ""
        message = f"there is no model to serve{broken}; `mlxd pull starter` fetches one"
        raise refuse(ErrorCode.MODEL_NOT_FOUND, message, param="model")
    names = ", ".join(entry.id for entry in usable)
    raise refuse(ErrorCode.MODEL_NOT_FOUND, f"there are several models; name one of {names}", param="model")
