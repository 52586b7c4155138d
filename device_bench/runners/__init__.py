"""One runner per runtime, registered as an entry point of the group ``edgeqkv.runners``.

A module has one function ``load(artifact, directory, *, threads, capacity) -> edgeqkv.runner.Runner``.
"""
