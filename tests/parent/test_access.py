"""The Host, Origin and Sec-Fetch-Site policy, rule by rule."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parent.access import Policy, host_name

OK = None


@pytest.mark.parametrize(
    ("bound", "host", "code"),
    [
        ("127.0.0.1", "127.0.0.1:8080", OK),
        ("127.0.0.1", "localhost:8080", OK),
        ("127.0.0.1", "LOCALHOST", OK),
        ("127.0.0.1", "localhost.", OK),
        ("127.0.0.1", "[::1]:8080", OK),
        ("127.0.0.1", "127.5.5.5", OK),
        ("127.0.0.1", "host.docker.internal:8080", OK),
        ("127.0.0.1", "mine.example", OK),
        ("127.0.0.1", "evil.example", "invalid_host"),
        ("127.0.0.1", "localhost.evil.example", "invalid_host"),
        ("127.0.0.1", "192.168.1.5:8080", "invalid_host"),
        ("127.0.0.1", "", "invalid_host"),
        ("192.168.1.5", "192.168.1.5:8080", OK),
        ("192.168.1.5", "192.168.1.6:8080", "invalid_host"),
        ("0.0.0.0", "192.168.1.5:8080", OK),
        ("0.0.0.0", "[fe80::1]:8080", OK),
        ("0.0.0.0", "desk:8080", OK),
        ("0.0.0.0", "desk.local:8080", OK),
        ("0.0.0.0", "evil.example", "invalid_host"),
        ("::", "10.0.0.1", OK),
        ("127.0.0.1", "[localhost]evil.com", "invalid_host"),
        ("127.0.0.1", "[::1]evil.com", "invalid_host"),
        ("127.0.0.1", "[::1", "invalid_host"),
        ("127.0.0.1", "[localhost]", "invalid_host"),
        ("127.0.0.1", "localhost:80:evil", "invalid_host"),
        ("127.0.0.1", "localhost:", "invalid_host"),
        ("127.0.0.1", "localhost:99999", "invalid_host"),
        ("127.0.0.1", "localhost:8o", "invalid_host"),
        ("127.0.0.1", "user@localhost", "invalid_host"),
        ("127.0.0.1", "localhost, evil.example", "invalid_host"),
        ("127.0.0.1", "localhost/..", "invalid_host"),
        ("0.0.0.0", "\xb9.2.3.4", "invalid_host"),
    ],
)
def test_the_host_must_be_one_of_ours(bound: str, host: str, code: str | None) -> None:
    policy = Policy(bound, ["mine.example"], machine="Desk.local")
    refusal = policy.refusal("GET", [(b"host", host.encode("latin-1"))])
    assert (refusal and refusal[0]) == code


@pytest.mark.parametrize(
    ("origin", "code"),
    [
        ("http://localhost:8080", OK),
        ("HTTP://LOCALHOST:8080", OK),
        ("http://localhost:9999", "cross_origin"),
        ("http://127.0.0.1:8080", "cross_origin"),
        ("https://evil.example", "cross_origin"),
        ("null", "cross_origin"),
        ("", "cross_origin"),
        ("https://localhost:8080", OK),
        ("localhost:8080", "cross_origin"),
        ("ftp://localhost:8080", "cross_origin"),
        ("http://localhost:8080/", "cross_origin"),
        ("http://a@localhost:8080", "cross_origin"),
        ("http://", "cross_origin"),
        ("http://[", "cross_origin"),
        ("http://[::1", "cross_origin"),
        ("http://[::1]x:8080", "cross_origin"),
        ("http:// localhost:8080", "cross_origin"),
        ("http://localhost:8080 http://evil.example", "cross_origin"),
        ("\xff\xfe", "cross_origin"),
    ],
)
def test_an_origin_must_be_the_hosts_own(origin: str, code: str | None) -> None:
    headers = [(b"host", b"localhost:8080"), (b"origin", origin.encode("latin-1"))]
    refusal = Policy("127.0.0.1").refusal("POST", headers)
    assert (refusal and refusal[0]) == code


@pytest.mark.parametrize(
    ("method", "site", "mode", "dest", "code"),
    [
        ("POST", "same-origin", "cors", "empty", OK),
        ("GET", "none", "navigate", "document", OK),
        ("GET", "cross-site", "navigate", "document", OK),  # a link a person followed
        ("GET", "cross-site", "navigate", "iframe", "cross_site"),
        ("GET", "cross-site", "no-cors", "image", "cross_site"),
        ("POST", "cross-site", "navigate", "document", "cross_site"),
        ("POST", "same-site", "cors", "empty", "cross_site"),
    ],
)
def test_a_browser_says_where_a_request_comes_from(
    method: str, site: str, mode: str, dest: str, code: str | None
) -> None:
    headers = [
        (b"host", b"localhost"),
        (b"sec-fetch-site", site.encode()),
        (b"sec-fetch-mode", mode.encode()),
        (b"sec-fetch-dest", dest.encode()),
    ]
    refusal = Policy("127.0.0.1").refusal(method, headers)
    assert (refusal and refusal[0]) == code


@pytest.mark.parametrize(
    ("origin", "host"), [("http://a", "a:80"), ("http://a:80", "a"), ("https://a", "a:443")]
)
def test_a_default_port_may_be_left_out(origin: str, host: str) -> None:
    policy = Policy("127.0.0.1", ["a"])
    assert policy.refusal("GET", [(b"host", host.encode()), (b"origin", origin.encode())]) is None


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ([(b"host", b"localhost"), (b"host", b"localhost")], ("invalid_host", 400)),
        ([(b"host", b"localhost"), (b"host", b"evil.example")], ("invalid_host", 400)),
        (
            [(b"host", b"localhost"), (b"origin", b"http://evil.example"), (b"origin", b"http://localhost")],
            ("cross_origin", 403),
        ),
        (
            [(b"host", b"localhost"), (b"sec-fetch-site", b"cross-site"), (b"sec-fetch-site", b"none")],
            ("cross_site", 403),
        ),
    ],
)
def test_a_header_given_twice_opens_nothing(
    headers: list[tuple[bytes, bytes]], refused: tuple[str, int]
) -> None:
    refusal = Policy("127.0.0.1").refusal("POST", headers)
    assert refusal is not None
    assert (refusal.code, refusal.status) == refused


@given(st.text(), st.text())
def test_no_header_whatever_raises(host: str, origin: str) -> None:
    headers = [(b"host", host.encode()), (b"origin", origin.encode())]
    assert Policy("127.0.0.1").refusal("POST", headers) is not None


def test_requests_of_programs_need_no_browser_headers() -> None:
    assert Policy("127.0.0.1").refusal("POST", [(b"host", b"127.0.0.1:8080")]) is None


@pytest.mark.parametrize(
    ("header", "name"), [("[::1]:80", "::1"), ("A.b:1", "a.b"), (" x ", "x"), ("::1", "")]
)
def test_a_host_header_is_a_name_and_perhaps_a_port(header: str, name: str) -> None:
    assert host_name(header) == name
