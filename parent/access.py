"""Who may ask: the Host, Origin and Sec-Fetch-Site policy. A page elsewhere must not reach a model here.

A browser can be made to send requests to loopback from any page (and with DNS rebinding, to read answers), so:
Host must be one of ours, Origin (where sent) must be the Host's own, and Sec-Fetch-Site (where sent) must be
same-origin or none, except for a person's navigation to a page.
"""

import ipaddress
from collections.abc import Iterable
from urllib.parse import urlsplit

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1", "host.docker.internal"})
_WILDCARD = frozenset({"", "0.0.0.0", "::"})


def host_name(host: str) -> str:
    """The name in a Host header: no port, no brackets, lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].rstrip(".")


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

    def refusal(self, method: str, headers: Iterable[tuple[bytes, bytes]]) -> tuple[str, str] | None:
        """`(code, message)` of the first rule that is broken, or None."""
        found = {name: value.decode("latin-1") for name, value in headers}
        host = found.get(b"host", "")
        if not self._is_ours(host_name(host)):
            return "invalid_host", (
                f"this server does not answer to the Host {host!r}; add it to allowed_hosts if it is yours"
            )
        origin = found.get(b"origin")
        if origin is not None and (urlsplit(origin).netloc or origin).lower() != host.strip().lower():
            return "cross_origin", f"the Origin {origin!r} is not this server's"
        site = found.get(b"sec-fetch-site", "none")
        navigates = method == "GET" and found.get(b"sec-fetch-mode") == "navigate"
        top_level = navigates and found.get(b"sec-fetch-dest", "document") == "document"
        if site not in ("same-origin", "none") and not top_level:
            return "cross_site", f"a request from another site (Sec-Fetch-Site: {site}) is refused"
        return None

    def _is_ours(self, name: str) -> bool:
        if name in self.names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.any_address or address.is_loopback
