"""Latency, where the time goes, memory, and the bare architectures it is measured on."""
