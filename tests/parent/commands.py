"""Commands in this process, as the command line calls them."""

from parent.cli import main


def run(*words: str) -> int:
    """The exit code of `mlxd WORDS`, whether it was returned or raised."""
    try:
        return main(list(words))
    except SystemExit as left:
        return int(left.code or 0)
