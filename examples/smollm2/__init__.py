"""A small real engine, in numpy alone, that keeps its KV cache in kvstored: SmolLM2-135M, run by `make demo`.

Read `engine.py` to learn how an engine calls kvstored. The rest is what any engine has: weights, tokens, a forward pass.
"""
