"""Convert a GGUF file into a model of the library.

  mlxd import SmolLM2-360M-Instruct.Q8_0.gguf
  mlxd import model.gguf --name my/model --dtype keep

Tensor types F32, F16, BF16, Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, the k-quants Q2_K to Q6_K and MXFP4 are read. The
type `auto` picks what is fastest here: float32 on mlx's CPU backend, the file's own quantization elsewhere; `keep`
keeps the quantization. Where MLX has not the like (Q6_K, Q3_K, Q2_K) it quantizes anew, and says what that loses.
"""

import argparse
import re
from pathlib import Path

from parent.commands import options
from parent.commands.importing import run_with_progress
from parent.commands.running import require_not_served
from parent.commands.terminal import confirm
from parent.library.roots import models_dir
from shared.errors import ErrorCode, refuse
from shared.jobs import ImportGguf

DTYPES = ("auto", "keep", "float32", "float16", "bfloat16")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})?")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.gguf", type=options.name, help="the file to convert")
    parser.add_argument("--name", help="name in the library, NAME or ORG/NAME (default: the file's)")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="type to convert to (default auto)")
    parser.add_argument("--yes", action="store_true", help="replace a model of that name without asking")
    options.add_settings(parser)


def run(args: argparse.Namespace) -> int:
    settings = options.settings_of(args)
    try:
        source = Path(args.file).expanduser().absolute()
        found = source.is_file()
    except (OSError, RuntimeError):  # too long for a path, or ~somebody who is not here
        source, found = Path(args.file), False
    if not found:
        raise refuse(ErrorCode.INVALID_REQUEST, f"there is no file {source}")
    name = args.name if args.name is not None else re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem).strip("-._")
    if not _NAME.fullmatch(name):
        raise refuse(
            ErrorCode.INVALID_REQUEST,
            f"{name!r} cannot be a model's name; use letters, digits, '.', '-', '_' and at most one '/'",
        )
    output = models_dir(settings.data_dir) / name
    if output.exists():
        require_not_served(settings.data_dir, output, name)
        confirm(f"There is a model {name} already. Replace it?", yes=args.yes)
    output.parent.mkdir(parents=True, exist_ok=True)
    spec = ImportGguf(source=str(source), name=name, dtype=args.dtype, origin=source.name)
    done = run_with_progress(settings, spec, output)
    print(done.summary or f"{name} is ready: {output}")
    return 0
