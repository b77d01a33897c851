"""Requests to a real SGLang server, actions on it, and its log, independent of the library."""

import asyncio
import json

import httpx
import torch
from transformers import AutoModelForCausalLM


async def running_requests(base_url):
    """Return the number of requests that the server runs or has queued."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        loads = (await http.get("/v1/loads")).json()["loads"]
    return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)


async def until_it_runs(base_url):
    """Wait until the server is generating."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        while not (await http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"]:
            await asyncio.sleep(0.01)  # polls the server itself, with pytest's timeout as the limit


async def at_best(seconds, *, goal):
    """Return the best of up to five tries: a busy machine can be late, a library that does nothing always is."""
    best = await seconds()
    for _ in range(4):
        if best >= goal:
            best = min(best, await seconds())
    return best


async def abort_all(base_url):
    """End all generations, as a trainer does before it updates the weights."""
    async with httpx.AsyncClient(base_url=base_url, timeout=60, trust_env=False) as http:
        (await http.post("/abort_request", json={"abort_all": True})).raise_for_status()


# `<|endoftext|>` of the local models, which a random one samples once in a thousand tokens. It ends a turn, though not
# as the templates do: a conversation rightly forks behind an answer that is cut there.
OTHER_STOP = 0
NO_OTHER_STOP = {str(OTHER_STOP): -100.0}  # a logit bias


# Arguments that make a server log every request and its whole response.
LOG_EVERYTHING = ("--log-requests", "--log-requests-level", "3", "--log-requests-format", "json")


def logged(path, event):
    """Return the log's entries of one kind, `request.received` or `request.finished`.

    A killed server may leave the last line unfinished.
    """
    entries = []
    # As bytes: a str has line ends that JSON does not escape, U+0085 for one, and a random model samples them.
    for line in path.read_bytes().splitlines(keepends=True):
        start = line.find(b'{"')
        if f'"{event}"'.encode() in line and start >= 0 and line.endswith(b"\n"):
            entries.append(json.loads(line[start:].decode(errors="replace")))
    return entries


# --- Judge of the server's computation: a forward pass of its model in float32 ---


def load_reference(model_path):
    """The model in float32."""
    torch.cos(torch.zeros(1))  # the first cosines must not come from two threads: see examples/grpo_cpu/threads.py
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


def replayed(reference, token_ids, routed):
    """Logprob of each token after the first, shape (T - 1,), and the router's logits, (T - 1, layers, experts).

    The experts are those of `routed`, shape (T - 1, layers, top_k): where two of them are nearly equal, float noise
    decides which one a server takes, and another one changes what comes after it by far more than noise.
    """
    ids, experts = torch.tensor(token_ids), torch.as_tensor(routed).long()
    hooks = [
        layer.mlp.gate.register_forward_hook(_choosing(experts[:, number]))
        for number, layer in enumerate(reference.model.layers)
    ]
    try:
        with torch.no_grad():
            output = reference(ids[None, :-1], output_router_logits=True)
    finally:
        for hook in hooks:
            hook.remove()
    logprobs = torch.log_softmax(output.logits[0].float(), dim=-1).gather(1, ids[1:, None])[:, 0]
    return logprobs.tolist(), torch.stack(output.router_logits, dim=1)


def _choosing(experts):
    """A hook that makes a router choose these experts, shape (T - 1, top_k), with the weights that it gives them."""

    def choose(router, args, output):
        logits, _, _ = output
        weights = torch.softmax(logits.float(), dim=-1).gather(1, experts)
        if router.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return logits, weights.to(logits.dtype), experts

    return choose


def rescored(model_path, sequence, temperature, *, logit_bias=None):
    """Logprob of each token after the first given those before it, shape (T - 1,).

    The server biases the logits of sampled tokens and scales them by the temperature, those of prompt tokens never.
    """
    ids = torch.tensor(sequence.token_ids)
    with torch.no_grad():
        logits = load_reference(model_path)(ids[None, :-1]).logits[0].float()
    is_sampled = torch.tensor(sequence.loss_mask[1:]) == 1
    for token, bias in (logit_bias or {}).items():
        logits[is_sampled, int(token)] += bias
    scale = torch.where(is_sampled, temperature, 1.0)
    logprobs = torch.log_softmax(logits / scale[:, None], dim=-1).gather(1, ids[1:, None])[:, 0].tolist()
    return logprobs


def rescored_among(model_path, sequence, temperature):
    """Logprob of each token after the first among the ids of its sampling mask, shape (T - 1,); None without one."""
    ids = sequence.token_ids
    with torch.no_grad():
        logits = load_reference(model_path)(torch.tensor(ids)[None, :-1]).logits[0].float() / temperature
    logprobs = []
    for scores, token_id, row in zip(logits, ids[1:], list(sequence.sampling_mask.rows())[1:], strict=True):
        logprobs.append((scores[token_id] - scores[row].logsumexp(dim=0)).item() if row else None)
    return logprobs


def assert_best_experts(routed, router_logits):
    """Check that routed experts, shape `(T - 1, layers, top_k)`, are the router's best, up to float noise."""
    chosen = torch.zeros_like(router_logits, dtype=torch.bool).scatter(2, torch.as_tensor(routed).long(), True)
    worst_in = router_logits.masked_fill(~chosen, torch.inf).amin(dim=-1)
    best_out = router_logits.masked_fill(chosen, -torch.inf).amax(dim=-1)
    assert (worst_in > best_out - 1e-4).all()
    assert (worst_in > best_out).float().mean() > 0.95
