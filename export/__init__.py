"""From MODEL_DIR to a verified bundle: lower, verify, audit. Imports edgeqkv, never device_bench."""
