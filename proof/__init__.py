"""Runs that prove what the server promises: faults, load, leaks of text, and the figures of the benchmarks page.

Each is a program of its own (`python -m proof.faults --help`) that starts the servers it needs,
stops them, and writes JSON that names the machine; `docs/` turns that into pages.
"""
