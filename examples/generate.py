"""Plain `generate()` with a stored prefix: `python examples/generate.py Qwen/Qwen3-0.6B document.txt "a question"`, twice. Needs a daemon (`make run`)."""

import sys
import time
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstored.connectors.transformers import KvstoredCache

name, document, question = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="auto", device_map="auto")
prompt = f"{Path(document).read_text()}\n\nQuestion: {question}\nAnswer:"
ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)

with KvstoredCache(model) as kvstored:
    kvstored.connected(timeout_s=5)                        # until then everything is a miss
    began = time.perf_counter()
    cache = kvstored.load(ids)                             # the longest stored prefix of these ids
    loaded = int(cache.get_seq_length())
    output = model.generate(ids, cache=cache, max_new_tokens=40)   # computes the rest
    kvstored.store(output, cache)                          # prompt and answer, in the background
    print(tokenizer.decode(output[0, ids.shape[1]:]), f"\n{loaded} of {ids.shape[1]} tokens loaded, {time.perf_counter() - began:.2f} s")
