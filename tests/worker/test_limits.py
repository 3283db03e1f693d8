"""What a Metal device is told of memory, without one."""

from types import SimpleNamespace

from worker.load import limit_memory


def test_metal_keeps_weights_wired_and_gives_freed_memory_back() -> None:
    told = {}
    limit_memory(
        SimpleNamespace(
            device_info=lambda: {"max_recommended_working_set_size": 80 << 30},
            set_wired_limit=lambda size: told.update(wired=size),
            set_cache_limit=lambda size: told.update(cache=size),
        )
    )
    assert told == {"wired": 80 << 30, "cache": 10 << 30}
