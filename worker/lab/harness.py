"""Tasks of lm-evaluation-harness, asked of a served model through its own client for completions.

An extra: nothing here is imported but where a job names tasks. Tasks that score given answers need the likelihood of a
prompt, which no route gives; those that let the model write (gsm8k, ifeval, …) can be run.
"""

import importlib
import math
import os
from typing import Any

from shared.errors import ErrorCode, refuse
from worker.lab import local_key

STREAMS = 4
RETRIES = 8


def require() -> Any:
    """The library. Raises `Refused` (unsupported) where it is not installed."""
    try:
        return importlib.import_module("lm_eval")
    except ImportError:
        raise refuse(
            ErrorCode.UNSUPPORTED,
            "tasks need lm-evaluation-harness, which is not installed: install mlxd[eval]",
            param="tasks",
        ) from None


def run_tasks(tasks: list[str], model: str, url: str, limit: int, seed: int) -> dict[str, float]:
    """`task/metric` to its value. `limit`: questions of each task, 0 = all. Raises `Refused`."""
    library = require()
    if not url:
        raise refuse(
            ErrorCode.INVALID_REQUEST, "tasks ask a served model: name the url of its server", param="url"
        )
    arguments = {
        "model": model,
        "base_url": f"{url.rstrip('/')}/v1/completions",
        "num_concurrent": STREAMS,
        "max_retries": RETRIES,
        "tokenizer_backend": None,
        "tokenized_requests": False,
    }
    os.environ["OPENAI_API_KEY"] = os.environ.get(local_key.NAME) or "none"  # where its client looks
    try:
        found = library.simple_evaluate(
            model="local-completions",
            model_args=arguments,
            tasks=list(tasks),
            limit=limit or None,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
    except Exception as error:  # a library of others, over data sets of others
        problem = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise refuse(
            ErrorCode.UNSUPPORTED,
            f"lm-evaluation-harness could not run {', '.join(tasks)}: {problem}; tasks that score given answers need "
            "likelihoods of prompts, which are not served",
            param="tasks",
        ) from None
    return numbers_of(found)


def numbers_of(found: Any) -> dict[str, float]:
    """The metrics of its answer: `exact_match,strict-match` of `gsm8k` is `gsm8k/exact_match,strict-match`."""
    numbers = {}
    for task, metrics in ((found or {}).get("results") or {}).items():
        for name, value in metrics.items():
            if name == "sample_len":  # how many were asked is no metric
                continue
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                numbers[f"{task}/{name.removesuffix(',none')}"] = float(value)
    return numbers
