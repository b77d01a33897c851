"""A math agent with a Python tool, for slime: `generate` and `reward_func`.

--custom-generate-function-path generate_with_strands.generate
--custom-rm-path generate_with_strands.reward_func
"""

from __future__ import annotations

from typing import Any

from python_tool import execute_python_code

from strands_sglang.trainers.slime import make_generate, make_reward

SYSTEM_PROMPT = """
You solve mathematical problems. Use `execute_python_code` for computations.

- Think about the problem first, and work in small steps.
- Compute with Python rather than in your head, and check results with it where that is possible. A program starts from
  nothing every time, and you see only what it prints.
- End with the final answer in \\boxed{}.
""".strip()

MAX_TOOL_ITERATIONS = 5
TOOL_BONUS = 0.05
"""What a wrong answer gains per tool iteration from the third on, so that trying is not unlearned."""
WRONG_AT_MOST = -0.6
FAILED = -1.0
"""The reward of what fails: no better than being wrong."""

generate = make_generate(
    tools=[execute_python_code],
    system_prompt=SYSTEM_PROMPT,
    max_tool_iters=MAX_TOOL_ITERATIONS,
    failure_reward=FAILED,
)


def score(args: Any, sample: Any, **kwargs: Any) -> float:
    """1 for the right answer; for a wrong one -1, and 0.05 more for every tool iteration from the third on, up to -0.6.

    Args:
        args: slime's arguments.
        sample: slime's sample, with the right answer as its label.
        **kwargs: Whatever else slime passes.
    """
    from slime.rollout.rm_hub.math_dapo_utils import compute_score

    answer = sample.label or ""
    _, _, text = sample.response.rpartition("</tool_response>")  # what a program printed is no answer
    result = compute_score(text, answer, strict_box_verify=False)
    if result["pred"] == "[INVALID]":  # no line "Answer: ...": the answer may be boxed
        result = compute_score(text, answer, strict_box_verify=True)
    if result["score"] >= 0:
        return float(result["score"])
    iterations = sample.metadata["strands_sglang"]["tool_iterations"]
    return min(WRONG_AT_MOST, FAILED + max(0, iterations - 2) * TOOL_BONUS)


reward_func = make_reward(score, failure_reward=FAILED)
