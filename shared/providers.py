"""Who may serve a model: our own graphs, or the model classes of another package that a worker imports. Pure.

A provider is chosen from the config alone, before any weight is opened, and one that is asked for and missing is an
error. The parent never imports one: it knows from its metadata whether the package is there.
"""

from importlib import metadata

PROVIDERS = ("auto", "native", "mlx-lm")
"""Values of the setting `provider`. `auto`: native where the family is ours, else mlx-lm where it is installed."""

INSTALL = "pip install 'mlxd[mlx-lm]'"

# fmt: off
MLX_LM_FAMILIES = frozenset({
    "Klear", "afm7", "afmoe", "apertus", "baichuan_m1", "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "bitnet",
    "cohere", "cohere2", "dbrx", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5",
    "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon_h1", "falcon_mamba", "gemma", "gemma2", "gemma3",
    "gemma3_text", "gemma3n", "gemma4", "gemma4_text", "gemma4_unified", "glm", "glm4", "glm4_moe", "glm4_moe_lite",
    "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoe", "granitemoehybrid",
    "helium", "hunyuan", "hunyuan_v1_dense", "internlm2", "internlm3", "iquestcoder", "iquestloopcoder", "jamba",
    "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_linear", "kimi_vl", "lfm2", "lfm2-vl", "lfm2_moe", "lille-130m",
    "llama", "llama4", "llama4_text", "llava", "longcat_flash", "longcat_flash_ngram", "mamba", "mamba2", "mellum",
    "mimo", "mimo_v2_flash", "minicpm", "minicpm3", "minimax", "minimax_m2", "ministral3", "mistral", "mistral3",
    "mistral4", "mixtral", "nanochat", "nemotron", "nemotron-nas", "nemotron_h", "olmo", "olmo2", "olmo3",
    "olmo_hybrid", "olmoe", "openelm", "phi", "phi-msft", "phi3", "phi3small", "phimoe", "phixtral", "pixtral",
    "plamo", "plamo2", "plamo3", "qwen", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen2_vl", "qwen3", "qwen3_5",
    "qwen3_5_moe", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "recurrent_gemma", "rwkv7", "seed_oss",
    "smollm3", "solar_open", "stablelm", "starcoder2", "step3p5", "telechat3", "xverse", "youtu_llm",
})
"""`model_type`s that mlx-lm 0.32 has; the text half of those that see or hear."""

MLX_VLM_FAMILIES = frozenset({
    "idefics2", "idefics3", "llava_next", "mllama", "paligemma", "smolvlm",
})
"""`model_type`s that only mlx-vlm is known to have, which is no provider here."""
# fmt: on


def mlx_lm_version() -> str:
    """The version of mlx-lm that is installed beside this interpreter; "" without one. Imports nothing of it."""
    try:
        return metadata.version("mlx-lm")
    except metadata.PackageNotFoundError:
        return ""


def mlx_lm_has(family: str) -> bool:
    """Whether mlx-lm is known to have this `model_type`, or the installed one has a module of that name."""
    if family in MLX_LM_FAMILIES:
        return True
    try:
        listed = metadata.files("mlx-lm") or []
    except metadata.PackageNotFoundError:
        return False
    return any(file.parts == ("mlx_lm", "models", f"{family}.py") for file in listed)
