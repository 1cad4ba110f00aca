"""A vLLM engine of a test in a process of its own: JSON lines in, JSON lines out.

python -m tests.e2e.vllm_process '{"model": ..., "connector": {...} or null, "engine": {...}}'
"""

import json
import os
import sys
import time
from typing import Any

os.environ.update(
    HF_HUB_OFFLINE="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    OMP_NUM_THREADS="1",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
)


def main() -> None:
    told = json.loads(sys.argv[1])
    if told["engine"].get("tensor_parallel_size", 1) > 1:
        os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    engine = _engine(told)
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = getattr(sys.modules[__name__], f"on_{asked.pop('do')}")(engine, **asked)
        print(json.dumps(answer), file=answers)
    engine.llm_engine.engine_core.shutdown()


def on_generate(
    engine: Any, *, prompt: list[int], tokens: int, salt: str = "", adapter: str = ""
) -> dict[str, Any]:
    given = {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
    return _said(engine, [given], tokens, adapter)[0]


def on_generate_all(engine: Any, *, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    return _said(engine, [{"prompt_token_ids": prompt} for prompt in prompts], tokens, "")


def _said(
    engine: Any, given: list[dict[str, Any]], tokens: int, adapter: str
) -> list[dict[str, Any]]:
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    began_s = time.perf_counter()
    has_tokenizer = not engine.model_config.skip_tokenizer_init
    sampling = SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=has_tokenizer, logprobs=1
    )
    lora = LoRARequest("adapter", 1, adapter) if adapter else None
    outs = engine.generate(given, sampling, use_tqdm=False, lora_request=lora)
    return [
        {
            "tokens": list(out.outputs[0].token_ids),
            "text": out.outputs[0].text,
            "logprobs": [next(iter(each.values())).logprob for each in out.outputs[0].logprobs],
            "cached": out.num_cached_tokens,
            "seconds": time.perf_counter() - began_s,
        }
        for out in outs
    ]


def on_metrics(engine: Any) -> dict[str, float]:
    found: dict[str, float] = {}
    for metric in engine.get_metrics():
        if any(word in metric.name for word in ("external", "kvstored", "preemptions")):
            value = getattr(metric, "value", None)
            if value is not None:
                name = metric.labels.get("source", "")
                found[f"{metric.name}{'/' + name if name else ''}"] = value
    return found


def on_reset(engine: Any) -> bool:
    """vLLM's own prefix cache, not what is stored outside."""
    return bool(engine.reset_prefix_cache())


def on_tokens(engine: Any, *, text: str) -> list[int]:
    return list(engine.get_tokenizer().encode(text))


def _engine(told: dict[str, Any]) -> Any:
    from vllm import LLM
    from vllm.config import KVTransferConfig

    transfer = None
    if told["connector"] is not None:
        transfer = KVTransferConfig(
            kv_connector="KvstoredConnector",
            kv_connector_module_path="kvstored.connectors.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=told["connector"],
        )
    options = {
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "enforce_eager": True,
        "block_size": 128,
        "max_num_seqs": 4,
        "disable_log_stats": False,
        **told["engine"],
    }
    return LLM(model=told["model"], kv_transfer_config=transfer, **options)


if __name__ == "__main__":
    main()
