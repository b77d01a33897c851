"""Samples texts under grammars byte by byte, as a hostile model would choose them; a script for SGLang's Python.

The vocabulary is the 256 bytes, so that nothing about a tokenizer keeps a text from being reached. Start it with
`python -P`.

Input: `{"seed", "grammars", "walks", "pieces", "ends"}`: structural tags, how many texts to sample of each, what to
spell where the grammar lets it (marks, quotes, openings of other tools), and what to spell once a text is long.
Output: for each grammar `{"error"}`, or `{"compile_s", "texts"}`.
"""

import json
import random
import sys
import time

import numpy as np
import xgrammar

STOP = 256
LONG = 250  # bytes, from which on a walk looks for the end
LIMIT = 2500  # at which a text is given up; random reasoning may go on and on


def main() -> None:
    """Do what standard input asks for."""
    asked = json.load(sys.stdin)
    vocabulary = [bytes([code]) for code in range(STOP)] + [b"</s>"]
    info = xgrammar.TokenizerInfo(
        vocabulary, vocab_type=xgrammar.VocabType.RAW, vocab_size=len(vocabulary), stop_token_ids=[STOP]
    )
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    chance = random.Random(asked["seed"])
    pieces, ends = ([text.encode() for text in asked[key]] for key in ("pieces", "ends"))
    answers = []
    for tag in asked["grammars"]:
        begin = time.perf_counter()
        try:
            grammar = compiler.compile_structural_tag(tag)
        except RuntimeError as error:
            answers.append({"error": str(error)})
            continue
        compile_s = time.perf_counter() - begin
        texts = [walk(grammar, chance, pieces, ends) for _ in range(asked["walks"])]
        answers.append(
            {"compile_s": compile_s, "texts": [text.decode(errors="replace") for text in texts if text is not None]}
        )
    json.dump(answers, sys.stdout)


def walk(grammar, chance, pieces, ends):
    """Sample a text: pieces that fit, spelled as far as the grammar lets them, or any byte."""
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, STOP + 1)
    written = bytearray()
    while not matcher.is_terminated():
        if len(written) > LIMIT:
            return None
        matcher.fill_next_token_bitmask(mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.numpy()[0].view(np.uint8), bitorder="little")[: STOP + 1])
        assert len(allowed), f"nothing may follow {bytes(written[-200:])}"
        if allowed[-1] == STOP and (len(allowed) == 1 or chance.random() < 0.5):
            matcher.accept_token(STOP)
            break
        if len(allowed) == 1:
            piece = bytes([allowed[0]])
        else:
            first = set(allowed.tolist())
            liked = ends if len(written) > LONG and chance.random() < 0.7 else pieces
            fitting = [found for found in liked if found[0] in first]
            if fitting and chance.random() < 0.8:
                piece = chance.choice(fitting)
            else:
                ascii_only = [code for code in allowed if code < 128]
                piece = bytes([chance.choice(ascii_only or [code for code in allowed if code != STOP])])
        for code in piece:
            if not matcher.accept_token(code):
                break
            written.append(code)
    return bytes(written)


if __name__ == "__main__":
    main()
