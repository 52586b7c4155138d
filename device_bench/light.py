"""In a worker process, keep SDKs from importing what reading and running a bundle never uses.

Measured, CPU seconds until a small bundle's declared bytes are read: Core ML 12.3 to 1.6,
ExecuTorch 7.6 to 3.7; it is most of what a short bench of these two costs.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType

# coremltools' frontends and converters; a name that maps to None raises ImportError, which it expects.
_ABSENT = {"coreml": ("torch", "tensorflow", "sklearn", "xgboost", "executorch", "torchao")}
# Packages whose __init__ imports the exporter; their submodules are read from the same folder.
_BARE = {"executorch": ("executorch.exir", "executorch.backends.xnnpack")}


def import_light(backend: str) -> None:
    """Call it before the SDK of ``backend`` is imported, in a process that does nothing else."""
    for name in _ABSENT.get(backend, ()):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    for name in _BARE.get(backend, ()):
        spec = find_spec(name) if find_spec(name.split(".")[0]) else None
        if name not in sys.modules and spec and spec.submodule_search_locations:
            bare = ModuleType(name)
            bare.__path__ = list(spec.submodule_search_locations)
            sys.modules[name] = bare
