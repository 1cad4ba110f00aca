"""Run by an engine's Python: a GGUF file as a folder that Transformers and vLLM load, in bfloat16; and its tokenizer."""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(folder: str, file: str, out: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=GgufConfig(gguf_file=file, dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)


if __name__ == "__main__":
    convert(*sys.argv[1:])
