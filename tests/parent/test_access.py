"""The Host, Origin and Sec-Fetch-Site policy, rule by rule."""

import pytest

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
    ],
)
def test_the_host_must_be_one_of_ours(bound: str, host: str, code: str | None) -> None:
    policy = Policy(bound, ["mine.example"], machine="Desk.local")
    refusal = policy.refusal("GET", [(b"host", host.encode())])
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
    ],
)
def test_an_origin_must_be_the_hosts_own(origin: str, code: str | None) -> None:
    headers = [(b"host", b"localhost:8080"), (b"origin", origin.encode())]
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


def test_requests_of_programs_need_no_browser_headers() -> None:
    assert Policy("127.0.0.1").refusal("POST", [(b"host", b"127.0.0.1:8080")]) is None


@pytest.mark.parametrize(
    ("header", "name"), [("[::1]:80", "::1"), ("A.b:1", "a.b"), (" x ", "x"), ("::1", "")]
)
def test_a_host_header_is_a_name_and_perhaps_a_port(header: str, name: str) -> None:
    assert host_name(header) == name
