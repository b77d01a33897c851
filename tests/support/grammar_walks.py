"""Runs grammars the way SGLang does: reads jobs from standard input, writes what came out to standard output.

A script of its own, for the Python of the SGLang environment, which has xgrammar; start it with `python -P`. The
grammars of a tokenizer are compiled by one compiler with its cache, as in a server: that cache is part of what is
tested.

Input: a list of `{"tokenizer": folder, "stop_ids": [...], "jobs": [...]}`; a job has `structural_tag`, `texts` (token
ids that the grammar must let through, each with its stop) and `walks` (how many random texts to sample).
Output: for each a list of objects, one a job: `compile_s`, `refused` (per text None, or where it is refused and why)
and `walks` (token ids).
"""

import json
import random
import sys
import time

import numpy as np
import xgrammar
from transformers import PreTrainedTokenizerFast

LIMIT = 1000  # tokens of a random walk


def main() -> None:
    """Do what standard input asks for."""
    json.dump([run(**asked) for asked in json.load(sys.stdin)], sys.stdout)


def run(tokenizer, stop_ids, jobs):
    """Run the jobs of one tokenizer."""
    loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(loaded, vocab_size=len(loaded), stop_token_ids=stop_ids)
    compiler = xgrammar.GrammarCompiler(info)
    answers = []
    for seed, job in enumerate(jobs):
        begin = time.perf_counter()
        grammar = compiler.compile_structural_tag(job["structural_tag"])
        answer = {"compile_s": time.perf_counter() - begin}
        answer["refused"] = [refused(grammar, info, ids) for ids in job["texts"]]
        chance = random.Random(seed)
        followers = {}
        for ids in job["texts"]:
            for token, follower in zip(ids, ids[1:], strict=False):
                followers.setdefault(token, set()).add(follower)
        answer["walks"] = [walk(grammar, info, chance, followers) for _ in range(job["walks"])]
        answers.append(answer)
    return answers


def allowed(matcher, info):
    """Whether each id may come next, by the mask that a server would put over the logits."""
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    if not matcher.fill_next_token_bitmask(mask, 0):
        return np.ones(info.vocab_size, dtype=np.uint8)
    return np.unpackbits(mask.numpy()[0].view(np.uint8), bitorder="little")[: info.vocab_size]


def refused(grammar, info, ids):
    """The position of the first token that the grammar refuses, and why; None if it takes all and ends."""
    matcher = xgrammar.GrammarMatcher(grammar)
    for position, token in enumerate(ids):
        if not allowed(matcher, info)[token]:
            return [position, "masked"]
        if not matcher.accept_token(token):
            return [position, "not accepted"]
    return None if matcher.is_terminated() else [len(ids), "not ended"]


def walk(grammar, info, chance, followers):
    """Sample a text: any allowed token, or one that followed the last token in a known text, so that strings end."""
    matcher = xgrammar.GrammarMatcher(grammar)
    known = sorted(set().union(*followers.values()))
    ids = []
    while not matcher.is_terminated() and len(ids) < LIMIT:
        mask = allowed(matcher, info)
        likely = []
        if chance.random() < 0.7:
            near = sorted(followers.get(ids[-1], ())) if ids else []
            likely = [token for token in near if mask[token]] or [token for token in known if mask[token]]
        if not likely:  # most of the time some token at hand is allowed; looking at all of them is slow
            likely = [token for token in chance.choices(range(len(mask)), k=30) if mask[token]][:1]
        token = chance.choice(likely) if likely else int(chance.choice(np.flatnonzero(mask)))
        assert matcher.accept_token(token), f"{token} is in the mask and not accepted"
        ids.append(token)
    return ids


if __name__ == "__main__":
    main()
