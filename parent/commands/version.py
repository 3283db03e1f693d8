"""Print the version of mlxd.

mlxd version
"""

import argparse

from shared.version import VERSION


def arguments(parser: argparse.ArgumentParser) -> None:
    pass


def run(args: argparse.Namespace) -> int:
    print(f"mlxd {VERSION}")
    return 0
