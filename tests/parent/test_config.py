"""Settings: which layer wins, where each value comes from, and what a mistake is told."""

import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.config import Resolved, Settings, default_data_dir, fields, load_settings
from parent.values import as_written
from shared.errors import ErrorCode, Failure, Refused
from shared.units import parse_bytes, parse_seconds

HOME = Path("/home/someone")


def load(
    flags: dict[str, str] | None = None, environ: dict[str, str] | None = None, home: Path = HOME
) -> Resolved:
    return load_settings(flags or {}, environ or {}, home=home)


def settings_or_failure(flags: dict[str, str]) -> Settings | Failure:
    try:
        return load(flags).settings
    except Refused as refused:
        return refused.failure


def test_without_anything_every_value_is_the_default() -> None:
    resolved = load()
    assert resolved.settings == Settings(data_dir=HOME / ".mlxd")
    assert resolved.models == {}
    assert set(resolved.origins.values()) == {"default"}
    assert list(resolved.origins) == [field.name for field in msgspec.structs.fields(Settings)]


def test_a_flag_wins_over_a_variable_over_the_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "mlxd.toml"
    file.write_text("port = 1\nmax_rows = 1\nqueue_limit = 1\n")
    environ = {"MLXD_DATA_DIR": str(tmp_path), "MLXD_PORT": "2", "MLXD_MAX_ROWS": "2"}
    resolved = load({"port": "3"}, environ)
    settings = resolved.settings
    assert (settings.port, settings.max_rows, settings.queue_limit, settings.host) == (3, 2, 1, "127.0.0.1")
    assert resolved.origins["port"] == "flag --port"
    assert resolved.origins["max_rows"] == "MLXD_MAX_ROWS"
    assert resolved.origins["queue_limit"] == str(file)
    assert resolved.origins["host"] == "default"


def test_the_data_folder_moves_the_settings_file_with_it(tmp_path: Path) -> None:
    (tmp_path / "mlxd.toml").write_text("port = 7\n")
    for flags, environ in (
        ({"data_dir": str(tmp_path)}, {}),
        ({}, {"MLXD_DATA_DIR": str(tmp_path)}),
        ({"config": str(tmp_path / "mlxd.toml")}, {}),
        ({}, {"MLXD_CONFIG": str(tmp_path / "mlxd.toml")}),
    ):
        assert load(flags, environ).settings.port == 7


def test_every_setting_has_a_flag_and_a_variable_and_they_read_the_same_text(tmp_path: Path) -> None:
    samples: dict[str, tuple[str, Any]] = {
        "data_dir": (str(tmp_path), tmp_path),
        "allowed_hosts": ("a.local, b.local", ["a.local", "b.local"]),
        "model_dirs": ("/a, /b", ["/a", "/b"]),
        "adapter_roots": ("/a, /b", ["/a", "/b"]),
        "dataset_dirs": ("/a, /b", ["/a", "/b"]),
    }
    for name, known in fields().items():
        if name in samples:
            text, value = samples[name]
        elif known.choices:
            text, value = known.choices[-1], known.choices[-1]
        elif known.unit == "bytes":
            text, value = "2MiB", 2 << 20
        elif known.unit == "seconds":
            text, value = "1500ms", 1.5
        elif isinstance(known.default, bool):
            text, value = "true", True
        elif isinstance(known.default, int):
            text, value = "9", 9
        else:
            text, value = "word", "word"
        assert getattr(load({name: text}).settings, name) == value
        assert getattr(load({}, {known.variable: text}).settings, name) == value


def test_flags_are_unique_and_drop_the_unit() -> None:
    flags = [flag for known in fields().values() for flag in known.flags]
    assert len(set(flags)) == len(flags)
    assert fields()["drain_s"].flag == "--drain"


def test_the_file_takes_numbers_and_sizes_and_durations_as_people_write_them(tmp_path: Path) -> None:
    file = tmp_path / "mlxd.toml"
    file.write_text(
        'prefix_cache_bytes = "512MiB"\nmax_body_bytes = 4096\ndrain_s = "2m"\nhung_s = 90\n'
        'allowed_hosts = ["box.local"]\n'
    )
    settings = load({"config": str(file)}).settings
    assert settings.prefix_cache_bytes == 512 << 20
    assert settings.max_body_bytes == 4096
    assert (settings.drain_s, settings.hung_s) == (120.0, 90.0)
    assert settings.allowed_hosts == ["box.local"]


@pytest.mark.parametrize(
    ("content", "param", "told"),
    [
        ("prot = 1", "prot", "did you mean port?"),
        ("zzz = 1", "zzz", "there is no such setting"),
        ("port = true", "port", "expected a whole number"),
        ('port = "x"', "port", "'x' is not a whole number"),
        ("port = 65536", "port", "expected a whole number <= 65535"),
        ("port = 1.5", "port", "expected a whole number"),
        ("max_rows = 0", "max_rows", "expected a whole number >= 1"),
        ('log_level = "loud"', "log_level", "not one of debug, info"),
        ('drain_s = "-1"', "drain_s", "must have an end; write one above 0"),
        ("drain_s = -1", "drain_s", "must have an end; write one above 0"),
        ("drain_s = 'soon'", "drain_s", "write for example 30s, 5m or 2h"),
        ('keep_alive_s = "-1"', "keep_alive_s", "write 0 for never"),
        ("keep_alive_s = -1.5", "keep_alive_s", "write 0 for never"),
        ("keep_alive_s = 'ever'", "keep_alive_s", "write for example 30s, 5m or 2h, or 0 for never"),
        ('drain_s = "soon"', "drain_s", "not a duration"),
        ("drain_s = nan", "drain_s", "nan is not a number to count with"),
        ("drain_s = inf", "drain_s", "inf is not a number to count with"),
        (f'max_body_bytes = "{"9" * 400}GB"', "max_body_bytes", "infinity"),
        ('prefix_cache_bytes = "75%"', "prefix_cache_bytes", "percentage has no meaning"),
        ('prefix_cache_bytes = "1 parsec"', "prefix_cache_bytes", "unknown unit"),
        ("allowed_hosts = [1]", "allowed_hosts", "expected `str`"),
        ("host = 1", "host", "expected `str`"),
        ("port = ", "config", "cannot read"),
        ("data_dir = '/x'", "data_dir", "cannot move it"),
    ],
)
def test_a_mistake_in_the_file_names_key_file_and_what_to_do(
    tmp_path: Path, content: str, param: str, told: str
) -> None:
    file = tmp_path / "mlxd.toml"
    file.write_text(content)
    with pytest.raises(Refused) as caught:
        load({"data_dir": str(tmp_path)})
    failure = caught.value.failure
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert str(file) in failure.message
    assert told in failure.message
    assert "\n" not in failure.message or param == "config"


def test_a_mistake_in_a_variable_or_flag_names_it() -> None:
    for flags, environ, where in (({"port": "x"}, {}, "flag --port"), ({}, {"MLXD_PORT": "x"}, "MLXD_PORT")):
        with pytest.raises(Refused, match=where):
            load(flags, environ)


def test_a_settings_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="there is no settings file"):
        load({"config": str(tmp_path / "none.toml")})


def test_an_explicit_file_outside_may_set_the_data_folder(tmp_path: Path) -> None:
    file = tmp_path / "elsewhere.toml"
    file.write_text(f"data_dir = '{tmp_path / 'd'}'\n")
    assert load({"config": str(file)}).settings.data_dir == tmp_path / "d"


def test_a_misspelt_variable_is_noted_and_an_unrelated_one_is_not() -> None:
    resolved = load({}, {"MLXD_PROT": "1", "MLXD_SOMETHING_ELSE": "1", "PATH": "/bin"})
    assert resolved.notes == ["the variable MLXD_PROT is not a setting; did you mean MLXD_PORT?"]


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load({"data_dir": "d"}).settings.data_dir == tmp_path / "d"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load({"data_dir": "~/d"}).settings.data_dir == tmp_path / "d"
    assert default_data_dir(HOME) == HOME / ".mlxd"


@given(st.text(max_size=30), st.sampled_from(sorted(fields())))
def test_any_text_is_a_value_or_one_refusal_that_names_the_setting(text: str, name: str) -> None:
    outcome = settings_or_failure({name: text})
    if isinstance(outcome, Failure):
        assert outcome.param == name
        assert fields()[name].flag in outcome.message
    else:
        assert msgspec.to_builtins(getattr(outcome, name), enc_hook=str) is not None


@given(st.dictionaries(st.sampled_from(sorted(set(fields()) - {"data_dir"})), st.integers(), max_size=3))
def test_any_number_in_the_file_is_a_value_or_a_refusal(values: dict[str, int]) -> None:
    text = "".join(f"{name} = {value}\n" for name, value in values.items())
    assert tomllib.loads(text) == values
    # A folder per example; a fixture's would be shared by all of them.
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "mlxd.toml").write_text(text)
        outcome = settings_or_failure({"data_dir": folder})
    if isinstance(outcome, Failure):
        assert outcome.param in values
    else:
        for name, value in values.items():
            assert getattr(outcome, name) == (float(value) if fields()[name].unit == "seconds" else value)


@given(value=st.one_of(st.integers(0, 1 << 50), st.sampled_from([1 << 30, 24 * 10**9, 8 << 20])))
def test_a_size_is_shown_as_it_can_be_written(value: int) -> None:
    assert parse_bytes(as_written(fields()["prefix_cache_bytes"], value)) == value


@given(value=st.one_of(st.floats(0, 1e6), st.integers(0, 10**6).map(float)))
def test_a_duration_is_shown_as_it_can_be_written(value: float) -> None:
    shown = as_written(fields()["drain_s"], value)
    if "e" not in shown:
        assert parse_seconds(shown) == value


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("prefix_cache_bytes", 1 << 30, "1 GiB"),
        ("prefix_cache_bytes", 3 * 10**9, "3 GB"),
        ("max_body_bytes", 8 << 20, "8 MiB"),
        ("max_body_bytes", 1025, "1025 B"),
        ("load_wait_s", 300.0, "5m"),
        ("load_wait_s", 7200.0, "2h"),
        ("load_wait_s", 90.0, "90s"),
        ("drain_s", 0.25, "0.25s"),
        ("drain_s", 0.0, "0s"),
        ("port", 8080, "8080"),
        ("allowed_hosts", ["a", "b"], "a, b"),
        ("allowed_hosts", [], ""),
    ],
)
def test_values_are_shown_with_their_units(name: str, value: Any, shown: str) -> None:
    assert as_written(fields()[name], value) == shown


def test_a_home_folder_of_nobody_is_one_refusal() -> None:
    for flag, name in (("data_dir", "data_dir"), ("config", "config")):
        failure = settings_or_failure({flag: "~no-such-user-here/x"})
        assert isinstance(failure, Failure)
        assert failure.param == name
