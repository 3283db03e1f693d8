"""A listener that moves: who waited at the old place is not lost, and where it cannot move it stays."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from parent import ports
from shared.errors import Refused


@contextmanager
def listening(host: str = "127.0.0.1", port: int = 0) -> Iterator[ports.Listener]:
    with closing(ports.Listener(host, port)) as listener:
        yield listener


def reaches(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except ConnectionRefusedError:
        return False
    return True


def test_another_port() -> None:
    with listening() as listener:
        old = listener.bound
        client = socket.create_connection(("127.0.0.1", old))
        client.sendall(b"early")
        listener.move("127.0.0.1", 0)
        assert listener.bound != old
        assert not reaches("127.0.0.1", old)
        assert reaches("127.0.0.1", listener.bound)
        (waiting,) = listener.waiting
        assert waiting.recv(5) == b"early"
        client.close()
        waiting.close()


def test_another_host_of_the_same_port_where_only_one_can_be_had_at_a_time() -> None:
    with listening() as listener:
        port = listener.bound
        client = socket.create_connection(("127.0.0.1", port))
        listener.move("0.0.0.0", port)
        assert (listener.host, listener.port, listener.bound) == ("0.0.0.0", port, port)
        assert listener.url == f"http://localhost:{port}"
        assert reaches("127.0.0.1", port)
        assert [each.getpeername() for each in listener.waiting] == [client.getsockname()]
        client.close()
        listener.waiting[0].close()


@pytest.mark.parametrize("same_port", [True, False])
def test_where_it_cannot_move_it_stays(same_port: bool) -> None:
    with listening() as listener, listening() as taken:
        old = listener.bound
        # An address that is no machine's own, on the same port; or a port that somebody has.
        place = ("192.0.2.1", old) if same_port else ("127.0.0.1", taken.bound)
        with pytest.raises(Refused):
            ports.try_move(*place, bound=old)
        with pytest.raises(Refused):
            listener.move(*place)
        assert (listener.host, listener.port, listener.bound) == ("127.0.0.1", 0, old)
        assert reaches("127.0.0.1", old)
