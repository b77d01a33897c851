"""Harbor's real trials, verifiers and command, with agents of ours in worlds of ours."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from harbor.utils.trajectory_validator import TrajectoryValidator

from strands_env.check import Player
from strands_env.cli import main
from strands_env.core import Action
from strands_env.core.models import sglang_model_factory
from strands_env.harbor import HarborEnvironment, HarborSandbox, harbor_tasks, rollout_details
from strands_env.sandbox.images import _digest
from strands_sglang import TerminationReason, Trajectory
from strands_sglang.credit import Episode, training_rows
from strands_sglang.testing import ScriptedFault, ScriptedSGLang
from strands_sglang.trainers.atif import from_atif
from support import written_episodes as written
from support.agents import build_chatml_tokenizer, call
from support.oci import Layout, Registry, archive_of_folder, make_root
from support.pages import ROOT, URL, blocks

TASKS = ROOT / "tests/trainers/harbor/tasks"
TRIAL = ROOT / "tests/trainers/harbor/trials/file.jsonl"

ANSWER = ["echo 42 > /app/answer.txt"]
SERVE = (
    "mkfifo /app/request; (while read -r line < /app/request; do echo pong > /app/response; done) > /dev/null 2>&1 &"
)
# What an agent does, by words of its instruction.
COMMANDS = {
    "Copy the word": ["cat words/secret.txt", "cat /app/words/secret.txt > /app/answer.txt"],
    "Start a server": [SERVE],
    "wait for 1000 seconds": [*ANSWER, "sleep 1000"],
    "writes a reward instead": ["echo 1 > /logs/verifier/reward.txt"],
    "the number 1 to": ["echo 1 > /app/first.txt"],
    "the number 2 to": ["echo 2 > /app/second.txt"],
    "the number 42": ANSWER,
}
# By task: the reward or the error, of the oracle and of an agent that does this.
BROKEN = {
    "unhealthy": "HealthcheckError",
    "build-fails": "SandboxBuildFailedError",
    "compose": "SandboxBuildFailedError",
    "gpu": "SandboxBuildFailedError",
    "verifier-nan": "VerifierOutputParseError",
    "verifier-silent": "RewardFileNotFoundError",
    "verifier-endless": "VerifierTimeoutError",
}
SOLVED = ("file", "server", "no-network", "separate-verifier", "health", "slow-agent", "steps")
ORACLE = {**dict.fromkeys(SOLVED, 1.0), **BROKEN, "planted": 0.5}
AGENT = {**ORACLE, "planted": "RewardFileNotFoundError"}


@pytest.fixture(scope="module", autouse=True)
def worlds(tmp_path_factory):
    """Keep worlds and layers of this module in a folder of their own."""
    folder = tmp_path_factory.mktemp("worlds")
    folder.chmod(0o711)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STRANDS_ENV_WORLDS", str(folder))
        patch.setenv("HARBOR_TELEMETRY", "0")
        yield folder


@pytest.fixture(scope="module")
def in_a_world(tmp_path_factory):
    """Provide Harbor's settings of an environment, with a small system under the name of the tasks' base image."""
    root = make_root(tmp_path_factory.mktemp("root"))
    return {
        "import_path": "strands_env.harbor:WorldEnvironment",
        "kwargs": {"images": {"debian:12-slim": str(root)}},
    }


@pytest.fixture(scope="module")
def tokenizer():
    return build_chatml_tokenizer()


def policy(request):
    """Do what the latest instruction says, command by command."""
    latest = max((request.text.rfind(words), words) for words in COMMANDS)
    commands = COMMANDS[latest[1]]
    done = request.text[latest[0] :].count("<tool_response>")
    return call("shell", command=commands[done]) if done < len(commands) else "It is done."


@pytest.fixture(scope="module")
def server(tokenizer, tmp_path_factory):
    """Provide a scripted server, its address, and the folder of its tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    scripted = ScriptedSGLang(tokenizer, policy, weight_version="7")
    with scripted.serve() as base_url:
        yield scripted, base_url, folder


@pytest.fixture(scope="module")
def harbor_run(tmp_path_factory, in_a_world):
    """Provide a function that runs `harbor run`, and returns the folders of its trials by task."""

    def run(*arguments, tasks=TASKS, attempts=1):
        folder = tmp_path_factory.mktemp("job")
        images = json.dumps(in_a_world["kwargs"]["images"])
        where = ("-e", in_a_world["import_path"], "--ek", f"images={images}", "-p", str(tasks), "-o", str(folder))
        command = [Path(sys.executable).with_name("harbor"), "run", *where, "-k", str(attempts), "-n", "4", *arguments]
        ran = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        trials = {}
        for path in folder.glob("*/*/result.json"):
            trials.setdefault(json.loads(path.read_text())["task_name"].split("/")[-1], []).append(path.parent)
        return trials

    return run


def outcome_of(trial):
    """The reward of a trial, or the name of its error if it has none."""
    result = json.loads((trial / "result.json").read_text())
    if result["verifier_result"] is not None:
        return result["verifier_result"]["rewards"]["reward"]
    return result["exception_info"]["exception_type"]


# --- harbor run ---


def test_the_oracle_solves_what_can_be_solved(harbor_run):
    trials = harbor_run("-a", "oracle")
    assert {name: outcome_of(trial) for name, [trial] in trials.items()} == ORACLE


def test_who_does_nothing_solves_nothing(harbor_run):
    trials = harbor_run("-a", "nop")
    expected = {**dict.fromkeys(SOLVED, 0.0), **BROKEN, "planted": "RewardFileNotFoundError"}
    assert {name: outcome_of(trial) for name, [trial] in trials.items()} == expected


@pytest.fixture(scope="module")
def agents_trials(harbor_run, server):
    """Provide the trials of an agent on all tasks."""
    _, base_url, folder = server
    model = ("--ak", f"server={base_url}", "--ak", f"tokenizer={folder}")
    return harbor_run("-a", "strands_env.harbor:StrandsAgent", *model)


def test_an_agent_gets_the_rewards_of_what_it_does(agents_trials):
    assert {name: outcome_of(trial) for name, [trial] in agents_trials.items()} == AGENT


def recordings(trials):
    for [trial] in trials.values():
        for path in trial.rglob("strands-sglang.trajectory.jsonl"):
            yield trial, path


def test_a_trial_has_the_tokens_that_were_sampled(agents_trials):
    recorded = 0
    for trial, path in recordings(agents_trials):
        trajectory = Trajectory.load(path)
        result = json.loads((trial / "result.json").read_text())
        steps = {step["step_name"]: step for step in result["step_results"] or ()}
        [detail] = steps.get(path.parent.parent.name, result)["agent_result"]["rollout_details"]
        turns = [turn for turn in trajectory.turns if turn.is_answered]
        assert detail["completion_token_ids"] == [list(turn.output_ids) for turn in turns]
        assert [len(one) for one in detail["logprobs"]] == [len(turn.output_ids) for turn in turns]
        whole = [turn.token_ids() for turn in turns]
        pairs = zip(detail["prompt_token_ids"], detail["completion_token_ids"], strict=True)
        assert [prompt + sampled for prompt, sampled in pairs] == whole
        assert detail["extra"]["weight_versions"] == [[["7", 0, len(turn.output_ids)]] for turn in turns]
        recorded += len(turns)
    assert recorded > 20


@pytest.mark.parametrize("number", range(10))
def test_details_have_each_sequence_of_summaries_forks_and_subagents(number):
    episodes = [one for group in written.groups_of_jars() for one in group.episodes]
    trajectory = episodes[number].trajectory
    branches = trajectory.branches()
    details = rollout_details(trajectory)
    assert len(details) == len(branches)
    main = trajectory.main_leaf()
    leaves = sorted((leaf for leaf, _ in branches), key=lambda leaf: leaf is not main)
    for detail, leaf in zip(details, leaves, strict=True):
        assert detail["extra"]["turn"] == [turn.index for turn in leaf.path() if turn.is_answered]
        for at, turn in enumerate(turn for turn in leaf.path() if turn.is_answered):
            assert detail["prompt_token_ids"][at] + detail["completion_token_ids"][at] == turn.token_ids()
            assert len(detail["logprobs"][at]) == len(turn.output_ids)
    trained = sum(sum(map(sum, detail["extra"]["loss_mask"])) for detail in details)
    assert trained == sum(sum(tokens.loss_mask) for _, tokens in branches)


def test_a_timeout_keeps_what_was_sampled(agents_trials):
    [trial] = agents_trials["slow-agent"]
    result = json.loads((trial / "result.json").read_text())
    assert result["exception_info"]["exception_type"] == "AgentTimeoutError"
    assert len(result["agent_result"]["rollout_details"][0]["completion_token_ids"]) == 2
    assert result["agent_result"]["metadata"]["outcome"] == "cancelled"


def test_harbor_accepts_each_document_and_it_has_the_rows_of_its_episode(agents_trials):
    documents = 0
    for _, path in recordings(agents_trials):
        document = path.with_name("trajectory.json")
        validator = TrajectoryValidator()
        assert validator.validate(document), validator.get_errors()
        again = training_rows([from_atif(json.loads(document.read_text()), reward=1.0)], baseline=None).rows
        rows = training_rows([Episode(Trajectory.load(path), 1.0, None)], baseline=None).rows
        assert [list(row.tokens.token_ids) for row in again] == [list(row.tokens.token_ids) for row in rows]
        documents += 1
    assert documents > 8


def test_a_broken_task_fails_alone(harbor_run, tmp_path):
    for name, link in (("file", "file"), ("gpu", "gpu")):
        (tmp_path / link).symlink_to(TASKS / name)
    trials = harbor_run("-a", "nop", tasks=tmp_path, attempts=25)
    assert [outcome_of(trial) for trial in trials["file"]] == [0.0] * 25
    assert [outcome_of(trial) for trial in trials["gpu"]] == ["SandboxBuildFailedError"] * 25


# --- tasks as environments ---


@pytest.fixture
def environment(server, tokenizer, in_a_world):
    """Provide a function that makes an environment for Harbor's tasks."""

    def make(answers=None, **options):
        scripted = server[0] if answers is None else ScriptedSGLang(tokenizer, answers)
        factory = sglang_model_factory(tokenizer=tokenizer, client=scripted.client())
        return HarborEnvironment(factory, environment=in_a_world, **options)

    return make


def task(name):
    [action] = harbor_tasks(TASKS / name)
    return action


@pytest.mark.parametrize("name", ["file", "server", "no-network", "separate-verifier", "health", "steps"])
async def test_an_episode_has_the_reward_of_harbors_verifier(environment, name, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = await environment().step(task(name))
    assert (result.termination_reason, result.error) == (TerminationReason.TASK_COMPLETE, None)
    assert result.reward.reward == 1.0 and result.reward.info["rewards"]["reward"] == 1
    trajectory = result.observation.trajectory
    [row] = training_rows([Episode(trajectory, result.reward.reward, name)], baseline=None).rows
    assert sum(row.tokens.loss_mask) == sum(len(turn.output_ids) for turn in trajectory.turns)
    assert not list(tmp_path.glob("trials-*"))


@pytest.mark.parametrize("name", ["unhealthy", "build-fails", "compose", "gpu"])
async def test_a_task_that_cannot_start_has_no_reward(environment, name):
    result = await environment().step(task(name))
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None
    assert BROKEN[name] in result.error


@pytest.mark.parametrize("name", ["verifier-nan", "verifier-silent", "verifier-endless", "planted"])
async def test_a_verifier_that_fails_gives_no_reward(environment, name):
    result = await environment().step(task(name))
    assert result.termination_reason is TerminationReason.TASK_COMPLETE and result.reward is None
    assert AGENT[name] in result.reward_error and not result.reward_error_is_infrastructure
    assert "trials-" not in result.reward_error  # so that equal causes are counted together


async def test_the_time_of_a_task_begins_with_its_agent(environment):
    result = await environment(episode_timeout=0.001).step(task("unhealthy"))  # which takes longer
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    result = await environment().step(task("slow-agent"))
    assert (result.termination_reason, result.reward) == (TerminationReason.TIMEOUT, None)
    assert len(result.observation.trajectory.turns) == 2


async def test_an_environment_runs_one_episode_at_a_time(environment):
    one = environment()
    first = asyncio.create_task(one.step(task("file")))
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="an episode runs"):
        await one.step(task("file"))
    assert (await first).reward.reward == 1.0
    assert (await one.step(task("file"))).reward.reward == 1.0
    assert one.identity() == environment(trials="other").identity()


async def test_a_cancelled_episode_leaves_nothing(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    one = environment()
    running = asyncio.create_task(one.step(task("slow-agent")))
    while one.sandbox is None:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not list(tmp_path.glob("trials-*"))
    assert one.last_result.termination_reason is TerminationReason.CANCELLED


async def test_a_server_that_fails_leaves_nothing_behind(environment, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result = await environment([ScriptedFault("drop")] * 20).step(task("file"))
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR and result.reward is None
    assert not list(tmp_path.glob("trials-*"))


async def test_an_action_that_is_no_task_is_refused(environment):
    with pytest.raises(ValueError, match="not a task of Harbor"):
        await environment().step(Action(message="Hello"))
    with pytest.raises(ValueError, match="no task.toml"):
        harbor_tasks(ROOT / "tests")


def test_the_guides_snippets_run(server, in_a_world, tmp_path, monkeypatch, capsys):
    _, base_url, folder = server
    (tmp_path / "tasks").symlink_to(TASKS / "file")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strands_env.harbor.environment.IN_A_WORLD", in_a_world)
    namespace = {"__name__": "__docs__", "episode": Episode(Trajectory.load(TRIAL), 1.0, "g")}
    for block in blocks("python", ROOT / "docs/guides/harbor.md"):
        block.run(namespace, lambda text: text.replace("Qwen/Qwen3-8B", str(folder)).replace(URL, base_url))
    assert "strands/file task_complete reward=1.0" in capsys.readouterr().out
    assert namespace["again"].reward == 1.0


def test_the_tutorials_tasks_are_checked_and_trained(tokenizer, in_a_world, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("strands_env.harbor.environment.IN_A_WORLD", in_a_world)
    page = ROOT / "docs/start/harbor-task.md"
    module = {}
    for block in blocks("python", page):
        block.run(module)
    [check] = [block.text for block in blocks("bash", page) if block.text.startswith("strands-env check")]
    assert main(check.split()[1:]) == 0
    assert capsys.readouterr().out in [block.text for block in blocks("text", page)]

    held_out = module["held_out"](SimpleNamespace(held_out=24))
    trained = list(module["training"](None))
    assert len({task.message for task in (*held_out, *trained)}) == 24 + 100
    for wrong, reward in (("", 1.0), ("1", 0.0)):
        product = held_out[0].message.removeprefix("Write ").partition(" to ")[0]
        answers = [call("shell", command=f"echo $(({product}{wrong})) > /app/answer.txt"), "It is written."]
        factory = sglang_model_factory(tokenizer=tokenizer, client=ScriptedSGLang(tokenizer, answers).client())
        result = asyncio.run(module["environment"](factory).step(held_out[0]))
        assert result.reward.reward == reward
        [row] = training_rows([result.episode(group="g")], baseline=None).rows
        assert sum(row.loss_mask) == sum(len(turn.output_ids) for turn in result.observation.trajectory.turns)


def commands(*given):
    """Answers that run shell commands, and an end."""
    return [*(call("shell", command=command) for command in given), "It is done."] * 3


async def test_an_environment_that_dies_is_no_wrong_answer(environment, monkeypatch):
    one = environment(commands("echo 42 > /app/answer.txt", "true"))
    execute = HarborSandbox._exec

    async def dying(self, command, *rest):
        if command == "true":
            await self.environment.world.stop()
        return await execute(self, command, *rest)

    monkeypatch.setattr(HarborSandbox, "_exec", dying)
    result = await one.step(task("health"))
    assert (result.termination_reason, result.reward) == (TerminationReason.INFRASTRUCTURE_ERROR, None)


@pytest.mark.parametrize(
    "sabotage", ["rm -rf /tests; touch /tests", "rm -rf /logs; touch /logs", "rm /usr/bin/sh /bin/sh"]
)
async def test_an_agent_cannot_make_its_failure_the_machines(environment, sabotage):
    result = await environment(commands(sabotage)).step(task("health"))
    assert result.reward is None or result.reward.reward == 0.0
    assert not result.reward_error_is_infrastructure
    assert result.termination_reason is TerminationReason.TASK_COMPLETE


async def test_an_agent_cannot_hang_what_follows_it(environment, monkeypatch):
    monkeypatch.setattr("strands_env.harbor.agent.LEAVE_S", 1)
    slow = "printf '#!/bin/sh\\nexec sleep 1000\\n' > /usr/bin/rm; chmod +x /usr/bin/rm; cp /usr/bin/rm /bin/rm"
    result = await asyncio.wait_for(environment(commands(slow), episode_timeout=20).step(task("verifier-endless")), 60)
    assert result.reward is None and not result.reward_error_is_infrastructure


async def test_an_agent_cannot_hang_its_next_step(environment, folder, monkeypatch):
    monkeypatch.setattr("strands_env.harbor.agent.LEAVE_S", 1)
    slow = "printf '#!/bin/sh\\nexec sleep 1000\\n' > /usr/bin/ls; chmod +x /usr/bin/ls"
    answers = [*commands(slow)[:2], *commands("true")]
    result = await asyncio.wait_for(environment(answers).step(folder("steps")), 60)
    assert (result.termination_reason, result.reward.reward) == (TerminationReason.TASK_COMPLETE, 0.0)


async def test_files_are_read_and_written_whole(environment):
    seen = {}

    class Looking(HarborEnvironment):
        async def solve(self):
            sandbox = self.get_sandbox()
            content = bytes(range(256)) * 1000
            await sandbox.write_file("/app/deep/file", content)
            seen["whole"] = await sandbox.read_file("/app/deep/file") == content
            with pytest.raises(FileNotFoundError):
                await sandbox.read_file("/app/none")
            with pytest.raises(OSError):
                await sandbox.write_file("/proc/none/file", b"x")
            seen["long"] = len((await sandbox.execute("cat /app/deep/file | base64")).stdout)

    one = environment()
    looking = Looking(one.model_factory, environment=one.environment)
    player = Player(lambda: looking.solve())
    looking.model_factory = lambda: player
    await looking.step(task("health"))
    assert seen["whole"] and seen["long"] < 40_000


@pytest.fixture
def folder(tmp_path):
    """Provide a function that copies a task with other files, and returns its action."""

    def changed(name, **files):
        made = tmp_path / name
        shutil.copytree(TASKS / name, made)
        for path, text in files.items():
            target = made / path.replace("__", "/")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
        [action] = harbor_tasks(made)
        return action

    return changed


@pytest.mark.parametrize(("whose", "reward"), [("agent", 0.0), ("image", 1.0)])
async def test_the_agents_files_are_not_beside_the_verifiers_tests(environment, folder, whose, reward):
    planted = "mkdir -p /tests; echo 1 > /tests/conftest.py"
    verifier = "#!/bin/bash\n(cat /tests/conftest.py || echo 0) > /logs/verifier/reward.txt\n"
    image = f"FROM debian:12-slim\nWORKDIR /app\n{'RUN ' + planted if whose == 'image' else ''}\n"
    task = folder("health", **{"tests__test.sh": verifier, "environment__Dockerfile": image})
    result = await environment(commands(planted if whose == "agent" else "true")).step(task)
    assert (result.reward_error, result.reward.reward) == (None, reward)


async def test_nor_in_a_later_step(environment, folder):
    verifier = "#!/bin/bash\n(cat /tests/conftest.py || echo 0) > /logs/verifier/reward.txt\n"
    steps = {f"steps__{step}__tests__test.sh": verifier for step in ("first", "second")}
    planted = "mkdir -p /tests; echo 1 > /tests/conftest.py"
    result = await environment([*commands("true")[:2], *commands(planted)]).step(folder("steps", **steps))
    assert (result.reward_error, result.reward.reward) == (None, 0.0)


async def test_a_health_check_after_the_agent_may_fail_because_of_it(environment, folder):
    task = folder("steps")
    toml = Path(task.task_context.harbor_task) / "task.toml"
    toml.write_text(toml.read_text() + '[steps.healthcheck]\ncommand = "test -e /gone"\nretries = 1\n')
    result = await environment(commands("true")).step(task)
    assert result.termination_reason is TerminationReason.TASK_COMPLETE and result.reward is None
    assert "HealthcheckError" in result.reward_error and not result.reward_error_is_infrastructure


async def test_a_root_is_not_read_by_each_episode(environment, in_a_world, monkeypatch):
    read = []
    monkeypatch.setattr("strands_env.sandbox.images._digest", lambda *given: read.append(given) or _digest(*given))
    [root] = in_a_world["kwargs"]["images"].values()
    results = [await environment(commands("true")).step(task("health")) for _ in range(2)]
    assert [result.reward.reward for result in results] == [0.0, 0.0]
    assert sum(str(path) == root for path, _ in read) <= 1


async def test_a_registry_is_not_asked_by_each_episode(environment, folder, tmp_path):
    layout = Layout(tmp_path / "layout")
    layout.add("1", archive_of_folder(make_root(tmp_path / "root")), WorkingDir="/app")
    with Registry(layout) as registry:
        pulled = folder("health", environment__Dockerfile="")
        toml = Path(pulled.task_context.harbor_task) / "task.toml"
        toml.write_text(toml.read_text() + f'[environment]\ndocker_image = "127.0.0.1:{registry.port}/team/app:1"\n')
        results = [await environment(commands("true")).step(pulled) for _ in range(2)]
        assert [result.reward.reward for result in results] == [0.0, 0.0]
        assert sum("/manifests/" in path for path in registry.asked) == 2  # the first one finds out how to authorize


@pytest.mark.parametrize("step", ["first", "second"])
async def test_a_step_that_fails_has_no_reward(environment, folder, step):
    silent = folder("steps", **{f"steps__{step}__tests__test.sh": "#!/bin/bash\n"})
    result = await environment().step(silent)
    assert result.reward is None and "RewardFileNotFoundError" in result.reward_error


async def test_a_setup_that_fails_is_the_machines(environment, folder):
    broken = folder("steps", steps__first__workdir__setup__sh="")
    (Path(broken.task_context.harbor_task) / "steps/first/workdir/setup.sh").write_text("exit 3\n")
    result = await environment().step(broken)
    assert result.termination_reason is TerminationReason.INFRASTRUCTURE_ERROR
    assert "exit" in result.error or "setup.sh" in result.error


async def test_grading_between_steps_is_not_the_agents_time(environment, folder):
    verifier = "#!/bin/bash\nsleep 3\necho 1 > /logs/verifier/reward.txt\n"
    slow = folder("steps", steps__first__tests__test__sh="")
    (Path(slow.task_context.harbor_task) / "steps/first/tests/test.sh").write_text(verifier)
    toml = Path(slow.task_context.harbor_task) / "task.toml"
    toml.write_text(toml.read_text() + "\n[agent]\ntimeout_sec = 1.5\n")
    one = environment()
    result = await one.step(slow)
    assert one.episode_timeout == 3.0
    assert (result.termination_reason, result.reward.reward) == (TerminationReason.TASK_COMPLETE, 1.0)


async def test_a_task_that_harbor_refuses_fails_alone(environment, tmp_path):
    for name in ("file", "health"):
        shutil.copytree(TASKS / name, tmp_path / name)
    (tmp_path / "file/task.toml").write_text("schema_version = [")
    results = [await environment().step(action) for action in harbor_tasks(tmp_path)]
    assert [result.termination_reason for result in results] == [
        TerminationReason.INFRASTRUCTURE_ERROR,
        TerminationReason.TASK_COMPLETE,
    ]
    assert "Harbor refuses the task" in results[0].error


def test_what_an_environment_does_not_take_is_refused(environment):
    with pytest.raises(ValueError, match="--reward env"):
        environment(reward_fn=object())
    with pytest.raises(ValueError, match="bogus"):
        HarborEnvironment(None, environment={"type": "bogus"})
    assert environment().budgets.max_tool_iterations is None
