"""The output of the demo: finished rollouts, the conversation and tokens of one of them, and a table for all."""

from __future__ import annotations

import io
import os
import re
from dataclasses import dataclass
from pathlib import Path

from calculator import evaluate
from rich.console import Console
from rich.table import Table
from rich.text import Text
from strands.types.content import Messages

from strands_sglang import SGLangModel, TerminationReason
from strands_sglang.inspection.reading import read
from strands_sglang.inspection.show import episode_lines

console = Console(highlight=False)


@dataclass(frozen=True)
class Rollout:
    """One finished episode.

    Attributes:
        expression: Arithmetic expression of the question.
        model: Model object with the recorded tokens.
        messages: Conversation from the question on, without the worked examples.
        reason: Reason why the episode ended.
    """

    expression: str
    model: SGLangModel
    messages: Messages
    reason: TerminationReason

    @property
    def expected(self) -> str:
        """Right answer."""
        return f"{evaluate(self.expression):g}"

    @property
    def answer(self) -> str:
        """Text of the last message if it is the assistant's, else an empty string."""
        last = self.messages[-1]
        texts = [block["text"].strip() for block in last["content"] if "text" in block]
        return " ".join(texts) if last["role"] == "assistant" else ""

    @property
    def tool_results(self) -> list[str]:
        """Results of the calculator in order, without failed and unknown calls."""
        results = [
            block["toolResult"] for message in self.messages for block in message["content"] if "toolResult" in block
        ]
        return [result["content"][0].get("text", "") for result in results if result["status"] == "success"]

    @property
    def is_right(self) -> bool:
        """Whether the answer ends with the right number, and the calculator returned it before."""
        numbers = re.findall(r"-?\d+(?:\.\d+)?", self.answer)
        return self.expected in self.tool_results and numbers[-1:] == [self.expected]


def print_finished(rollout: Rollout, number: int, total: int) -> None:
    """Print one line for a rollout that has ended."""
    wrong = "wrong" if rollout.reason is TerminationReason.TASK_COMPLETE else rollout.reason.value
    verdict = "right" if rollout.is_right else wrong
    line = f"[{number:2}/{total}] {rollout.expression} -> {shorten(rollout.answer) or '(no answer)'}"
    style = "green" if rollout.is_right else "red"
    note = "" if rollout.tool_results else " (no tool)"
    console.print(Text.assemble(line, " ", (verdict, style), note), soft_wrap=True)


def shorten(text: str, length: int = 50) -> str:
    """Return the text in one line of at most `length` characters."""
    line = " ".join(text.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def save_svg(rollout: Rollout, file: Path, path: Path) -> None:
    """Write the output of `print_rollout` as an SVG picture."""
    picture = Console(highlight=False, record=True, width=100, force_terminal=True, file=io.StringIO())
    os.environ["FORCE_COLOR"] = "1"
    print_rollout(rollout, file, picture)
    # Without Rich's web font: opening the picture loads nothing.
    svg = re.sub(r"@font-face \{.*?\}\s*", "", picture.export_svg(title="one rollout"), flags=re.DOTALL)
    path.write_text(svg.replace("Fira Code", "ui-monospace"), encoding="utf-8")


def print_rollout(rollout: Rollout, file: Path, console: Console = console) -> None:
    """Print the conversation of a rollout as the agent saw it, and its tokens as `strands-sglang show` does.

    Args:
        rollout: The rollout.
        file: Its saved trajectory.
        console: Where to print.
    """
    console.rule("the conversation of one rollout, after three worked examples")
    for message in rollout.messages:
        for block in message["content"]:
            if "text" in block:
                console.print(Text(f"{message['role']:>9}: {block['text'].strip()}"))
            elif "toolUse" in block:
                use = block["toolUse"]
                console.print(Text(f"{message['role']:>9}: calls {use['name']}({use['input']})", style="cyan"))
            elif "toolResult" in block:
                texts = " ".join(content.get("text", "") for content in block["toolResult"]["content"])
                console.print(Text(f"{'tool':>9}: {texts}", style="cyan"))
    console.rule("its turns, and the tokens of the last one by loss mask")
    for line in episode_lines(read([file]), color="mask"):
        console.print(Text.from_ansi(line))


def print_summary(rollouts: list[Rollout], seconds: float) -> None:
    """Print a table that summarizes all rollouts.

    Args:
        rollouts: All rollouts.
        seconds: Seconds that they took together.
    """
    generations = [
        turn.generation
        for rollout in rollouts
        for turn in rollout.model.trajectory.turns
        if turn.generation is not None
    ]
    sampled = sum(generation.completion_tokens for generation in generations)
    prompt = sum(generation.prompt_tokens for generation in generations)
    cached = sum(generation.cached_tokens for generation in generations)
    count = len(rollouts)
    right = sum(rollout.is_right for rollout in rollouts)
    used = sum(bool(rollout.tool_results) for rollout in rollouts)

    table = Table(title=f"{count} rollouts", title_style="bold", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("rollouts", str(count))
    table.add_row("right answers, through the tool", f"{right} ({right / count:.0%})")
    table.add_row("rollouts that used the tool", f"{used} ({used / count:.0%})")
    table.add_row("model calls", str(len(generations)))
    table.add_row("sampled tokens (loss mask 1)", f"{sampled:,}")
    table.add_row("prompt tokens (all calls)", f"{prompt:,}")
    table.add_row("prompt tokens from the prefix cache", f"{cached / max(prompt, 1):.1%}")
    table.add_row("sampled tokens per second", f"{sampled / seconds:.0f}")
    table.add_row("seconds", f"{seconds:.1f}")
    console.rule()
    console.print(table)
