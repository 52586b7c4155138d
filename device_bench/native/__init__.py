"""The passes of ``device_bench.measure`` in C, for a process without Python: here or on a phone.

bench.c runs a job; onnxruntime.c and executorch.cpp are the runtimes it can be linked with.
"""
