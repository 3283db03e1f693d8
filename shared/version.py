"""The package version and the version of the parent-worker wire.

`WIRE` is bumped whenever the meaning of a message changes; a worker and a parent with different
numbers refuse each other.
"""

VERSION = "0.1.0"
WIRE = 5
