"""kvstored: a daemon that keeps the KV cache of LLM inference engines in DRAM and on NVMe.

Imports nothing: the keeper lives in this package and must stay small, clients must start fast.
"""

__version__ = "0.1.0"
