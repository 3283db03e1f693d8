"""Does every client that speaks to the server get what its SDK promises? `python -m tests.conformance --help`."""
