"""One module per format, found by its name: ``to_<backend>`` lowers, ``read_<backend>`` audits.

A ``to_`` module has two functions (see export/lowering.py for the types)::

    check(request)                      raise UnsupportedError before anything is traced
    lower(decoder, request, directory)  write the model's files into directory, return Lowered

A ``read_`` module has one: ``read(artifact, directory) -> ArtifactFacts`` (export/facts.py).
Vendor SDKs are imported inside the functions, so that importing a module costs nothing.
"""
