"""What an agent needs to work with this server: variables, files of its own, a command. Pure.

Nothing of the user's own configuration is read or written: Claude Code and Codex get a folder of their own, opencode a
configuration that lies above the user's for this one run.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

KEY = "mlxd"  # clients want one; a server without keys takes any
_TIMEOUTS = ("timeout", "headerTimeout", "chunkTimeout")
PATIENCE_MS = 3_600_000  # a long prompt on a slow machine is silent for minutes


class Model(msgspec.Struct, frozen=True):
    """A row of `/v1/models`, as far as clients want to know. `id` may be any name of the model."""

    id: str
    context_window: int = 0
    capabilities: list[str] = []
    bytes: int = 0
    resident: bool = False


class Asked(NamedTuple):
    """For whom: the server, the model, the one for small tasks, a folder for the client's own files, and the key."""

    url: str
    model: Model
    small: Model
    folder: str
    key: str = KEY


class Plan(msgspec.Struct, frozen=True):
    """What is set up. `files`: content by name in the folder; `unset`: variables that would lead elsewhere."""

    env: dict[str, str]
    files: dict[str, str] = {}
    unset: tuple[str, ...] = ()


class Client(NamedTuple):
    """`places`: where its installer puts it, beside the PATH; under the home folder."""

    program: str
    install: str
    plan: Callable[[Asked], Plan]
    places: tuple[str, ...] = ()


def claude(asked: Asked) -> Plan:
    """Claude Code: every tier has a model here, so that no hidden call names one that is not there."""
    model, small = asked.model.id, asked.small.id
    env = {
        "ANTHROPIC_BASE_URL": asked.url,
        "ANTHROPIC_AUTH_TOKEN": asked.key,
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": small,
        "ANTHROPIC_SMALL_FAST_MODEL": small,
        "CLAUDE_CODE_SUBAGENT_MODEL": model,
        "CLAUDE_CONFIG_DIR": asked.folder,
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "API_TIMEOUT_MS": str(PATIENCE_MS),
    }
    if asked.model.context_window:
        env["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(asked.model.context_window)
    elsewhere = ("BEDROCK", "VERTEX", "FOUNDRY")
    unset = tuple(f"CLAUDE_CODE_USE_{name}" for name in elsewhere)
    return Plan(env, unset=(*unset, "ANTHROPIC_CUSTOM_HEADERS"))


def codex(asked: Asked) -> Plan:
    """Codex: a home of its own, whose configuration knows this provider; there is one model, no small one."""
    window = asked.model.context_window
    lines = [
        f"model = {_toml(asked.model.id)}",
        'model_provider = "mlxd"',
        *([f"model_context_window = {window}"] if window else []),
        "check_for_update_on_startup = false",
        "",
        "[model_providers.mlxd]",
        'name = "mlxd"',
        f"base_url = {_toml(f'{asked.url}/v1')}",
        'wire_api = "responses"',
        'env_key = "CODEX_LOCAL_KEY"',
        f"stream_idle_timeout_ms = {PATIENCE_MS}",
        "",
        "[analytics]",
        "enabled = false",
    ]
    env = {"CODEX_HOME": asked.folder, "CODEX_LOCAL_KEY": asked.key}
    return Plan(env, {"config.toml": "\n".join(lines) + "\n"})


def opencode(asked: Asked) -> Plan:
    """opencode: a provider that speaks OpenAI's chat format, and no other."""
    models = {each.id: _opencode_model(each) for each in (asked.model, asked.small)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxd",
        "options": {"baseURL": f"{asked.url}/v1", "apiKey": asked.key, **dict.fromkeys(_TIMEOUTS, False)},
        "models": models,
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"mlxd/{asked.model.id}",
        "small_model": f"mlxd/{asked.small.id}",
        "enabled_providers": ["mlxd"],
        "autoupdate": False,
        "share": "disabled",
        "provider": {"mlxd": provider},
    }
    return Plan({"OPENCODE_CONFIG_CONTENT": msgspec.json.encode(config).decode()})


def _opencode_model(model: Model) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": model.id,
        "tool_call": "tools" in model.capabilities,
        "reasoning": "thinking" in model.capabilities,
    }
    if window := model.context_window:
        found["limit"] = {"context": window, "output": max(1, window // 4)}
    return found


def _toml(text: str) -> str:
    """A basic string of TOML, which for what stands here is one of JSON."""
    return msgspec.json.encode(text).decode()


CLIENTS: dict[str, Client] = {
    "claude": Client(
        "claude", "npm install -g @anthropic-ai/claude-code", claude, (".local/bin", ".claude/local")
    ),
    "codex": Client("codex", "npm install -g @openai/codex", codex, (".local/bin",)),
    "opencode": Client("opencode", "npm install -g opencode-ai", opencode, (".opencode/bin",)),
}


def small_of(models: list[Model], main: Model) -> Model:
    """The model for small tasks: the smallest chat model in memory where that is smaller, else the same one.

    Never one that would have to be loaded: then each title of a conversation would throw the other model out.
    """
    fit = [
        each for each in models if each.resident and "chat" in each.capabilities and each.bytes < main.bytes
    ]
    return min(fit, key=lambda each: each.bytes, default=main)


def shown(plan: Plan, folder: str, command: list[str]) -> str:
    """The whole plan for a person to read."""
    lines = ["# environment", *(f"{name}={value}" for name, value in plan.env.items())]
    lines += [f"unset {name}" for name in plan.unset]
    for name, text in plan.files.items():
        lines += ["", f"# file {folder}/{name}", text.rstrip("\n")]
    return "\n".join([*lines, "", "# command", " ".join(command)])
