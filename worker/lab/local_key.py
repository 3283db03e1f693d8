"""The key for the server whose job this is, where it wants one: from the environment that the server gave us."""

import os

NAME = "LOCAL_API_KEY"  # as `parent/jobs/runs.py` calls it


def headers() -> dict[str, str]:
    """What requests to the server send along; nothing where it has no keys."""
    key = os.environ.get(NAME, "")
    return {"authorization": f"Bearer {key}"} if key else {}
