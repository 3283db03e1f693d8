"""Refusals of a request that name the field at fault. Pure."""

from shared.errors import ErrorCode, Refused, refuse


def invalid(param: str, message: str) -> Refused:
    """To raise: the request is wrong in field `param`."""
    return refuse(ErrorCode.INVALID_REQUEST, f"{param}: {message}", param=param)


def unsupported(param: str, message: str = "is not supported by this server") -> Refused:
    """To raise: the field would change the answer and we do not have it."""
    return refuse(ErrorCode.UNSUPPORTED, f"{param} {message}", param=param)
