"""The environment example against a scripted server."""

from __future__ import annotations

from strands_sglang.testing import ScriptedSGLang
from support.agents import call
from support.processes import run_example


def test_it_rewards_an_agent_that_uses_its_calculator(chatml_tokenizer, tmp_path):
    chatml_tokenizer.save_pretrained(tmp_path)

    def answer(request):
        _, _, question = request.text.rpartition("<|im_start|>user\n")
        if "<tool_response>" in question:
            return "It is " + question.split("<tool_response>\n")[1].split("\n")[0] + "."
        return call("calculator", expression=question.split("What is ")[1].split("?")[0])

    server = ScriptedSGLang(chatml_tokenizer, answer)
    with server.serve() as url:
        done = run_example("math_env", "--sglang-base-url", url, "--tokenizer", str(tmp_path), "--worked-examples")
    assert done.returncode == 0, done.stderr
    *episodes, summary = done.stdout.splitlines()
    assert all("reward 1.0  task_complete  1 tool calls" in line for line in episodes)
    assert summary == "mean reward 1.00 of 6 episodes"
