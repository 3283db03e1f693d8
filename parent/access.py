"""Who may ask: the Host, Origin and Sec-Fetch-Site policy. A page elsewhere must not reach a model here.

A browser can be made to send requests to loopback from any page (and with DNS rebinding, to read answers), so:
Host must be one of ours, Origin (where sent) must be the Host's own, and Sec-Fetch-Site (where sent) must be
same-origin or none, except for a person's navigation to a page.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import NamedTuple

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "host.docker.internal"})
_WILDCARD = frozenset({"", "0.0.0.0", "::"})
_AUTHORITY = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::([0-9]{1,5}))?")
_PORTS = {"http": 80, "https": 443}


class Refusal(NamedTuple):
    """The rule that is broken, in a word and in a line, and the status it has."""

    code: str
    message: str
    status: int = 403


def authority(text: str) -> tuple[str, int | None] | None:
    """`NAME[:PORT]` in lower case, no brackets, no final dot; None for anything else."""
    found = _AUTHORITY.fullmatch(text.strip().lower())
    if found is None or (found[3] and int(found[3]) > 65535):
        return None
    name = found[1] or found[2].removesuffix(".")
    return (name, int(found[3]) if found[3] else None) if name else None


def is_loopback(host: str) -> bool:
    """Is it an address that only this machine reaches?"""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def host_name(host: str) -> str:
    """The name in a Host header; "" where it is none."""
    found = authority(host)
    return found[0] if found else ""


def is_same_origin(origin: str, host: str) -> bool:
    """Whether an Origin header (`SCHEME://NAME[:PORT]`) and a Host header speak of one server.

    `https` too: behind a proxy that ends TLS the page's origin has it, while we see plain HTTP.
    """
    scheme, _, rest = origin.lower().partition("://")
    default = _PORTS.get(scheme)
    theirs, ours = authority(rest), authority(host)
    if default is None or theirs is None or ours is None or rest != rest.strip():
        return False
    return (theirs[0], theirs[1] or default) == (ours[0], ours[1] or default)


class Policy:
    """The rules for one bound host."""

    def __init__(self, bound_host: str, allowed_hosts: Iterable[str] = (), machine: str = "") -> None:
        bound = bound_host.strip("[]").lower()
        self.any_address = bound in _WILDCARD
        names = {*_LOOPBACK, *(host_name(host) for host in allowed_hosts)}
        if self.any_address and machine:
            short = machine.lower().removesuffix(".local")
            names |= {short, f"{short}.local"}
        if not self.any_address:
            names.add(bound)
        self.names = frozenset(names)

    def refusal(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> Refusal | None:
        """The first rule that is broken, or None."""
        found: dict[bytes, list[str]] = {}
        for name, value in headers:
            found.setdefault(name, []).append(value.decode("latin-1"))
        host, *more = found.get(b"host", [""])
        if more:
            return Refusal("invalid_host", "the request has more than one Host header; send one", 400)
        if not self._is_ours(host_name(host)):
            return Refusal(
                "invalid_host",
                f"this server does not answer to the Host {host[:80]!r}; "
                "add it to allowed_hosts if it is yours",
            )
        for origin in found.get(b"origin", []):
            if not is_same_origin(origin, host):
                return Refusal("cross_origin", f"the Origin {origin[:80]!r} is not this server's")
        navigates = method == "GET" and found.get(b"sec-fetch-mode") == ["navigate"]
        top_level = navigates and found.get(b"sec-fetch-dest", ["document"]) == ["document"]
        for site in found.get(b"sec-fetch-site", []):
            if site not in ("same-origin", "none") and not top_level:
                return Refusal(
                    "cross_site",
                    f"a request from another site (Sec-Fetch-Site: {site[:80]}) is refused",
                )
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback
