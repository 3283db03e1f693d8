"""Train an adapter on a model: LoRA or DoRA, by sft, dpo or orpo.

  mlxd finetune starter my-data
  mlxd finetune starter my-data --iters 200 --rank 16 --name my-adapter
  mlxd finetune starter my-data --detach

A data set is a folder with `train.jsonl`, by its name below `datasets` of the data folder (or of dataset_dirs). Where a
server runs it does the work, and goes on with it after a restart; requests come first.
"""

import argparse

from parent.commands import options, submitting
from shared.lab import Finetune


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", type=options.name, help="its name in `mlxd ls`")
    parser.add_argument("data", metavar="DATA", type=options.name, help="the data set, by name or path")
    submitting.add_fields(parser, Finetune, ("model", "data"))


def run(args: argparse.Namespace) -> int:
    body = {"model": args.model, "data": submitting.as_path(args.data)}
    return submitting.begin(args, "finetune", body | submitting.given_fields(args))
