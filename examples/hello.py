"""The example of README.md: store four blocks, match them, read them back. Needs a running daemon (`make run`)."""

import numpy as np
from kvstored.client import Client, GroupKind, GroupSpec, NamespaceSpec

spec = NamespaceSpec(
    model="llama-3.1-8b", revision="main@0e9e39f", dtype="bfloat16", layout="vllm-nhd", layout_version=1, block_tokens=256,
    groups=(GroupSpec("kv", GroupKind.LINEAR, bytes_per_block=1 << 20),),
)
with Client() as client:                                   # the local daemon, over shared memory
    kv = client.open_namespace(spec)
    keys = kv.keys(tokens=range(1000))                     # 3 full blocks and a partial one of 232 tokens
    sizes = [1 << 20] * 3 + [232 * 4096]
    rows = [[np.full(size, i, np.uint8)] for i, size in enumerate(sizes)]
    print(kv.put(keys, rows).stored, "blocks are stored")   # .committed by this put, or .present before it
    print(kv.match(keys).hit_tokens, "tokens hit")
    blocks = kv.get(keys).blocks                           # private, verified copies
    with kv.get_view(keys[:2]) as view:                    # leased, read-only, in place
        assert np.array_equal(view.blocks[0][0], blocks[0][0])
