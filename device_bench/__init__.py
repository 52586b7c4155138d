"""Run bundles and measure them. Needs numpy and one runtime, not torch. Imports edgeqkv, never export."""
