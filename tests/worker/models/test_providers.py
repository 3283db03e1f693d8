"""Which provider serves a model, and mlx-lm's graphs under our engine against transformers and our own."""

import asyncio
import importlib.metadata
import json
import sys
from contextlib import aclosing
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from shared.errors import ErrorCode, Refused
from shared.kv_layout import kv_layers, kv_room
from shared.providers import MLX_LM_FAMILIES
from shared.wire import TextPrompt
from tests.oracles import checkpoints
from tests.worker.asking import ask, finish, ids, request, run, served
from tests.worker.models.running import greedy_of, logits_of
from worker.layers.batch import solo
from worker.models import DecoderModel, LoadedModel, load_model
from worker.providers import mlx_lm_model

TOLERANCE = 1e-4
PROMPT = checkpoints.reference("granite")["input_ids"]


def granite(folder: Path) -> Path:
    """A family that is not ours."""
    return checkpoints.write_case("granite", folder)


def gpt_oss(folder: Path) -> Path:
    """A model whose layers have a window in turns, with the constants that mlx-lm has built in."""
    config, seed = checkpoints.case("gpt_oss")
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    return checkpoints.write_model({**config, "swiglu_limit": 7.0, "rope_parameters": rope}, seed, folder)


def qwen3_5(folder: Path) -> Path:
    """A model with recurrent layers, as a multimodal checkpoint has it: mlx-lm knows no other."""
    config, seed = checkpoints.case("qwen3_5")
    checkpoints.write_model(config, seed, folder)
    inner = {**json.loads((folder / "config.json").read_text()), "full_attention_interval": 3}
    outer = {"model_type": "qwen3_5", "text_config": inner, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(outer))
    return folder


@pytest.mark.parametrize("cuts", [[], [17], [1, 2, 3, 20], list(range(1, 40))])
@pytest.mark.parametrize("name", checkpoints.foreign_names())
def test_oracle_a_family_that_is_not_ours_is_served_with_the_logits_of_transformers(
    name: str, cuts: list[int], tmp_path: Path
) -> None:
    loaded = load_model(checkpoints.write_case(name, tmp_path / name))
    assert loaded.provider == "mlx-lm"
    expected = checkpoints.reference(name)
    found = logits_of(loaded.model, expected["input_ids"], cuts)
    assert np.abs(found - expected["logits"]).max() < TOLERANCE
    assert greedy_of(loaded.model, expected["input_ids"], 16) == expected["greedy_ids"].tolist()


@pytest.mark.parametrize(
    "name", ["llama_tied", "rope_llama3", "qwen3", "qwen3_moe", "deepseek_v3", "ministral3", "smollm3"]
)
def test_oracle_a_native_family_is_the_same_through_mlx_lm(name: str, tmp_path: Path) -> None:
    """Configs are those of transformers 5, which mlx-lm alone does not understand."""
    folder = checkpoints.write_case(name, tmp_path / name)
    expected = checkpoints.reference(name)
    loaded = load_model(folder, provider="mlx-lm")
    assert isinstance(loaded.model, mlx_lm_model.MlxLmModel)
    assert np.abs(logits_of(loaded.model, expected["input_ids"], [17]) - expected["logits"]).max() < TOLERANCE
    assert load_model(folder).provider == load_model(folder, provider="native").provider == "native"


@pytest.mark.parametrize("write", [gpt_oss, qwen3_5])
def test_windows_and_recurrent_layers_agree_with_our_graphs(write, tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    theirs, ours = load_model(folder, provider="mlx-lm").model, load_model(folder).model
    for cuts in ([], [17], list(range(1, 40))):
        assert np.abs(logits_of(theirs, PROMPT, cuts) - logits_of(ours, PROMPT, cuts)).max() < TOLERANCE


def test_quantized_weights_agree_with_our_graph(tmp_path: Path) -> None:
    scheme = {"group_size": 32, "bits": 4, "mode": "affine"}
    folder = checkpoints.write_case("llama_tied", tmp_path / "q", quantize=scheme, dtype="float16")
    theirs, ours = load_model(folder, provider="mlx-lm"), load_model(folder)
    assert theirs.weights_bytes == ours.weights_bytes
    assert theirs.quantization == "affine 4-bit group 32"
    assert np.abs(logits_of(theirs.model, PROMPT, []) - logits_of(ours.model, PROMPT, [])).max() < 1e-3


@pytest.mark.parametrize("write", [gpt_oss, qwen3_5])
def test_what_a_row_is_billed_is_what_its_caches_hold(write, tmp_path: Path) -> None:
    loaded = load_model(write(tmp_path / "m"), provider="mlx-lm")
    for length in (1, 13, 40):
        caches = loaded.model.make_caches()
        run_once(loaded.model, PROMPT[:length], caches)
        held = sum(cache.nbytes for cache in caches)
        assert 0 < held <= kv_room(loaded.model.layout, length, length, 4)
    own = kv_layers(loaded.checkpoint.config)
    assert sum(one.token_values() for one in loaded.model.layout) == sum(one.token_values() for one in own)


def run_once(model: DecoderModel, tokens: np.ndarray, caches: list) -> np.ndarray:
    return np.array(model.head(model(solo(mx.array(tokens), caches))))


@pytest.mark.parametrize("write", [granite, gpt_oss, qwen3_5])
def test_a_clone_goes_its_own_way_and_what_can_be_trimmed_is(write, tmp_path: Path) -> None:
    model = load_model(write(tmp_path / "m"), provider="mlx-lm").model
    caches = model.make_caches()
    run_once(model, PROMPT[:9], caches)
    clones = [cache.clone() for cache in caches]
    once = run_once(model, PROMPT[9:20], caches)
    assert [cache.offset for cache in clones] == [9] * len(clones)
    assert np.abs(run_once(model, PROMPT[9:20], clones) - once).max() < 1e-5
    fresh = model.make_caches()
    run_once(model, PROMPT[:11], fresh)
    if not all(cache.can_trim(2) for cache in fresh):
        assert any(not cache.goes_back for cache in fresh)
        with pytest.raises(ValueError, match="cannot trim 2 of 11"):
            next(cache for cache in fresh if not cache.can_trim(2)).trim(2)
        return
    for cache in fresh:
        cache.trim(2)
    assert np.abs(run_once(model, PROMPT[9:20], fresh) - once).max() < 1e-5


def test_a_branch_counts_the_whole_buffers_that_it_shares(tmp_path: Path) -> None:
    """Until it runs a step it keeps those of the longer conversation alive."""
    model = load_model(granite(tmp_path / "m"), provider="mlx-lm").model
    caches = model.make_caches()
    run_once(model, np.arange(600) % 50, caches)
    for cache in caches:
        branch = cache.clone()
        branch.trim(590)
        assert branch.nbytes == cache.nbytes


def test_where_the_head_cannot_be_run_apart_whole_logits_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm_model, "_TRUNKS", ())
    loaded = load_model(checkpoints.write_case("granite", tmp_path / "granite"))
    assert loaded.model.trunk is None  # type: ignore[attr-defined]
    expected = checkpoints.reference("granite")
    assert np.abs(logits_of(loaded.model, PROMPT, [17]) - expected["logits"]).max() < TOLERANCE


# ---------------------------------------------------------------- under the engine


@pytest.mark.parametrize("write", [granite, gpt_oss, qwen3_5])
def test_rows_are_batched_reuse_what_was_kept_and_can_be_cancelled(write, tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    long = TextPrompt("the cat and the hat and the other hat and " * 3)

    async def body() -> None:
        async with served(
            folder,
            provider="mlx-lm",
            prefill_chunk=16,
            spill_dir=str(tmp_path / "spill"),
            spill_bytes=1 << 20,
        ) as alone:
            first = ids(await ask(alone, request("a")))
            second = ids(await ask(alone, request("b", prompt=long)))
            again = await ask(alone, request("c", prompt=long))
            assert ids(again) == second
            assert finish(again).usage.cached_tokens > 30
        async with served(folder, provider="mlx-lm", prefill_chunk=16) as pipeline:
            stream = await pipeline.prepare(request("x", prompt=long, max_tokens=300))
            async with aclosing(pipeline.run(stream)) as batches:
                async for _ in batches:
                    break  # its client leaves
            both = await asyncio.gather(ask(pipeline, request("a")), ask(pipeline, request("b", prompt=long)))
            assert [ids(one) for one in both] == [first, second]
        assert not list((tmp_path / "spill").glob("**/*.safetensors"))

    run(body)


# ---------------------------------------------------------------- the choice


def refused(folder: Path, **options: str) -> Refused:
    with pytest.raises(Refused) as caught:
        load_model(folder, **options)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture
def without_mlx_lm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where it is not installed: no metadata, no module."""
    real = importlib.metadata.Distribution.from_name

    def from_name(name: str) -> importlib.metadata.Distribution:
        if name == "mlx-lm":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", from_name)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mlx_lm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "mlx_lm", None)


@pytest.mark.usefixtures("without_mlx_lm")
def test_a_missing_provider_is_an_error_that_names_the_extra_and_no_weight_is_opened(tmp_path: Path) -> None:
    granite = checkpoints.write_case("granite", tmp_path / "granite")
    llama = checkpoints.write_case("llama_tied", tmp_path / "llama")
    for folder, options in (
        (granite, {}),
        (granite, {"provider": "mlx-lm"}),
        (llama, {"provider": "mlx-lm"}),
    ):
        error = refused(folder, **options)
        assert "pip install 'mlxd[mlx-lm]'" in str(error)
        assert sys.executable in str(error)
        assert error.failure.code is ErrorCode.UNSUPPORTED
    assert load_model(llama).provider == "native"


def test_a_provider_that_cannot_be_imported_is_told_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "mlx_lm.utils", None)
    error = refused(granite(tmp_path / "granite"))
    assert "mlx-lm is installed and cannot be imported" in str(error)
    assert error.failure.code is ErrorCode.BAD_CHECKPOINT
    assert not error.failure.is_retryable


def test_native_is_never_left_for_another(tmp_path: Path) -> None:
    error = refused(checkpoints.write_case("granite", tmp_path / "granite"), provider="native")
    assert "'granite' is not among the native ones (llama," in str(error)
    assert "choose provider mlx-lm, which has it" in str(error)


def test_a_family_that_nobody_has_is_told_where_it_was_looked_for(tmp_path: Path) -> None:
    config, seed = checkpoints.case("llama_tied")
    folder = checkpoints.write_model(config, seed, tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
    error = str(refused(folder))
    assert "'mamba9' is not among the native ones (llama, mistral" in error
    assert "has no mlx_lm/models/mamba9.py" in error


def test_an_unknown_provider_and_kv_that_it_cannot_keep_are_refused_by_name(tmp_path: Path) -> None:
    folder = checkpoints.write_case("granite", tmp_path / "granite")
    assert refused(folder, provider="vllm").failure.param == "provider"
    error = refused(folder, kv_cache="kv8")
    assert (error.failure.param, error.failure.code) == ("kv_cache", ErrorCode.UNSUPPORTED)


def test_what_mlx_lm_makes_of_a_broken_checkpoint_is_said_in_one_line(tmp_path: Path) -> None:
    folder = checkpoints.write_case("granite", tmp_path / "granite")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_size": 96}))
    error = refused(folder)
    assert "mlx-lm cannot load it (" in str(error)
    assert error.failure.code is ErrorCode.BAD_CHECKPOINT


def test_every_family_that_is_said_of_mlx_lm_is_in_the_installed_one() -> None:
    from mlx_lm.utils import MODEL_REMAPPING

    listed = importlib.metadata.files("mlx-lm") or []
    held = {file.stem for file in listed if file.parts[:2] == ("mlx_lm", "models")}
    assert {name for name in MLX_LM_FAMILIES if MODEL_REMAPPING.get(name, name) not in held} == set()
    assert LoadedModel.__dataclass_fields__["provider"].default == "native"
