"""Runs grammars as SGLang does: reads jobs from standard input, writes results to standard output.

This script runs with the Python of the SGLang environment, which has xgrammar; start it with `python -P`. One compiler
with its cache compiles all grammars of a tokenizer, as in a server, so the cache is tested too. Without a tokenizer,
the vocabulary is the 256 bytes, which can spell every text; its stop token is 256.

Input: a list of `{"tokenizer": folder or None, "stop_ids", "seed", "pieces", "ends", "jobs": [...]}`. `pieces` are
token ids to spell where the grammar allows it, `ends` those for the end of a long text. A job has `structural_tag`,
`texts` (token ids that the grammar must accept, each with its stop token) and `walks` (the number of texts to sample).

Output: for each entry a list with one object per job: `error`, or `compile_s`, `refused` (per text None, or the
position and the reason of its rejection) and `walks` (token ids; without a stop token if the text did not end).
"""

import json
import random
import sys
import time

import numpy as np
import xgrammar
from transformers import PreTrainedTokenizerFast

LONG, LIMIT = 250, 2500  # tokens after which a walk tries to end, and after which it gives up


def run(tokenizer, stop_ids, seed, jobs, **liked):
    """Run the jobs of one tokenizer."""
    if tokenizer is None:
        vocabulary = [bytes([code]) for code in range(256)] + [b"</s>"]
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=len(vocabulary), stop_token_ids=stop_ids)
    else:
        loaded = PreTrainedTokenizerFast(tokenizer_file=f"{tokenizer}/tokenizer.json")
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


class Mask:
    """The tokens that a grammar allows next, by the mask that a server applies to the logits."""

    def __init__(self, grammar, info):
        self.matcher = xgrammar.GrammarMatcher(grammar)
        self._words = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        self._bytes = self._words.numpy()[0].view(np.uint8)
        self._size = info.vocab_size

    def read(self):
        """Return for each token whether it is allowed."""
        if not self.matcher.fill_next_token_bitmask(self._words, 0):
            return np.ones(self._size, np.uint8)
        return np.unpackbits(self._bytes, count=self._size, bitorder="little")


def refused(grammar, info, ids):
    """Return the position of the first rejected token and the reason; None if the grammar accepts all and ends."""
    mask = Mask(grammar, info)
    for position, token in enumerate(ids):
        if not mask.read()[token]:
            return [position, "masked"]
        if not mask.matcher.accept_token(token):
            return [position, "not accepted"]
    return None if mask.matcher.is_terminated() else [len(ids), "not ended"]


def walk(grammar, info, stop_ids, chance, pieces, ends):
    """Sample a text of pieces that fit, spelled as far as the grammar allows, or of any tokens."""
    mask = Mask(grammar, info)
    begins_piece, begins_end = (np.array([piece[0] for piece in liked]) for liked in (pieces, ends))
    ids = []
    while not mask.matcher.is_terminated() and len(ids) < LIMIT:
        is_allowed = mask.read()
        liked, begins = pieces, begins_piece
        if len(ids) > LONG and chance.random() < 0.7:
            liked, begins = ends, begins_end
        fitting = [liked[number] for number in np.flatnonzero(is_allowed[begins])]
        stops = [[stop] for stop in stop_ids if is_allowed[stop]]
        if stops and (len(stops) == np.count_nonzero(is_allowed) or chance.random() < 0.5):
            fitting = stops
        elif not fitting or chance.random() < 0.2:
            found = np.flatnonzero(is_allowed)
            plain = found[found < 128] if info.vocab_size == 257 else ()  # bytes that are characters
            fitting = [[int(chance.choice(plain if len(plain) else found))]]
        for position, token in enumerate(chance.choice(fitting)):
            if not mask.matcher.accept_token(token):
                assert position, f"{token} is in the mask and not accepted"
                break
            ids.append(token)
    return ids


if __name__ == "__main__":
    json.dump([run(**asked) for asked in json.load(sys.stdin)], sys.stdout)
