"""The benchmark against other ways to save activation memory: `python -m tests.bench.peers`."""
