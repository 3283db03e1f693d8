"""Jobs of the lab: quantize, fine-tune, fuse, merge, data sets, measurements, uploads. One Struct a kind.

The Struct of a kind is its form, its validation and its wire format. Paths are absolute: the parent resolves names of
models, adapters and data sets before it makes a spec.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Bits = Literal[2, 3, 4, 5, 6, 8]
Mode = Literal["affine", "mxfp4", "mxfp8", "nvfp4"]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class Quantize(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="quantize"):
    """Quantize a model directory to another, shard by shard.

    `bits`, `group_size` None: what `mode` has, 4 in groups of 64 if that is affine. `target_bpw`: bits a weight on
    average, of the whole model; then each module gets one of `candidate_bits` by how much it matters, else all get
    `bits`. `calibration`: a text or JSONL file ("" = the text that comes along), of which `num_calibration` pieces of
    `calibration_tokens` are looked at. `rotate`: turn the residual stream by a random Hadamard matrix of
    `rotation_seed` first. `measure`: tell KL and perplexity against the source in the model card.
    """

    model: str  # path of the model directory
    model_id: str = ""  # for the card
    mode: Mode = "affine"
    bits: Bits | None = None
    group_size: Literal[16, 32, 64, 128] | None = None
    target_bpw: Annotated[float, Meta(gt=1, le=16)] | None = None
    candidate_bits: Annotated[list[Bits], Meta(min_length=2)] = msgspec.field(default_factory=lambda: [4, 8])
    calibration: str = ""
    num_calibration: Annotated[int, Meta(ge=1, le=1024)] = 4
    calibration_tokens: Annotated[int, Meta(ge=16, le=8192)] = 128
    rotate: bool = False
    rotation_seed: Annotated[int, Meta(ge=0, lt=2**32)] = 42
    measure: bool = True


class Finetune(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="finetune"):
    """Train an adapter on a frozen model, quantized or not.

    `data`: a folder with `train.jsonl` and perhaps `valid.jsonl`. `rank_scaling`: "by_bits" gives modules of few bits
    more rank. `num_layers`: of the last ones, -1 = all. `learning_rate` None: 2e-4 (sft), 5e-5 (dpo), 1e-5 (orpo).
    `sft_scope`: loss over the whole text, or the response alone. `segment_size`: layers of one piece of a backward pass
    in pieces, 0 = in one. `steps_per_save`: of checkpoints that a resumed run goes on from.
    """

    model: str  # path of the model directory
    model_id: str = ""
    data: str
    method: Literal["sft", "dpo", "orpo"] = "sft"
    kind: Literal["lora", "dora"] = "lora"
    rank: Annotated[int, Meta(ge=1, le=1024)] = 8
    scale: Annotated[float, Meta(gt=0)] = 1.0
    rank_scaling: Literal["constant", "by_bits"] = "constant"
    rs_lora: bool = False
    lora_dropout: Share = 0.0
    lora_plus_ratio: Annotated[float, Meta(gt=0)] = 1.0
    target_modules: list[str] = []  # leaf names; [] = all projections of attention and MLP
    num_layers: Annotated[int, Meta(ge=-1)] = -1
    iters: Positive = 100
    batch_size: Positive = 1
    grad_accumulation_steps: Positive = 1
    learning_rate: Annotated[float, Meta(gt=0)] | None = None
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_iters: Annotated[int, Meta(ge=0)] = 0
    weight_decay: Annotated[float, Meta(ge=0)] = 0.01
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 1.0  # 0 = off
    max_seq_length: Annotated[int, Meta(ge=8)] = 512
    seed: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    steps_per_report: Positive = 10
    steps_per_eval: Annotated[int, Meta(ge=0)] = 50  # 0 = never
    steps_per_save: Annotated[int, Meta(ge=0)] = 50
    val_max_examples: Annotated[int, Meta(ge=0)] = 256
    grad_checkpoint: bool = False
    segment_size: Annotated[int, Meta(ge=0)] = 0
    sft_scope: Literal["full", "response"] = "full"
    dpo_beta: Annotated[float, Meta(gt=0)] = 0.1
    orpo_lambda: Annotated[float, Meta(ge=0)] = 0.1
    head_chunk: Annotated[int, Meta(ge=0)] = 0  # tokens whose logits are held at once; 0 = all
    save_checkpoints: bool = False  # keep an adapter of every evaluation, each mountable
    warm_start_adapter: str = ""  # path of an adapter to begin with
    like_mlx_lm: bool = False  # batches and targets as mlx_lm.lora has them, see docs/lab.md


class Fuse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fuse"):
    """Add adapters to the weights of a model: a new model directory. `dequantize`: leave the weights in 16 bits."""

    model: str
    model_id: str = ""
    adapters: Annotated[list[str], Meta(min_length=1)]  # paths, added in order
    dequantize: bool = False


class MergeAdapters(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="merge_adapters"):
    """One adapter out of several, exactly: ranks laid side by side, each with its own factor."""

    adapters: Annotated[list[str], Meta(min_length=2)]  # paths
    factors: list[float] = []  # [] = all 1


class Dataset(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="dataset"):
    """Build a data set by a template of `shared/lab_templates.py`, whose fields are `inputs`.

    `url`: of the server that answers where the template asks a model; `streams`: requests at once. `deduplicate`: keep
    one of rows whose texts are the same but for case, white space and punctuation.
    """

    template: str
    inputs: dict[str, Any] = {}
    model: str = ""  # a name, as clients of the server write it; "" = its default
    seed: Annotated[int, Meta(ge=0)] = 42
    url: str = ""
    deduplicate: bool = True
    temperature: Annotated[float, Meta(ge=0, le=5)] = 0.7
    max_tokens: Positive = 512  # of an answer
    streams: Annotated[int, Meta(ge=1, le=64)] = 4


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="evaluate"):
    """Perplexity of a model on a text, and KL against another one; tasks of lm-evaluation-harness where named.

    `url`: of the server that the tasks are asked of, `task_limit`: questions of each, 0 = all.
    """

    model: str  # path
    model_id: str = ""
    adapter: str = ""  # path
    reference: str = ""  # path of the model to compare with; "" = perplexity alone
    data: str = ""  # a text, or a folder or file of JSONL; "" = the text that comes along
    num_samples: Positive = 32
    sequence_length: Annotated[int, Meta(ge=16)] = 512
    tasks: list[str] = []
    task_limit: Annotated[int, Meta(ge=0)] = 0
    url: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0


class Benchmark(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="benchmark"):
    """Tokens a second of a served model, over sizes of prompts and numbers of streams."""

    model: str  # a name, as clients of the server write it
    prompt_tokens: Annotated[list[Positive], Meta(min_length=1)] = msgspec.field(
        default_factory=lambda: [128, 1024]
    )
    completion_tokens: Positive = 64
    streams: Annotated[list[Positive], Meta(min_length=1)] = msgspec.field(default_factory=lambda: [1, 4])
    rounds: Positive = 3
    url: str = ""
    seed: Annotated[int, Meta(ge=0)] = 0


class Push(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="push"):
    """Upload a folder that a job made to a repository of the hub. Token and endpoint come from the environment."""

    folder: str  # path
    repo: str  # org/name
    private: bool = True
    kind: Literal["model", "dataset"] = "model"


LabSpec = Quantize | Finetune | Fuse | MergeAdapters | Dataset | Evaluate | Benchmark | Push
