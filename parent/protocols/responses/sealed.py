"""`encrypted_content` of a reasoning item: the thinking in a form that clients keep and send back unread. Pure.

Nothing is secret here, so it is not encrypted; a client that keeps this field alone loses nothing of what was thought.
"""

import base64
import binascii

_MARK = "mlxd."


def sealed(thought: str) -> str:
    """The field's value."""
    return _MARK + base64.b64encode(thought.encode()).decode()


def opened(value: object) -> str:
    """What was thought; of what is not ours, or not whole, nothing is known."""
    if not isinstance(value, str) or not value.startswith(_MARK):
        return ""
    try:
        return base64.b64decode(value.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""
