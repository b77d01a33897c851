import signal
import subprocess
import sys
from pathlib import Path

from strands_sglang import SGLangClient, local
from support.processes import has_ended


def descendants(pid):
    """Ids of all processes that a process started, and of those that they started."""
    children = {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }
    return children.union(*(descendants(child) for child in children))


async def test_serve_starts_a_real_server_that_answers_and_leaves_no_process_after_ctrl_c(sglang_python):
    model = local.ensure_tiny_qwen3(sglang_python)
    command = [sys.executable, "-m", "strands_sglang.cli", "serve", "--model", str(model), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            base_url = process.stdout.readline().strip()
            async with SGLangClient(base_url) as client:
                assert await client.health()
                assert (await client.model_info())["model_path"] == str(model)
                answer = await client.generate(input_ids=[1, 2, 3], sampling_params={"max_new_tokens": 4})
            assert 0 < len(answer["output_ids"]) <= 4
            pids = descendants(process.pid)
            assert len(pids) >= 3  # the guard, the server, its scheduler and more
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert all(has_ended(pid) for pid in pids)
