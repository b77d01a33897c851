"""Runs grammars the way SGLang does: reads what to do from standard input, writes what came out to standard output.

A script of its own, for the Python of the SGLang environment, which has xgrammar; start it with `python -P`. The
grammars of a tokenizer are compiled by one compiler with its cache, as in a server: that cache is part of what is
tested. Without a tokenizer the vocabulary is the 256 bytes, so that nothing about a tokenizer keeps a text from being
reached; its stop is 256.

Input: a list of `{"tokenizer": folder or None, "stop_ids", "seed", "pieces", "ends", "jobs": [...]}`; pieces are what
to spell where a grammar lets it, ends once a text is long, as token ids. A job has `structural_tag`, `texts` (token ids
that the grammar must let through, each with its stop) and `walks` (how many texts to sample).
Output: for each a list of objects, one a job: `error`, or `compile_s`, `refused` (per text None, or where it is refused
and why) and `walks` (token ids; one that does not end has no stop).
"""

import json
import random
import sys
import time

import numpy as np
import xgrammar
from transformers import PreTrainedTokenizerFast

LONG, LIMIT = 250, 2500  # tokens, from which on a walk looks for the end, and at which it is given up


def run(tokenizer, stop_ids, seed, jobs, **liked):
    """Run the jobs of one tokenizer."""
    if tokenizer is None:
        vocabulary = [bytes([code]) for code in range(256)] + [b"</s>"]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=stop_ids)
    else:
        loaded = PreTrainedTokenizerFast.from_pretrained(tokenizer)
        info = xgrammar.TokenizerInfo.from_huggingface(loaded, vocab_size=len(loaded), stop_token_ids=stop_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=2)
    chance = random.Random(seed)
    answers = []
    for job in jobs:
        begin = time.perf_counter()
        try:
            grammar = compiler.compile_structural_tag(job["structural_tag"])
        except RuntimeError as error:
            answers.append({"error": str(error)})
            continue
        answer = {"compile_s": time.perf_counter() - begin}
        answer["refused"] = [refused(grammar, info, ids) for ids in job["texts"]]
        answer["walks"] = [walk(grammar, info, stop_ids, chance, **liked) for _ in range(job["walks"])]
        answers.append(answer)
    return answers


def allowed(matcher, info):
    """The ids that may come next, by the mask that a server would put over the logits."""
    mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
    if not matcher.fill_next_token_bitmask(mask, 0):
        return np.arange(info.vocab_size)
    return np.flatnonzero(np.unpackbits(mask.numpy()[0].view(np.uint8), bitorder="little")[: info.vocab_size])


def refused(grammar, info, ids):
    """The position of the first token that the grammar refuses, and why; None if it takes all and ends."""
    matcher = xgrammar.GrammarMatcher(grammar)
    for position, token in enumerate(ids):
        if token not in allowed(matcher, info):
            return [position, "masked"]
        if not matcher.accept_token(token):
            return [position, "not accepted"]
    return None if matcher.is_terminated() else [len(ids), "not ended"]


def walk(grammar, info, stop_ids, chance, pieces, ends):
    """Sample a text: pieces that fit, spelled as far as the grammar lets them, or any token."""
    matcher = xgrammar.GrammarMatcher(grammar)
    ids = []
    while not matcher.is_terminated() and len(ids) < LIMIT:
        found = allowed(matcher, info)
        some = set(found.tolist())
        liked = ends if len(ids) > LONG and chance.random() < 0.7 else pieces
        fitting = [piece for piece in liked if piece[0] in some]
        stops = [[stop] for stop in stop_ids if stop in some]
        if stops and (len(stops) == len(some) or chance.random() < 0.5):
            fitting = stops
        elif not fitting or chance.random() < 0.2:
            plain = (
                [code for code in found if code < 128] if info.vocab_size == 257 else []
            )  # bytes that are characters
            fitting = [[int(chance.choice(plain or found))]]
        for position, token in enumerate(chance.choice(fitting)):
            if not matcher.accept_token(token):
                assert position, f"{token} is in the mask and not accepted"
                break
            ids.append(token)
    return ids


if __name__ == "__main__":
    json.dump([run(**asked) for asked in json.load(sys.stdin)], sys.stdout)
