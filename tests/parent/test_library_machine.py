"""What this machine offers: budgets of each kind of device, and how they are found without mlx."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.library.machine import (
    card_bytes,
    cgroup_limits,
    cpu,
    cuda,
    find_device,
    memory_bytes,
    metal,
    mlx_version,
    visible_card,
)

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[2]


def test_the_device_is_the_one_mlx_has_here() -> None:
    import mlx.core as mx

    found = find_device()
    assert (found.kind == "gpu") is (mx.default_device().type == mx.DeviceType.gpu)
    assert 0 < found.budget_bytes < found.memory_bytes
    assert found.memory_bytes == memory_bytes() or not found.shares_memory


def test_the_device_is_found_without_loading_mlx() -> None:
    script = "import sys; from parent.library.machine import find_device; find_device(); print(*sys.modules)"
    child = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "mlx.core" not in child.stdout.split()


def test_a_budget_of_the_settings_wins_and_is_named() -> None:
    found = find_device(5 * GIB)
    assert found.budget_bytes == 5 * GIB
    assert "memory_budget_bytes" in found.budget_name


@pytest.mark.parametrize(
    ("own", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "7", "a/memory.max": "5", "memory.max": "max"}, [7, 5]),
        ("0::/\n", {"memory.max": "9\n"}, [9]),
        ("0::/of/the/host\n", {"memory.max": "9"}, [9]),
        ("3:cpu,memory:/x\n1:cpu:/y\n", {"memory/x/memory.limit_in_bytes": "4", "y/memory.max": "1"}, [4]),
        ("4:memory:/x\n0::/\n", {"memory/memory.limit_in_bytes": "8", "memory.max": "3"}, [8, 3]),
        ("", {"memory.max": "9"}, []),
        ("nonsense\n\n:::\n", {}, []),
    ],
)
def test_the_limits_of_a_container_are_those_of_its_group_and_all_above(
    tmp_path: Path, own: str, files: dict[str, str], limits: list[int]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert cgroup_limits(own, tmp_path) == limits


@pytest.mark.parametrize(
    ("memory", "budget"), [(2 * GIB, GIB), (4 * GIB, 2 * GIB), (16 * GIB, 14 * GIB), (100 * GIB, 90 * GIB)]
)
def test_a_cpu_leaves_a_tenth_or_two_gibibytes_but_never_takes_more_than_half(
    memory: int, budget: int
) -> None:
    assert cpu(memory).budget_bytes == budget


@given(st.integers(1, 1 << 45))
def test_a_budget_is_always_less_than_the_memory_and_at_least_half(memory: int) -> None:
    for device in (cpu(memory), metal(memory, 0), cuda(memory)):
        assert memory // 2 <= device.budget_bytes <= memory


def test_apple_silicon_has_the_working_set_of_its_gpu() -> None:
    assert metal(64 * GIB, 0).budget_bytes == 48 * GIB
    assert metal(16 * GIB, 0).budget_bytes == int(16 * GIB * 0.67)
    assert metal(16 * GIB, 14336).budget_bytes == 14 * GIB
    assert metal(16 * GIB, 99999).budget_bytes == 16 * GIB
    assert "iogpu.wired_limit_mb" in metal(16 * GIB, 14336).budget_name


@pytest.mark.parametrize(
    ("said", "mebibytes"),
    [("143771\n", 143771), ("24564\n8192\n", 24564), ("", 0), ("[N/A]\n", 0), ("No devices were found\n", 0)],
)
def test_the_card_is_the_first_that_nvidia_smi_names(said: str, mebibytes: int) -> None:
    assert card_bytes(said) == mebibytes << 20


@pytest.mark.parametrize(
    ("value", "card"),
    [(None, ""), ("1,0", "1"), ("GPU-8d9f", "GPU-8d9f"), ("", None), ("-1", None), ("none", None)],
)
def test_the_card_is_one_that_cuda_programs_may_see(value: str | None, card: str | None) -> None:
    assert visible_card({} if value is None else {"CUDA_VISIBLE_DEVICES": value}) == card


def test_mlx_is_named_with_its_back_end() -> None:
    assert mlx_version()[0].isdigit()
    assert "(mlx-" in mlx_version() or os.uname().sysname == "Darwin"
