"""What Ollama's API says of models: `/api/tags`, `/api/show`, `/api/ps`, `/api/version`, `/api/pull`. Pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from parent.protocols.refusing import invalid

CAPABILITIES = {
    "completion": "completion",
    "tools": "tools",
    "thinking": "thinking",
    "vision": "vision",
    "embeddings": "embedding",
}
"""Our words for what a model can do, and Ollama's; what is not here it has no word for."""


class Details(msgspec.Struct, frozen=True):
    """`details` of a model."""

    family: str
    families: list[str]
    quantization_level: str
    context_length: int
    format: str = "safetensors"
    parent_model: str = ""
    parameter_size: str = ""


class Listed(msgspec.Struct, frozen=True):
    """A row of `GET /api/tags`."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    capabilities: list[str]


class Tags(msgspec.Struct, frozen=True):
    """`GET /api/tags`."""

    models: list[Listed]


class Running(msgspec.Struct, frozen=True):
    """A row of `GET /api/ps`."""

    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Ps(msgspec.Struct, frozen=True):
    """`GET /api/ps`."""

    models: list[Running]


class ModelBody(msgspec.Struct, frozen=True, kw_only=True):
    """A body that names a model, under either name."""

    model: str | None = None
    name: str | None = None

    @property
    def named(self) -> str:
        """Raises `Refused` where no name is there."""
        given = self.model or self.name or ""
        if not given:
            raise invalid("model", "must be there: the name of a model")
        return given


class ShowBody(ModelBody, frozen=True, kw_only=True):
    """`POST /api/show`."""

    verbose: bool | None = None
    options: Any = None
    system: Any = None
    template: Any = None


class Show(msgspec.Struct, frozen=True):
    """The answer to it. `parameters`: one a line."""

    modified_at: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    parameters: str = ""
    template: str = ""
    modelfile: str = ""
    license: str = ""


class Version(msgspec.Struct, frozen=True):
    """`GET /api/version`: Ollama's, whose formats these are, and ours."""

    version: str
    mlxd: str


class PullBody(ModelBody, frozen=True, kw_only=True):
    """`POST /api/pull`."""

    stream: bool | None = None
    insecure: Any = None
    username: Any = None
    password: Any = None


class Progress(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of the answer to it."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


def capabilities(abilities: Sequence[str]) -> list[str]:
    """In Ollama's words."""
    return [CAPABILITIES[each] for each in abilities if each in CAPABILITIES]


def parameters(defaults: dict[str, float | None]) -> str:
    """A model's own defaults as Ollama writes them."""
    return "\n".join(f"{name:<30} {value:g}" for name, value in defaults.items() if value is not None)


def hub_name(name: str) -> str:
    """`hf.co/org/name:latest` as the hub has it."""
    for host in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(host)
    return name.removesuffix(":latest")
