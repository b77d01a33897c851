"""The AIME example on a small local file against a scripted server."""

from __future__ import annotations

import json
import re

from strands_sglang.testing import ScriptedSGLang
from support.agents import call
from support.environments import lines
from support.processes import run_example


def test_it_prints_pass_at_k_of_a_local_file_and_goes_on_with_what_is_there(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path / "tokenizer")
    problems = tmp_path / "aime.jsonl"
    rows = [{"id": n, "problem": f"Find {n} * 11.", "answer": str(11 * n), "year": "2024"} for n in (3, 4, 5)]
    problems.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def answer(request):
        factor = re.findall(r"Find (\d+) \* 11", request.text)[-1]
        if "<tool_response>" in request.text:
            return rf"\boxed{{{int(factor) * 11 if factor != '5' else 0}}}"
        return call("calculator", expression=f"{factor} * 11")

    server = ScriptedSGLang(chatml_tokenizer, answer)
    with server.serve() as url:
        command = ["--sglang-base-url", url, "--tokenizer", tmp_path / "tokenizer", "--dataset", problems]
        command += ["--n-samples", 2, "--output", tmp_path / "out"]
        done = run_example("aime_eval", *command)
        asked = len(server.requests)
        again = run_example("aime_eval", *command)
    assert done.returncode == again.returncode == 0, done.stderr
    assert re.search(r"^pass@1 +0\.6667$", done.stdout, re.MULTILINE)
    assert again.stdout == done.stdout and len(server.requests) == asked == 12
    assert len(lines(tmp_path / "out" / "results.jsonl")) == 6
