"""The facts of one model folder, from its headers and small JSON files; a tensor is never read.

A broken model is an entry with its error, not a hidden one.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from parent.library.families import Support, config_fault, family_fault, foreign_config, support_of
from parent.library.roots import Root
from parent.library.signature import signature_of
from shared.checkpoint import Checkpoint, inspect, kv_bytes_per_token, tensors_of
from shared.encoders import Kind
from shared.errors import ErrorCode, Refused, refuse
from shared.files import decode_json, read_regular
from shared.kv_layout import kv_bytes, kv_layers
from shared.providers import mlx_lm_version

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class Card(msgspec.Struct, frozen=True, omit_defaults=True):
    """`mlxd.json` in a model folder: what an import knew and the checkpoint itself does not say."""

    name: str = ""
    aliases: list[str] = []
    origin: str = ""
    dtype: str = ""


class ModelEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One model folder. With `error` set it cannot be served; of a broken one the facts are empty."""

    id: str
    path: Path
    aliases: list[str] = []  # of its card; those of the settings file are the library's to know
    root: Root = "own"
    revision: str = ""  # the commit, of a model in the Hugging Face cache
    refs: list[str] = []  # the branches and tags there that point to it
    family: str = ""
    kind: Kind = "chat"  # what it was made for
    modalities: list[str] = []
    bytes: int = 0
    context: int = 0
    dtype: str = ""
    dtypes: dict[str, int] = {}  # safetensors dtype name to payload bytes
    quantization: str = ""
    kv_bytes_per_token: int = 0  # at float32 on a CPU, else at 16 bit
    origin: str = ""
    note: str = ""  # why this dtype, in a few words
    error: str = ""
    unsupported: bool = False  # with `error`: nothing is wrong with the files, mlxd cannot serve such a model
    support: Support = "native"
    support_note: str = ""  # what would serve it, or why nothing does
    signature: str = ""  # another one once the model is replaced on disk
    config: dict[str, Any] = {}  # normalised, see `shared/model_config.py`


def shown(entry: ModelEntry) -> dict[str, Any]:
    """The entry as people see it in JSON: without the config, which is long."""
    fields: dict[str, Any] = msgspec.to_builtins(entry, enc_hook=str)
    del fields["config"]
    return fields


def read_entry(folder: Path, model_id: str, *, root: Root = "own", revision: str = "") -> ModelEntry:
    """The facts of one model folder; a fault becomes `error`."""
    entry = ModelEntry(
        id=model_id, path=folder, root=root, revision=revision, signature=signature_of(folder).model
    )
    try:
        card = _read_card(folder)
        entry = msgspec.structs.replace(entry, aliases=_aliases(card, model_id), origin=card.origin)
        facts = inspect(folder)
        entry = msgspec.structs.replace(
            entry,
            family=facts.model_type,
            kind=facts.kind,
            modalities=facts.modalities,
            bytes=facts.weights_bytes,
            context=facts.context,
            dtype=float_type(facts.dtypes),
            dtypes=facts.dtypes,
            quantization=facts.quantization,
        )
        if support_of(facts.model_type) != "native":
            return _foreign(entry, facts)
        if fault := config_fault(facts.config) or _layers_fault(facts):
            raise refuse(
                ErrorCode.BAD_CHECKPOINT, f"{folder / 'config.json'}: {fault}; download the model again"
            )
    except Refused as refused:
        if refused.failure.code == ErrorCode.UNSUPPORTED:
            return _unsupported(entry, str(refused))
        return _broken(entry, str(refused))
    except OSError as error:
        return _broken(entry, f"{error.filename or folder}: cannot be read ({error.strerror or error})")
    except Exception as error:  # files of strangers: whatever they hold, the other models must be listed
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return _broken(entry, f"{folder}: not understood ({problem}); download the model again")
    return msgspec.structs.replace(
        entry,
        kv_bytes_per_token=kv_bytes_per_token(facts, 4 if runs_in_float32() else 2),
        note=dtype_note(entry.dtype, facts.quantization, float32=runs_in_float32()),
        config=facts.config,
    )


def _layers_fault(facts: Checkpoint) -> str:
    held = {int(found[1]) for name in tensors_of(facts) if (found := _LAYER.search(name))}
    if not held or len(held) >= facts.config["num_hidden_layers"]:
        return ""
    return (
        f"num_hidden_layers is {facts.config['num_hidden_layers']}, but the weights hold {len(held)} layers"
    )


def _foreign(entry: ModelEntry, facts: Checkpoint) -> ModelEntry:
    """A model of a family that is not ours: what can be said of it, and the error where nothing here serves it."""
    config = foreign_config(facts.config)
    width = 4 if runs_in_float32() else 2
    entry = msgspec.structs.replace(
        entry,
        kv_bytes_per_token=kv_bytes(kv_layers(config), 1, width) if config else 0,
        note=dtype_note(entry.dtype, facts.quantization, float32=width == 4),
        config=config,
        support=support_of(entry.family),
        support_note=f"by the extra mlx-lm {mlx_lm_version()}".rstrip(),
    )
    fault = family_fault(entry.family)
    return _unsupported(entry, fault) if fault else entry


def by_another_python(entry: ModelEntry, python: str) -> ModelEntry:
    """The entry of a model that another interpreter serves: what is installed there its worker has to find out."""
    if not python or not entry.unsupported or entry.support != "extra":
        return entry
    note = f"by the extra mlx-lm, if {python} has it"
    return msgspec.structs.replace(entry, error="", unsupported=False, support_note=note)


def _unsupported(entry: ModelEntry, error: str) -> ModelEntry:
    support = entry.support if entry.support == "extra" else "unsupported"
    return msgspec.structs.replace(entry, error=error, unsupported=True, support=support, support_note=error)


def _broken(entry: ModelEntry, error: str) -> ModelEntry:
    return ModelEntry(
        id=entry.id,
        path=entry.path,
        aliases=entry.aliases,
        root=entry.root,
        revision=entry.revision,
        origin=entry.origin,
        signature=entry.signature,
        error=error,
    )


_FLOAT_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def float_type(dtypes: Mapping[str, int]) -> str:
    """The float type that most bytes have (of a quantized model: the scales'); "" without any."""
    floats = {name: size for name, size in dtypes.items() if name in _FLOAT_TYPES}
    return _FLOAT_TYPES[max(floats, key=lambda name: floats[name])] if floats else ""


def _read_card(folder: Path) -> Card:
    try:
        card: Card = decode_json(read_regular(folder / "mlxd.json"), Card)
        return card
    except FileNotFoundError:
        return Card()
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or error
        problem = f"{folder / 'mlxd.json'} cannot be read ({reason}); repair or delete that file"
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


def folder_of(name: str) -> Path | None:
    """The folder that `name` is the path of, if there is one."""
    try:
        folder = Path(name).expanduser().absolute()
        return folder if name.strip() and folder.is_dir() else None
    except (OSError, RuntimeError, ValueError):  # too long, or ~somebody who is not here
        return None


def default_entry(entries: list[ModelEntry]) -> ModelEntry:
    """The model that is meant when none was named: the starter, else the first that can chat, by id, else the first.

    Raises `Refused` (model_not_found) when there is none.
    """
    usable = [entry for entry in entries if not entry.error]
    usable.sort(key=lambda entry: (entry.kind != "chat", entry.id))
    for entry in usable:
        if "starter" in entry.aliases:
            return entry
    if usable:
        return usable[0]
    broken = f"; {entries[0].id} is broken: {entries[0].error}" if entries else ""
    message = f"there is no model to serve{broken}; `mlxd pull starter` fetches one"
    raise refuse(ErrorCode.MODEL_NOT_FOUND, message, param="model")
