"""The configuration of a running server: reloads, patches of the file, and what is told of each."""

import errno
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.live_config import Change, LiveConfig
from parent.model_options import ModelOptions, Profile
from parent.settings_file import edited
from parent.values import MOST_LEVELS
from shared.errors import ErrorCode, Refused
from tests.shared.test_files import IN_THE_PLACE, let_go

ROOT = Path(__file__).resolve().parents[2]
FILE = """\
# mine
port = 9000  # not the usual one

queue_limit = 10

[models."org/name"]  # the good one
pin = true
[models."org/name".profiles.calm]
temperature = 0.1
"""


def live(
    folder: Path, text: str | None = None, flags: dict[str, str] | None = None, **environ: str
) -> LiveConfig:
    folder.mkdir(exist_ok=True)
    if text is not None:
        (folder / "mlxd.toml").write_text(text)
    return LiveConfig({"data_dir": str(folder), **(flags or {})}, environ, home=folder)


def refusal(work: Callable[[], Any]) -> tuple[ErrorCode, str | None, str]:
    with pytest.raises(Refused) as caught:
        work()
    failure = caught.value.failure
    assert "\n" not in failure.message
    return failure.code, failure.param, failure.message


# ---------------------------------------------------------------- reload


def test_a_reload_takes_over_what_changed_and_names_it(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    told: list[Change] = []
    config.on_change.append(told.append)
    assert not config.reload()
    assert told == []
    config.file.write_text("queue_limit = 11\nmax_rows = 3\n[models.x]\n")
    change = config.reload()
    assert change == Change(["port", "max_rows", "queue_limit"], ["org/name", "x"], ["port"])
    assert told == [change]
    assert (config.settings.queue_limit, config.settings.max_rows) == (11, 3)
    assert config.models == {"x": ModelOptions()}
    assert config.origins["port"] == "default"
    assert config.origins["max_rows"] == str(config.file)


@pytest.mark.parametrize("text", ["port = ", "prot = 1", "max_rows = 0", "[models.x]\npinn = true", "\xff"])
def test_a_broken_file_is_refused_and_everything_stays(tmp_path: Path, text: str) -> None:
    config = live(tmp_path, FILE)
    before = (config.settings, config.models, config.origins)
    told: list[Change] = []
    config.on_change.append(told.append)
    config.file.write_bytes(text.encode("latin-1"))
    assert refusal(config.reload)[0] == ErrorCode.INVALID_REQUEST
    assert (config.settings, config.models, config.origins) == before
    assert told == []


@pytest.mark.parametrize("kind", IN_THE_PLACE)
def test_what_is_no_settings_file_is_refused_by_what_it_is(tmp_path: Path, kind: str) -> None:
    make, said = IN_THE_PLACE[kind]
    config = live(tmp_path)
    make(config.file)
    for work in (config.reload, lambda: config.patch({"max_rows": 2}), lambda: live(tmp_path)):
        with let_go(config.file):
            code, param, message = refusal(work)
        assert (code, param) == (ErrorCode.INVALID_REQUEST, "config")
        assert message == f"cannot read {config.file}: it is {said}"


def test_the_null_device_is_no_file_and_is_not_written(tmp_path: Path) -> None:
    config = live(tmp_path, FILE, {"config": os.devnull})
    assert (config.settings.queue_limit, bool(config.reload())) == (64, False)
    assert refusal(lambda: config.patch({"max_rows": 2}))[2].endswith("it is a device, not a file")
    assert not Path(os.devnull).is_file()


def test_a_setting_that_needs_a_restart_keeps_its_value_until_then(tmp_path: Path) -> None:
    config = live(tmp_path, "port = 1\n")
    config.file.write_text("port = 2\nallowed_hosts = ['a']\n")
    assert config.reload().pending == ["port", "allowed_hosts"]
    assert (config.settings.port, config.settings.allowed_hosts) == (1, [])
    assert config.pending == {"port": 2, "allowed_hosts": ["a"]}
    config.file.write_text("port = 1\n")
    assert config.reload().settings == ["port", "allowed_hosts"]
    assert config.pending == {}


def test_a_file_that_comes_or_goes_is_a_change(tmp_path: Path) -> None:
    config = live(tmp_path)
    assert not config.reload()
    config.file.write_text("max_rows = 2\n")
    assert config.reload().settings == ["max_rows"]
    config.file.unlink()
    assert config.reload().settings == ["max_rows"]
    assert config.settings.max_rows == 8


# ---------------------------------------------------------------- patch


def test_a_patch_changes_its_keys_and_keeps_comments_order_and_mode(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    config.file.chmod(0o640)
    results = config.patch(
        {
            "queue_limit": 20,
            "prefix_cache_bytes": "512MiB",
            "models": {
                "org/name": {"pin": None, "max_rows": 2, "profiles": {"wild": {"temperature": 1.5}}},
                "new one": {"aliases": ["n"]},
            },
        }
    )
    text = config.file.read_text()
    for line in (
        "# mine",
        "port = 9000  # not the usual one",
        'prefix_cache_bytes = "512MiB"',
        "# the good one",
    ):
        assert line in text
    assert config.file.stat().st_mode & 0o777 == 0o640
    assert config.settings.queue_limit == 20
    assert config.settings.prefix_cache_bytes == 512 << 20
    assert config.models == {
        "org/name": ModelOptions(
            max_rows=2, profiles={"calm": Profile(temperature=0.1), "wild": Profile(temperature=1.5)}
        ),
        "new one": ModelOptions(aliases=["n"]),
    }
    assert [(each.name, each.needs) for each in results] == [
        ("queue_limit", "nothing"),
        ("prefix_cache_bytes", "model reload"),
        ("models.org/name", "model reload"),
        ("models.new one", "nothing"),
    ]
    assert (results[1].value, results[1].effective) == ("512MiB", 512 << 20)
    assert results[2].effective == {
        "max_rows": 2,
        "profiles": {"calm": {"temperature": 0.1}, "wild": {"temperature": 1.5}},
    }
    assert [item.name for item in tmp_path.iterdir()] == ["mlxd.toml"]


def test_null_takes_a_key_out_and_the_default_comes_back(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    (limit, model) = config.patch({"queue_limit": None, "models.org/name": None})
    assert (limit.effective, limit.origin) == (64, "default")
    assert model.effective is None
    assert config.models == {}
    assert tomllib.loads(config.file.read_text()).get("models", {}) == {}
    assert "# mine" in config.file.read_text()
    assert config.patch({"queue_limit": None, "models": {"never there": None}})[0].effective == 64


CALM, WILD = "temperature = 0.1\n", "temperature = 1.1\n"
WRITTEN = {
    "a table of its own": f"[models.m]\npin = true\n[models.m.profiles.calm]\n{CALM}",
    "nothing but the profile": f"# mine\n[models.m.profiles.calm]\n{CALM}",
    "two": f"[models.m.profiles.calm]\n{CALM}[models.m.profiles.wild]\n{WILD}",
    "another between": f"[models.m]\n[models.o]\npin = true\n[models.m.profiles.calm]\n{CALM}",
    "inline": "[models.m]\nprofiles = {calm = {temperature = 0.1}}\n",
    "dotted": "models.m.profiles.calm.temperature = 0.1\n",
    "arguments": '[models.m.profiles.calm.template_kwargs]\ntone = "dry"\n',
}


@pytest.mark.parametrize("text", WRITTEN.values(), ids=WRITTEN.keys())
def test_the_last_profile_can_be_taken_out_and_put_back(tmp_path: Path, text: str) -> None:
    for number, patch in enumerate(({"calm": None, "wild": None}, None)):
        config = live(tmp_path / str(number), text)
        before = config.models["m"]
        config.patch({"models": {"m": {"profiles": patch}}})
        assert config.models.get("m", ModelOptions()).profiles == {}
        assert config.models.get("m", ModelOptions()).pin is before.pin
        assert config.models.get("o") == live(tmp_path / "as before", text).models.get("o")
        assert ("# mine" in text) is ("# mine" in config.file.read_text())
        config.patch({"models": {"m": {"profiles": {"calm": {"top_k": 3}}}}})
        assert config.models["m"].profiles == {"calm": Profile(top_k=3)}


def test_a_profile_stays_when_its_last_key_is_taken_out(tmp_path: Path) -> None:
    config = live(tmp_path, WRITTEN["arguments"])
    config.patch({"models": {"m": {"profiles": {"calm": {"template_kwargs": None}}}}})
    assert config.models["m"].profiles == {"calm": Profile()}


def test_tables_that_the_editor_cannot_follow_are_left_alone(tmp_path: Path) -> None:
    text = f"[models.m.profiles.calm]\n{CALM}[models.o]\n[models.m.profiles.wild]\n{WILD}"
    config = live(tmp_path, text)
    code, _, message = refusal(
        lambda: config.patch({"models": {"m": {"profiles": {"calm": None, "wild": None}}}})
    )
    assert (code, config.file.read_text()) == (ErrorCode.CONFLICT, text)
    assert "by hand" in message


def nested(levels: int, *, lists: bool = False) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value] if lists else {"a": value}
    return value


@pytest.mark.parametrize("levels", [MOST_LEVELS, 101, 300, 5000])
@pytest.mark.parametrize("lists", [False, True])
def test_what_is_nested_too_deep_is_refused_by_its_key_and_the_next_patch_works(
    tmp_path: Path, levels: int, lists: bool
) -> None:
    config = live(tmp_path, FILE)
    kwargs = {"x": nested(levels, lists=lists)}
    profiles = {"profiles": {"calm": {"temperature": 1}, "p": {"template_kwargs": kwargs}}}
    code, param, message = refusal(lambda: config.patch({"max_rows": 2, "models": {"m": profiles}}))
    assert (code, param) == (ErrorCode.INVALID_REQUEST, "models.m.profiles.p.template_kwargs")
    assert "flatter" in message
    assert config.file.read_text() == FILE
    assert config.patch({"max_rows": 2})[0].effective == 2


def test_what_is_just_not_too_deep_can_be_written_and_edited_again(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    kwargs = nested(MOST_LEVELS - 4)
    config.patch({"models": {"m": {"profiles": {"p": {"template_kwargs": kwargs}}}}})
    config.patch({"max_rows": 2})
    assert config.models["m"].profiles["p"].template_kwargs == kwargs


@pytest.mark.parametrize("levels", [MOST_LEVELS + 1, 300, 5000])
def test_a_file_that_is_nested_too_deep_is_refused(tmp_path: Path, levels: int) -> None:
    inline = "{a = " * levels + "1" + "}" * levels
    config = live(tmp_path)
    config.file.write_text(f"[models.m.profiles.p]\ntemplate_kwargs = {inline}\n")
    code, param, message = refusal(config.reload)
    assert (code, param in ("config", "models.m.profiles.p.template_kwargs")) == (
        ErrorCode.INVALID_REQUEST,
        True,
    )
    assert str(config.file) in message


def test_a_flag_or_a_variable_that_outranks_the_file_is_told(tmp_path: Path) -> None:
    config = live(tmp_path, FILE, {"max_rows": "5"}, MLXD_QUEUE_LIMIT="6")
    rows, limit = config.patch({"max_rows": 7, "queue_limit": 8})
    assert (rows.value, rows.effective, rows.origin) == (7, 5, "flag --max-rows")
    assert (limit.value, limit.effective, limit.origin) == (8, 6, "MLXD_QUEUE_LIMIT")
    assert "flag --max-rows wins" in rows.note
    assert "MLXD_QUEUE_LIMIT wins" in limit.note
    assert tomllib.loads(config.file.read_text())["max_rows"] == 7


def test_what_needs_a_restart_is_written_and_told(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    (port,) = config.patch({"port": 9001})
    assert (port.effective, port.needs) == (9000, "restart")
    assert port.note == "in force after a restart"
    (port,) = config.patch({"port": 9000})
    assert (port.effective, port.needs, port.note) == (9000, "nothing", "")


@pytest.mark.parametrize(
    ("values", "param", "told"),
    [
        ({"max_rows": 2, "prot": 1}, "prot", "did you mean port?"),
        ({"max_rows": 2, "port": "x"}, "port", "not a whole number"),
        ({"max_rows": 2, "queue_limit": 0}, "queue_limit", ">= 1"),
        ({"max_rows": 2, "queue_limit": {"a": 1}}, "queue_limit", "expected a whole number"),
        ({"max_rows": 2, "data_dir": "/elsewhere"}, "data_dir", "cannot move it"),
        ({"max_rows": 2, "models": 1}, "models", "expected an object of models"),
        ({"max_rows": 2, "models": {"x": 1}}, "models.x", "expected an object, or null"),
        ({"max_rows": 2, "models.x": []}, "models.x", "expected an object, or null"),
        ({"max_rows": 2, "models": {"x": {"pinn": True}}}, "models.x.pinn", "did you mean pin?"),
        (
            {"max_rows": 2, "models": {"x": {"aliases": ["org/name"]}}},
            "models.x.aliases",
            "a name of org/name",
        ),
        (
            {"max_rows": 2, "models": {"x": {"aliases": [None]}}},
            "models.x",
            "cannot be written in TOML",
        ),
    ],
)
def test_one_bad_value_and_nothing_is_written(
    tmp_path: Path, values: dict[str, Any], param: str | None, told: str
) -> None:
    config = live(tmp_path, FILE)
    code, named, message = refusal(lambda: config.patch(values))
    assert (code, named) == (ErrorCode.INVALID_REQUEST, param)
    assert told in message
    assert config.file.read_text() == FILE
    assert config.settings.max_rows == 8


def test_a_bad_value_is_refused_even_where_a_flag_hides_it(tmp_path: Path) -> None:
    config = live(tmp_path, FILE, {"max_rows": "5"})
    assert refusal(lambda: config.patch({"max_rows": 0}))[1] == "max_rows"
    assert config.file.read_text() == FILE


def test_a_file_broken_by_hand_is_not_touched_but_can_be_cured(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    config.file.write_text("port = \n")
    assert refusal(lambda: config.patch({"max_rows": 2}))[1] == "config"
    assert config.file.read_text() == "port = \n"
    config.file.write_text("max_rows = 0\n")
    assert refusal(lambda: config.patch({"queue_limit": 2}))[1] == "max_rows"
    config.patch({"queue_limit": 2, "max_rows": 4})
    assert (config.settings.queue_limit, config.settings.max_rows) == (2, 4)


def test_a_file_that_was_edited_meanwhile_keeps_the_edit(tmp_path: Path) -> None:
    config = live(tmp_path, FILE)
    config.file.write_text("max_rows = 2 # by hand\n")
    config.patch({"queue_limit": 3})
    assert (config.settings.max_rows, config.settings.queue_limit) == (2, 3)
    assert "# by hand" in config.file.read_text()


def test_a_file_that_is_a_link_stays_one(tmp_path: Path) -> None:
    real = tmp_path / "real.toml"
    real.write_text(FILE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mlxd.toml").symlink_to(real)
    config = live(tmp_path / "data")
    config.patch({"max_rows": 2})
    assert config.file.is_symlink()
    assert "max_rows = 2" in real.read_text()


def test_the_first_patch_makes_the_file_and_its_folder(tmp_path: Path) -> None:
    config = LiveConfig({"data_dir": str(tmp_path / "a" / "b")}, {}, home=tmp_path)
    config.patch({"max_rows": 2, "models": {"x": {"pin": True}}})
    assert tomllib.loads(config.file.read_text()) == {"max_rows": 2, "models": {"x": {"pin": True}}}


PATCHER = """
import sys
from pathlib import Path
from parent.live_config import LiveConfig
config = LiveConfig({"data_dir": sys.argv[1]}, {}, home=Path(sys.argv[1]))
for number in range(1, 100_000):
    config.patch({"queue_limit": number, "max_rows": number % 1000 + 1, "models": {"m": {"aliases": ["x" * number]}}})
    print(number, flush=True)
"""


@pytest.mark.parametrize("patches", [1, 2, 5, 17, 40])
def test_a_kill_in_the_midst_of_patches_leaves_a_whole_file(tmp_path: Path, patches: int) -> None:
    live(tmp_path, FILE)
    child = subprocess.Popen(
        [sys.executable, "-c", PATCHER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child.stdout as lines:
        done = [int(lines.readline()) for _ in range(patches)][-1]
        child.kill()
        child.wait()
        done = max([done, *map(int, lines.read().split())])
    config = live(tmp_path)
    assert config.settings.queue_limit in (done, done + 1)  # the last one may not have been told
    assert config.settings.max_rows == config.settings.queue_limit % 1000 + 1
    assert config.models["m"].aliases == ["x" * config.settings.queue_limit]
    assert "# mine" in config.file.read_text()
    config.patch({"queue_limit": 1})
    assert [item.name for item in tmp_path.iterdir()] == ["mlxd.toml"]


def test_a_place_that_cannot_be_written_is_one_refusal(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = LiveConfig({"data_dir": str(tmp_path / "file" / "d")}, {}, home=tmp_path)
    code, _, message = refusal(lambda: config.patch({"max_rows": 2}))
    assert code == ErrorCode.CONFLICT
    assert os.strerror(errno.ENOTDIR) in message


# ---------------------------------------------------------------- the editor

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
)
VALUES = st.recursive(
    st.none() | SCALARS | st.lists(SCALARS, max_size=2),
    lambda inner: st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


def merged(table: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The model of an edit: what TOML readers must see afterwards."""
    for key, value in values.items():
        if value is None:
            table.pop(key, None)
        elif isinstance(value, dict):
            table[key] = merged(table[key] if isinstance(table.get(key), dict) else {}, value)
        else:
            table[key] = value
    return table


def told(table: dict[str, Any]) -> dict[str, Any]:
    """What a table says: of a model of which it says nothing, it says nothing."""
    return table | {"models": {name: each for name, each in table.get("models", {}).items() if each != {}}}


@given(
    st.lists(
        st.fixed_dictionaries(
            {}, optional={"port": SCALARS | st.none(), "max_rows": SCALARS | st.none()}
        ).flatmap(
            lambda flat: st.dictionaries(
                NAMES.map(lambda name: f"models.{name}"),
                st.none() | st.dictionaries(NAMES, VALUES, max_size=3),
                max_size=3,
            ).map(lambda models: {**flat, **models})
        ),
        max_size=5,
    ),
    st.sampled_from(
        ["", FILE, "models = {x = {pin = true}}\n", 'models.x.pin = true\nmodels."org/name".dtype = "auto"\n']
    ),
)
def test_any_edits_in_a_row_give_the_table_they_say_or_are_refused(
    edits: list[dict[str, Any]], text: str
) -> None:
    expected = tomllib.loads(text)
    comment, dotted = "# mine" in text, text.startswith("models.x.pin")
    for values in edits:
        try:
            text = edited(text, values)
        except Refused:
            assert dotted
            continue
        nested: dict[str, Any] = {}
        for name, value in values.items():
            if name.startswith("models."):
                nested.setdefault("models", {})[name.removeprefix("models.")] = value
            else:
                nested[name] = value
        merged(expected, nested)
        assert told(tomllib.loads(text)) == told(expected)
        assert ("# mine" in text) is comment
