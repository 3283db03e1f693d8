"""What `mlxd.toml` says of single models: tables, profiles, names, and what a mistake is told."""

from pathlib import Path
from typing import Any

import pytest

from parent.config import Resolved, Settings, fields, for_model, load_settings
from parent.model_options import OVER_SETTINGS, ModelOptions, Profile
from parent.values import fields_of
from shared.errors import ErrorCode, Refused

WHOLE = """
port = 9
[models."org/name"]
aliases = ["small", "s"]
pin = true
keep_alive = "10m"
max_context = 8192
max_rows = 4
prefill_chunk = 64
prefix_cache_bytes = "512MiB"
kv_cache = "kv8"
kv_start = 64
check_prefix = true
kv_bytes = 1000
dtype = "float16"
provider = "mlx-lm"
messages = "as_sent"
python = "/opt/v/bin/python"
adapter = "a+b"
[models."org/name".profiles.creative]
temperature = 1
top_p = 0.9
top_k = 40
min_p = 0.05
repetition_penalty = 1.1
presence_penalty = 0.5
frequency_penalty = 0.25
max_tokens = 100
max_context = 4096
thinking = false
template_kwargs = { tone = "dry", enable_thinking = true }
adapter = "c"
[models."org/name".profiles.plain]
[models.other]
"""


def load(text: str, folder: Path) -> Resolved:
    return load_settings({"data_dir": str(folder)}, {}, home=folder, text=text)


def test_every_key_of_a_model_and_a_profile_is_read_in_its_unit(tmp_path: Path) -> None:
    resolved = load(WHOLE, tmp_path)
    assert resolved.settings.port == 9
    assert resolved.models == {
        "org/name": ModelOptions(
            aliases=["small", "s"],
            pin=True,
            keep_alive=600.0,
            max_context=8192,
            max_rows=4,
            prefill_chunk=64,
            prefix_cache_bytes=512 << 20,
            kv_cache="kv8",
            kv_start=64,
            check_prefix=True,
            kv_bytes=1000,
            dtype="float16",
            provider="mlx-lm",
            messages="as_sent",
            python="/opt/v/bin/python",
            adapter="a+b",
            profiles={
                "creative": Profile(
                    temperature=1.0,
                    top_p=0.9,
                    top_k=40,
                    min_p=0.05,
                    repetition_penalty=1.1,
                    presence_penalty=0.5,
                    frequency_penalty=0.25,
                    max_tokens=100,
                    max_context=4096,
                    thinking=False,
                    template_kwargs={"tone": "dry", "enable_thinking": True},
                    adapter="c",
                ),
                "plain": Profile(),
            },
        ),
        "other": ModelOptions(),
    }
    assert isinstance(resolved.models["org/name"].profiles["creative"].temperature, float)


def test_every_key_that_there_is_stands_in_the_whole_example(tmp_path: Path) -> None:
    options = load(WHOLE, tmp_path).models["org/name"]
    for struct, value in ((ModelOptions, options), (Profile, options.profiles["creative"])):
        for name, known in fields_of(struct).items():
            assert getattr(value, name) != known.default, name
            assert known.description


@pytest.mark.parametrize(
    ("content", "param", "told"),
    [
        ("models = 1", "models", 'write [models."org/name"]'),
        ("[models]\nx = 1", "models.x", "expected a table, not 1"),
        ('[models.""]', "models", "name is empty"),
        ("[models.x]\npinn = true", "models.x.pinn", "did you mean pin?"),
        ("[models.x]\nzzz = true", "models.x.zzz", "there is aliases, pin, keep_alive"),
        ("[models.x]\npin = 1", "models.x.pin", "expected true or false, got a whole number"),
        ('[models.x]\npin = "yes"', "models.x.pin", "expected true or false"),
        ("[models.x]\nmax_rows = 0", "models.x.max_rows", "expected a whole number >= 1"),
        ('[models.x]\nmax_rows = "many"', "models.x.max_rows", "'many' is not a whole number"),
        ('[models.x]\nkv_bytes = "50%"', "models.x.kv_bytes", "percentage has no meaning"),
        ('[models.x]\nkeep_alive = "soon"', "models.x.keep_alive", "not a duration"),
        ("[models.x]\nkeep_alive = nan", "models.x.keep_alive", "nan is not a number"),
        ('[models.x]\ndtype = "int8"', "models.x.dtype", "not one of auto, float32"),
        ("[models.x]\ndtype = 8", "models.x.dtype", "not one of auto, float32"),
        ("[models.x]\naliases = [1]", "models.x.aliases", "expected `str`"),
        ('[models.x]\naliases = ["a:b"]', "models.x.aliases", "'a:b' holds a colon"),
        ('[models.x]\naliases = [" a"]', "models.x.aliases", "' a' is no name"),
        ('[models.x]\npython = "~no-such-user-here/python"', "models.x.python", "no-such-user-here"),
        ("[models.x]\nprofiles = 1", "models.x.profiles", "expected tables of profiles"),
        ('[models.x.profiles."a:b"]', "models.x.profiles", "'a:b' holds a colon"),
        ("[models.x.profiles]\na = 1", "models.x.profiles.a", "expected a table, not 1"),
        (
            "[models.x.profiles.a]\ntemprature = 1",
            "models.x.profiles.a.temprature",
            "did you mean temperature",
        ),
        ("[models.x.profiles.a]\ntop_p = 0", "models.x.profiles.a.top_p", "expected a number > 0"),
        ("[models.x.profiles.a]\ntop_p = true", "models.x.profiles.a.top_p", "expected a number"),
        ("[models.x.profiles.a]\ntemperature = 9", "models.x.profiles.a.temperature", "<= 5"),
        (
            "[models.x.profiles.a]\ntemplate_kwargs = 1",
            "models.x.profiles.a.template_kwargs",
            "expected a table",
        ),
        (
            '[models.x]\naliases = ["n"]\n[models.y]\naliases = ["n"]',
            "models.y.aliases",
            "'n' is a name of x too",
        ),
        ('[models.x]\n[models.y]\naliases = ["x"]', "models.y.aliases", "'x' is a name of x too"),
        ('[models.y]\naliases = ["x"]\n[models.x]', "models.y.aliases", "'x' is a name of x too"),
    ],
)
def test_a_mistake_names_file_key_and_what_to_do(tmp_path: Path, content: str, param: str, told: str) -> None:
    with pytest.raises(Refused) as caught:
        load(content, tmp_path)
    failure = caught.value.failure
    assert (failure.code, failure.param) == (ErrorCode.INVALID_REQUEST, param)
    assert str(tmp_path / "mlxd.toml") in failure.message
    assert told in failure.message
    assert "\n" not in failure.message


def test_an_alias_written_twice_in_one_model_is_no_clash(tmp_path: Path) -> None:
    assert load('[models.x]\naliases = ["n", "n", "x"]', tmp_path).models["x"].aliases == ["n", "n", "x"]


def test_what_a_model_says_stands_over_the_settings_and_the_rest_stays(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path, max_context=100, max_rows=2, keep_alive_s=60.0)
    assert for_model(settings, ModelOptions()) == settings
    merged = for_model(settings, ModelOptions(max_context=0, keep_alive=0.0, dtype="float16"))
    assert (merged.max_context, merged.max_rows, merged.keep_alive_s, merged.dtype) == (0, 2, 0.0, "float16")


@pytest.mark.parametrize("name", OVER_SETTINGS)
@pytest.mark.parametrize("value", [-1, 0, 1, 1024, 1025, 1 << 40, "auto", "word", "1GB"])
def test_a_model_takes_what_the_setting_takes(tmp_path: Path, name: str, value: Any) -> None:
    def outcome(text: str) -> Any:
        try:
            resolved = load(text, tmp_path)
        except Refused as refused:
            return refused.failure.message.partition("): ")[2]
        return getattr(resolved.models["x"] if "models" in text else resolved.settings, name)

    assert outcome(f"[models.x]\n{name} = {value!r}") == outcome(f"{name} = {value!r}")
    flat, own = fields()[name], fields_of(ModelOptions)[name]
    assert (own.unit, own.choices, own.needs) == (flat.unit, flat.choices, flat.needs)


def test_thinking_goes_to_the_template_under_the_name_it_knows() -> None:
    assert Profile().kwargs == {}
    assert Profile(thinking=False).kwargs == {"enable_thinking": False}
    both = Profile(thinking=False, template_kwargs={"enable_thinking": True, "x": 1})
    assert both.kwargs == {"enable_thinking": True, "x": 1}
